"""Changing the plan of a model between two training steps, on the same processes and without a checkpoint.

The change has phases:

- validate: check that the plan fits this world, and that the optimizer's states can be sharded anew.
- prepare: restore the user's modules without values, and examine them.
- groups: create the process groups of the new plan.
- build: split the modules by the new plan, without values.
- carry: send the items of each tensor from the ranks that hold them to the ranks that will, and verify checksums.
- commit: replace the old split by the new one.

After each phase all ranks agree that it succeeded on every rank; otherwise every rank restores the old split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError, LaunchError
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.process_groups import ProcessGroups
from galvatron_lite.plans.io import check_runs
from galvatron_lite.plans.schema import Mode, Plan
from galvatron_lite.runtime.checkpoint.plain import generators, put_generators, share_generators
from galvatron_lite.runtime.compiled import check_compile
from galvatron_lite.runtime.mesh import Meshes, build_meshes
from galvatron_lite.runtime.parallelize import build
from galvatron_lite.runtime.parameters.materialize import Materializer
from galvatron_lite.runtime.parameters.pieces import (
    Entries,
    LocalShard,
    Parallel,
    complete_shard,
    held_buffers,
    held_parameters,
    held_states,
    home_of,
    parameter_name,
)
from galvatron_lite.runtime.peers import everyone, shares_samples
from galvatron_lite.runtime.preparation import Prepared, SetupOptions, make_pipeline_groups
from galvatron_lite.runtime.reshard.optimizer import (
    OptimizerReport,
    Regrouping,
    States,
    apply,
    blank_states,
    merged,
    regroup,
    report_of,
)
from galvatron_lite.runtime.reshard.original import Changes
from galvatron_lite.runtime.reshard.transfer import (
    LocalTensors,
    Released,
    TensorTransfer,
    allocate,
    available_bytes,
    moved_tensors,
    release,
    together,
)
from galvatron_lite.runtime.stages import StageRuntime

if TYPE_CHECKING:
    from galvatron_lite.runtime.engine import ParallelModel

Observe = Callable[[str], None]
"""Called with the name of each phase when it begins; an error that it raises fails the phase."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Resharded:
    """The costs of a change of plan."""

    seconds: float  # of the change
    moved_bytes: int  # sent by this rank to others
    # peak bytes of parameters, states, buffers and messages on this rank, computed from their sizes; there are no
    # gradients or activations during the change
    worst_bytes: int
    by_turns: bool  # whether old tensors were released as new ones arrived, because both did not fit in memory
    phases: dict[str, float]  # seconds of each phase


def reshard(
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    scheduler: Any = None,
    *,
    batch: Any = None,
    memory: int | None = None,
    observe: Observe | None = None,
) -> Resharded:
    """Change the plan of a model. All ranks call it, between two training steps.

    Parameters, the optimizer's states, buffers, averages and random states do not change by a bit. The model and the
    optimizer stay the same objects, with their groups and learning rates.

    Args:
        parallel: the model, split by its current plan.
        optimizer: over its parameters.
        plan: the new plan, for the same number of processes.
        scheduler: of the optimizer's learning rate; required if the optimizer gets more groups.
        batch: an example batch, if its shapes change with the plan.
        memory: bytes that the change may use on this rank; default: the free memory.
        observe: called with the name of each phase; an error that it raises fails the phase.

    Raises:
        InputError: the plan does not fit, there are gradients, or a state cannot be sharded anew. Nothing is changed.
        LaunchError: the plan is for another number of processes. Nothing is changed.
        SwitchError: a rank failed. Every rank has its old plan.
    """
    example = parallel.origin.batch if batch is None else batch
    averages = [(one, one.full_state_dict()) for reference in parallel.averages if (one := reference()) is not None]
    with ExitStack() as undo:
        change = _Change(parallel, optimizer, plan, scheduler, example, observe or (lambda _: None), undo)
        transfer = change.run(memory)
    for average, state in averages:
        average.follow(state)
    phases = change.phase_seconds()
    return Resharded(sum(phases.values()), transfer.moved, transfer.worst, transfer.by_turns, phases)


@dataclass(frozen=True, slots=True)
class _NewSplit:
    """The model as the new plan splits it, without values."""

    entries: Entries
    runtimes: list[StageRuntime]
    gradients: Released  # memory of gradient buffers


