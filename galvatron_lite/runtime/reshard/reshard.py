"""Training on under another plan, on the same processes, without a checkpoint.

Phases: validate: the plan fits this world, and the optimizer's states can be cut. prepare: the user's modules are
restored without values, and examined. groups: process groups of the new plan. build: the new split, without values.
carry: every tensor moves from the boxes that ranks hold to those that they are to hold; checksums of complete tensors
before and after agree. commit. After each phase the ranks agree whether it succeeded on all; if not, every rank goes
back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

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
"""Called at the start of every phase, with its name; an error that it raises fails the phase."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Resharded:
    """What a change of plan took."""

    seconds: float  # from the call to its end
    moved_bytes: int  # that this rank sent to others
    # of parameters, states, buffers and messages on this rank at the worst moment (computed from their sizes);
    # gradients and activations do not exist then
    worst_bytes: int
    by_turns: bool  # whether old tensors were released as new ones arrived, because both plans' did not fit
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
    """Train on under another plan; every rank calls it alike, between two steps.

    Parameters, the optimizer's states, buffers, averages and random states stay equal bit by bit. The model and the
    optimizer stay the same objects, with their groups and learning rates.

    Args:
        parallel: the model, split by its present plan.
        optimizer: over its parameters.
        plan: the other plan, for as many processes.
        scheduler: of the optimizer's learning rate; needed where the optimizer gets more groups.
        batch: an example batch of other shapes, where the plan is for those.
        memory: bytes of this rank that may be taken meanwhile; the free memory if not given.
        observe: called with the name of every phase; an error that it raises fails the phase.

    Raises:
        InputError: the plan does not fit, gradients are pending, or a state cannot be cut. The old plan stays.
        LaunchError: the plan is for another number of processes. The old plan stays.
        SwitchError: a rank failed. Every rank is on the plan it had.
    """
    example = parallel.origin.batch if batch is None else batch
    averages = [(one, one.full_state_dict()) for reference in parallel.averages if (one := reference()) is not None]
    with ExitStack() as undo:
        change = _Change(parallel, optimizer, plan, scheduler, example, observe or (lambda _: None), undo)
        transfer = change.run(memory)
    for one, state in averages:
        one.follow(state)
    phases = change.phases()
    return Resharded(sum(phases.values()), transfer.moved, transfer.worst, transfer.by_turns, phases)


@dataclass(frozen=True, slots=True)
class _View:
    """The model as another plan splits it."""

    entries: Entries
    runtimes: Sequence[StageRuntime]


@dataclass(frozen=True, slots=True)
class _Built:
    """The new split, without values."""

    runtimes: list[StageRuntime]
    gradients: Released  # memory of gradient buffers
    tensors: LocalTensors
    states: States  # of the optimizer
    regrouping: Regrouping  # of its groups