@dataclass(slots=True)
class _Change:
    """A change of plan."""

    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    plan: Plan
    scheduler: Any
    batch: Any  # an example
    observe: Observe
    undo: ExitStack  # restores the old split, unless the change is committed
    starts: list[tuple[str, float]] = field(default_factory=list)  # name and starting time of each phase

    def run(self, memory: int | None) -> TensorTransfer:
        """Change the plan."""
        parallel, plan, undo = self.parallel, self.plan, self.undo
        origin, device = parallel.origin, parallel.device
        old_groups, groups, random = origin.options.groups, ProcessGroups(origin.options.groups), generators()
        options = origin.options_of(plan, groups)
        undo.callback(groups.destroy, kept=old_groups)
        undo.callback(put_generators, random)
        for runtime in parallel.runtimes:
            runtime.updates.publish()
        report, old = self._phase("validate", self._validate)
        reports = everyone((report, old.reports))
        report, before = merged([report for report, _ in reports]), [tensors for _, tensors in reports]
        changes, prepared = self._phase("prepare", lambda: self._prepare(report, options))
        self._phase("groups", lambda: None)
        meshes = build_meshes(plan, device.type, groups)
        make_pipeline_groups(prepared, groups)
        shapes = {name: tensor.shape for tensors in before for name, tensor in tensors.items()}
        split, tensors, states, regrouping = self._phase(
            "build", lambda: self._build(report, shapes, prepared, meshes, options)
        )
        after = everyone(self._phase("carry", lambda: tensors.reports))
        transfer = TensorTransfer(moved_tensors(before, after), old, tensors, device, self.observe)
        undo.callback(transfer.undo)
        transfer.run(available_bytes(device) if memory is None else memory)
        for runtime in split.runtimes:
            runtime.updates.take()
        if shares_samples(plan) and not shares_samples(parallel.plan):
            share_generators(random, device)
        self._phase("commit", lambda: None)

        undo.pop_all()
        copies = self._adopt(split, options)
        apply(self.optimizer, regrouping, states, self.scheduler)
        origin.options, origin.batch = options, self.batch
        origin.unsplit.take_in(changes)
        origin.settle()
        put_generators(random)
        transfer.commit()
        release(copies)
        old_groups.destroy(kept=groups)
        groups.settle()
        return transfer

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase; the last one ends now."""
        ends = [*(start for _, start in self.starts[1:]), time.perf_counter()]
        return {phase: end - start for (phase, start), end in zip(self.starts, ends, strict=True)}

    def _phase(self, phase: str, work: Callable[[], Result]) -> Result:
        self.starts.append((phase, time.perf_counter()))

        def observed() -> Result:
            self.observe(phase)
            return work()

        return together(phase, observed)

    def _validate(self) -> tuple[OptimizerReport, LocalTensors]:
        """Check that the plan fits this world, and that this rank's tensors can be sharded anew."""
        parallel, optimizer = self.parallel, self.optimizer
        _check_plan(self.plan, parallel)
        if parallel.plan_check is not None:
            parallel.plan_check(self.plan)
        _check_between_steps(parallel, optimizer, self.scheduler)
        for module in (module for runtime in parallel.runtimes for module in runtime.sharded.zero_modules):
            module.reshard()
        report = report_of(optimizer, _names(parallel))
        states = _sharded_states(report, held_states(parallel, optimizer.state))
        buffers = [*held_buffers(parallel), *_unsaved_buffers(parallel, parallel.origin.layers)]
        return report, LocalTensors([*held_parameters(parallel), *states], buffers)

    def _prepare(self, report: OptimizerReport, options: SetupOptions) -> tuple[Changes, Prepared]:
        """Restore the user's modules without values but with the user's changes, and prepare them for the plan."""
        origin = self.parallel.origin
        assert origin.split is not None
        changes = origin.split.changes()
        self.undo.callback(origin.everything().restore)
        self.undo.callback(allocate, _release_gradients(self.parallel.runtimes))
        origin.unsplit.restore()
        changes.apply()
        names = self.parallel.entries.names
        for name, parameter in origin.model.named_parameters():
            parameter.requires_grad_(report.trained.get(names.get(name, name), parameter.requires_grad))
        return changes, origin.prepare(self.plan, options, self.batch, dist.get_rank())

    def _build(
        self,
        report: OptimizerReport,
        shapes: Mapping[str, tuple[int, ...]],
        prepared: Prepared,
        meshes: Meshes,
        options: SetupOptions,
    ) -> tuple[_NewSplit, LocalTensors, States, Regrouping]:
        """Split the modules by the plan, without values; ``shapes`` are those of all full tensors."""
        origin, parallel = self.parallel.origin, self.parallel
        materializers = dict[nn.Module, _BlankLayers]()

        def place(model: nn.Module, layer: Layer) -> None:
            if model not in materializers:
                materializers[model] = _BlankLayers(model, origin.layers, parallel.device, shapes)
            materializers[model].place(layer)

        runtimes = build(origin.model, prepared, meshes, options, place)
        self.undo.callback(_close, runtimes)
        split = _NewSplit(parallel.entries, runtimes, _release_gradients(runtimes))
        names = _names(split)
        regrouping = regroup(self.optimizer, report, names, self.scheduler)
        states = blank_states(report, names)
        shards = _sharded_states(report, held_states(split, states))
        tensors = LocalTensors([*held_parameters(split), *shards], _blank_buffers(split))
        for shard in shards:
            tensors.blank.setdefault(shard.name, []).extend(release([shard.tensor]))
        return split, tensors, states, regrouping

    def _adopt(self, split: _NewSplit, options: SetupOptions) -> list[Tensor]:
        """Replace the old split by the new one, and return the copies of parameters that the old one held."""
        parallel = self.parallel
        parameters = [one for runtime in parallel.runtimes for one in runtime.owned]
        copies = [one.host.copy.detach() for one in parameters if one.host]
        copies += [one.parameter.detach() for one in parameters if one.held is not one.parameter]
        _close(parallel.runtimes)
        allocate(split.gradients)
        parallel.adopt(self.plan, split.runtimes, options)
        return copies