@dataclass(slots=True)
class _Change:
    """A change of plan; ``undo`` gets the steps of a roll-back, and is emptied by the commit."""

    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    plan: Plan
    scheduler: Any
    batch: Any  # an example
    observe: Observe
    undo: ExitStack
    starts: list[tuple[str, float]] = field(default_factory=list)  # of phases, and when they began

    def run(self, memory: int | None) -> TensorTransfer:
        """Change the plan."""
        parallel, plan, undo = self.parallel, self.plan, self.undo
        origin, device = parallel.origin, parallel.device
        former, groups, random = origin.options.groups, ProcessGroups(origin.options.groups), generators()
        options = origin.options_of(plan, groups)
        undo.callback(groups.destroy, kept=former)
        undo.callback(put_generators, random)
        for runtime in parallel.runtimes:
            runtime.updates.publish()
        report, old = self._phase("validate", self._checked)
        reports = everyone((report, old.reports))
        report, before = merged([theirs for theirs, _ in reports]), [tensors for _, tensors in reports]
        changes, prepared = self._phase("prepare", lambda: self._examined(report, options))
        self._phase("groups", lambda: None)
        meshes = build_meshes(plan, device.type, groups)
        make_pipeline_groups(prepared, groups)
        shapes = {name: tensor.shape for tensors in before for name, tensor in tensors.items()}
        new = self._phase("build", lambda: self._built(report, shapes, prepared, meshes, options))
        after = everyone(self._phase("carry", lambda: new.tensors.reports))
        transfer = TensorTransfer(moved_tensors(before, after), old, new.tensors, device, self.observe)
        undo.callback(transfer.undo)
        transfer.run(available_bytes(device) if memory is None else memory)
        for runtime in new.runtimes:
            runtime.updates.take()
        if shares_samples(plan) and not shares_samples(parallel.plan):
            share_generators(random, device)
        self._phase("commit", lambda: None)

        undo.pop_all()
        owned = [one for runtime in parallel.runtimes for one in runtime.owned]
        copies = [one.host.copy.detach() for one in owned if one.host]
        copies += [one.parameter.detach() for one in owned if one.held is not one.parameter]
        _close(parallel.runtimes)
        allocate(new.gradients)
        parallel.adopt(plan, new.runtimes, options)
        apply(self.optimizer, new.regrouping, new.states, self.scheduler)
        origin.options, origin.batch = options, self.batch
        origin.unsplit.take_in(changes)
        origin.settle()
        put_generators(random)
        transfer.commit()
        release(copies)
        former.destroy(kept=groups)
        groups.settle()
        return transfer

    def phases(self) -> dict[str, float]:
        """Seconds of each phase, the last one up to now."""
        ends = [*(start for _, start in self.starts[1:]), time.perf_counter()]
        return {phase: end - start for (phase, start), end in zip(self.starts, ends, strict=True)}

    def _phase(self, phase: str, work: Callable[[], Result]) -> Result:
        self.starts.append((phase, time.perf_counter()))

        def observed() -> Result:
            self.observe(phase)
            return work()

        return together(phase, observed)

    def _checked(self) -> tuple[OptimizerReport, LocalTensors]:
        """Check that the plan fits this world, and that this rank's tensors can be cut."""
        parallel, optimizer = self.parallel, self.optimizer
        check_plan(self.plan, parallel)
        if parallel.plan_check is not None:
            parallel.plan_check(self.plan)
        check_idle(parallel, optimizer, self.scheduler)
        for module in (module for runtime in parallel.runtimes for module in runtime.sharded.zero_modules):
            module.reshard()
        report = report_of(optimizer, _names(parallel.entries, parallel.runtimes))
        states = _cut_states(report, held_states(parallel, optimizer.state))
        buffers = [*held_buffers(parallel), *_unsaved_buffers(parallel, self.parallel.origin.layers)]
        return report, LocalTensors([*held_parameters(parallel), *states], buffers)

    def _examined(self, report: OptimizerReport, options: SetupOptions) -> tuple[Changes, Prepared]:
        """Restore the user's modules without values, with the user's changes, and prepare them for the plan."""
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

    def _built(
        self,
        report: OptimizerReport,
        shapes: Mapping[str, tuple[int, ...]],
        prepared: Prepared,
        meshes: Meshes,
        options: SetupOptions,
    ) -> _Built:
        """Split the modules by the plan, without values; ``shapes`` are those of all tensors."""
        origin, parallel = self.parallel.origin, self.parallel
        places = dict[nn.Module, _BlankLayers]()

        def place(model: nn.Module, layer: Layer) -> None:
            if model not in places:
                places[model] = _BlankLayers(model, origin.layers, parallel.device, shapes)
            places[model].place(layer)

        runtimes = build(origin.model, prepared, meshes, options, place)
        self.undo.callback(_close, runtimes)
        gradients = _release_gradients(runtimes)
        view = _View(parallel.entries, runtimes)
        names = _names(parallel.entries, runtimes)
        regrouping = regroup(self.optimizer, report, names, self.scheduler)
        states = blank_states(report, names)
        held = _cut_states(report, held_states(view, states))
        tensors = LocalTensors([*held_parameters(view), *held], _blank_buffers(view))
        for one in held:
            tensors.blank.setdefault(one.name, []).extend(release([one.tensor]))
        return _Built(runtimes, gradients, tensors, states, regrouping)


def check_plan(plan: Plan, parallel: ParallelModel) -> None:
    """Refuse plans that a model in training cannot change to."""
    world = dist.get_world_size()
    if plan.devices != world:
        raise LaunchError(
            f"The plan is for {plan.devices} device(s), but {world} process(es) train. Give a plan for {world}, or "
            "save, start as many processes as the plan is for, and load."
        )
    for one, what in ((parallel.plan, "present plan"), (plan, "plan")):
        if one.mode is not Mode.TRAINING or one.cyclic is not None or one.branches:
            remedy = "Plans for training without delayed gradients and branches can be changed; else save and load."
            raise InputError(what, one.model, remedy)
    check_runs(plan)
    check_compile(parallel.origin.options.compile, plan)


def check_idle(parallel: ParallelModel, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Raise ``InputError`` in the middle of a step, or for the scheduler of another optimizer."""
    for one in (one for runtime in parallel.runtimes for one in runtime.owned):
        if one.updated.grad is not None or one.gradient is not None:
            remedy = "Change the plan between steps: after optimizer.step(), call optimizer.zero_grad()."
            raise InputError("gradients", one.names[0], remedy)
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise InputError("scheduler", type(scheduler).__name__, "Give the scheduler of this optimizer.")


class _BlankLayers(Materializer):
    """Gives the layers of a structure parameters and buffers without values, on this process's device.

    Args:
        shapes: of buffers by name, where they have changed since the model was made.
    """

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
            # zeros: of running statistics a rank may fill its own channels alone
            zeros = torch.zeros(self._shapes.get(path, tuple(buffer.shape)), dtype=buffer.dtype, device=self._device)
            setattr(module, name, zeros)
        return []


def _unsaved_buffers(parallel: Parallel, layers: Sequence[Layer]) -> Iterator[LocalShard]:
    """Buffers outside ``state_dict()`` that this rank's layers have, or no layer."""
    for place, runtime in enumerate(parallel.runtimes):
        layer_names = {placed.layer.name for placed in runtime.stage} | ({""} if place == 0 else set())
        for name, buffer in runtime.model.named_buffers():
            if name not in parallel.entries.names and home_of(name, layers) in layer_names:
                yield complete_shard(name, buffer)


def _blank_buffers(parallel: Parallel) -> list[LocalShard]:
    """The buffers of a new split: complete but for the channels of other ranks."""
    held, names = {id(buffer.tensor): buffer for buffer in held_buffers(parallel)}, parallel.entries.names
    return [
        held.get(id(buffer)) or complete_shard(names.get(name, name), buffer)
        for runtime in parallel.runtimes
        for name, buffer in runtime.model.named_buffers()
        if not buffer.is_meta
    ]


def _names(entries: Entries, runtimes: Iterable[StageRuntime]) -> dict[nn.Parameter, str]:
    """Names of what the optimizer updates on this rank, in the order of the layers."""
    return {one.updated: entries.names.get(one.names[0], one.names[0]) for runtime in runtimes for one in runtime.owned}


def _cut_states(report: OptimizerReport, states: Iterable[LocalShard]) -> list[LocalShard]:
    """The optimizer's tensors that are cut as their parameters are."""
    cut = {f"{name}/{key}" for name, state in report.states.items() for key, entry in state.items() if entry.dtype}
    return [state for state in states if state.name in cut]


def _close(runtimes: Iterable[StageRuntime]) -> None:
    for runtime in runtimes:
        runtime.reducer.close()


def _release_gradients(runtimes: Iterable[StageRuntime]) -> Released:
    return release([buffer for runtime in runtimes for buffer in runtime.reducer.buffers])