def _check_plan(plan: Plan, parallel: ParallelModel) -> None:
    """Refuse plans that a model cannot change to while it trains."""
    world = dist.get_world_size()
    if plan.devices != world:
        raise LaunchError(
            f"The plan is for {plan.devices} device(s), but {world} process(es) train. Give a plan for {world}, or "
            "save, start as many processes as the plan is for, and load."
        )
    for each, field_name in ((parallel.plan, "present plan"), (plan, "plan")):
        if each.mode is not Mode.TRAINING or each.cyclic is not None or each.branches:
            remedy = "Plans for training without delayed gradients and branches can be changed; else save and load."
            raise InputError(field_name, each.model, remedy)
    check_runs(plan)
    check_compile(parallel.origin.options.compile, plan)


def _check_between_steps(parallel: ParallelModel, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Raise ``InputError`` during a step, or for the scheduler of another optimizer."""
    for one in (one for runtime in parallel.runtimes for one in runtime.owned):
        if one.updated.grad is not None or one.gradient is not None:
            remedy = "Change the plan between steps: after optimizer.step(), call optimizer.zero_grad()."
            raise InputError("gradients", one.names[0], remedy)
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise InputError("scheduler", type(scheduler).__name__, "Give the scheduler of this optimizer.")


class _BlankLayers(Materializer):
    """Allocates parameters and buffers of layers without values; ``shapes`` of buffers may differ from the model's."""

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], device: torch.device, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        super().__init__(model, layers, device)
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._shapes = shapes

    def _place_tensors(self, module: nn.Module) -> list[str]:
        for _, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
                blank = nn.Parameter(empty, parameter.requires_grad)
                vars(blank).update(vars(parameter))
                self._replace(parameter, blank)
        for name, buffer in list(module.named_buffers(recurse=False)):
            path = f"{self._paths[id(module)]}.{name}".lstrip(".")
            # zeros, as of running statistics a rank may receive its channels only
            zeros = torch.zeros(self._shapes.get(path, tuple(buffer.shape)), dtype=buffer.dtype, device=self._device)
            setattr(module, name, zeros)
        return []


def _unsaved_buffers(parallel: Parallel, layers: Sequence[Layer]) -> Iterator[LocalShard]:
    """The buffers outside ``state_dict()`` that belong to this rank's layers or to no layer."""
    for index, runtime in enumerate(parallel.runtimes):
        layer_names = {placed.layer.name for placed in runtime.stage} | ({""} if index == 0 else set())
        for name, buffer in runtime.model.named_buffers():
            if name not in parallel.entries.names and home_of(name, layers) in layer_names:
                yield complete_shard(name, buffer)


def _blank_buffers(parallel: Parallel) -> list[LocalShard]:
    """The buffers of a new split: those of the model's state as this rank holds them, and all others in full."""
    shards, names = {id(buffer.tensor): buffer for buffer in held_buffers(parallel)}, parallel.entries.names
    return [
        shards.get(id(buffer)) or complete_shard(names.get(name, name), buffer)
        for runtime in parallel.runtimes
        for name, buffer in runtime.model.named_buffers()
        if not buffer.is_meta
    ]


def _names(parallel: Parallel) -> dict[nn.Parameter, str]:
    """The names of the parameters that the optimizer updates on this rank, in the order of the layers."""
    return {one.updated: parameter_name(parallel, one) for runtime in parallel.runtimes for one in runtime.owned}


def _sharded_states(report: OptimizerReport, states: Iterable[LocalShard]) -> list[LocalShard]:
    """The states of the optimizer that are sharded as their parameters are."""
    names = {f"{name}/{key}" for name, state in report.states.items() for key, entry in state.items() if entry.dtype}
    return [state for state in states if state.name in names]


def _close(runtimes: Iterable[StageRuntime]) -> None:
    for runtime in runtimes:
        runtime.reducer.close()


def _release_gradients(runtimes: Iterable[StageRuntime]) -> Released:
    return release([buffer for runtime in runtimes for buffer in runtime.reducer.buffers])
