"""The dry run: one rank of a plan trains for a step, by the real runtime, on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import GalvatronError
from galvatron_lite.model.batch import (
    LossFn,
    batch_size,
    call_model,
    loss_of,
    map_tensors,
    resize_batch,
    tensors_of,
)
from galvatron_lite.model.blocks import BlockNames
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.trace.meta import copy_with, meta_copy
from galvatron_lite.model.trace.record import Recorder
from galvatron_lite.model.trace.run import shapes_only
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.offload import apply as offload
from galvatron_lite.parallelism.pipeline.tied import layer_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.activations.traffic import LayoutTensor
from galvatron_lite.runtime.assignment import place_layers
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.monitor.notes import StepPhase
from galvatron_lite.runtime.monitor.watch import Watch
from galvatron_lite.runtime.parameters.managed import local_tensor
from galvatron_lite.runtime.preparation import Examined, examine
from galvatron_lite.verify.dry.kernels import accelerated
from galvatron_lite.verify.dry.ledger import Ledger, Use, breakdown
from galvatron_lite.verify.dry.mode import DryMode, DryRunError, FakeCache
from galvatron_lite.verify.dry.repeat import lengthened, shortened
from galvatron_lite.verify.dry.world import Announced, Hear, MessageLog, RankPlace, dry_world
from galvatron_lite.verify.schema import During, LayerSplit, ParameterSplit, RoleRun

DEVICE = torch.device("cpu")
_DURING = {
    StepPhase.BETWEEN: During.BETWEEN,
    StepPhase.FORWARD: During.FORWARD,
    StepPhase.BACKWARD: During.BACKWARD,
    StepPhase.WEIGHT: During.WEIGHTS,
    StepPhase.GRADIENTS: During.GRADIENTS,
    StepPhase.CHECK: During.CHECK,
    StepPhase.OPTIMIZER: During.OPTIMIZER,
}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is trained, once for all ranks that are run."""

    model: nn.Module  # without values, or with: it is not changed
    layers: tuple[Layer, ...]  # of it
    batch: Any  # a global batch of the plan's size; only shapes count
    examined: Examined  # what the plan needs to know of it
    loss_fn: LossFn | None = None  # as ``auto_parallelize`` is given it
    # makes one of parameter groups: ``torch.optim.AdamW``
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    precision: str | None = None  # of compute; the plan's if None
    unreached: frozenset[str] = frozenset()  # parameters that get no gradient, whatever the plan
    operations: FakeCache = field(default_factory=FakeCache)  # what ranks before were seen to do


def subject_of(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    blocks: BlockNames | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    precision: str | None = None,
) -> Subject:
    """What a plan trains, examined once."""
    layers = discover_layers(model, batch, blocks)
    stages, bare = place_layers(plan, layers), map_tensors(batch, lambda one: one.to("meta"))
    full_batch = resize_batch(bare, plan.global_batch)
    examined = examine(model, layers, stages, range(len(stages)), batch, loss_fn)
    return Subject(model, layers, full_batch, examined, loss_fn, optimizer, precision, _unreached(model, bare, loss_fn))


def _unreached(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> frozenset[str]:
    """Names of the parameters that get no gradient: frozen ones, and those that the loss does not depend on, as far as
    that can be seen without values."""
    twin = meta_copy(model)
    named = {name: one for name, one in twin.named_parameters() if one.requires_grad}
    frozen = {name for name, one in twin.named_parameters(remove_duplicate=False) if not one.requires_grad}
    try:
        with shapes_only(Recorder()):
            loss = loss_of(call_model(twin, batch), batch, loss_fn)
            reached = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    except Exception:  # whatever the model's code does that there are no shapes for
        return frozenset(frozen)
    return frozenset(frozen.union(name for name, one in zip(named, reached, strict=True) if one is None))


def dry_run(
    subject: Subject,
    plan: Plan,
    rank: int,
    hear: Hear | None = None,
    announced: Announced | None = None,
    *,
    brief: bool = False,
) -> tuple[RoleRun, Announced]:
    """Set one rank up and run a step of it: forward, backward, sums, optimizer.

    The optimizer has its states when the step begins, as in every step but the first.

    Args:
        subject: what is trained.
        plan: how.
        rank: of the plan's world.
        hear: what other ranks announce to this one.
        announced: what the rank announces is put in here, too, as far as it comes.
        brief: leave out micro-batches that repeat others (``repeat``).

    Raises:
        DryRunError: what runs depends on values.
        UnlikeError: micro-batches that should repeat others do not; only if ``brief``.
        UnheardError: a rank that announces something to this one was not run so far.
        LaunchError: this process has joined a world.
        InputError: the plan does not fit the model.
    """
    begun, place = process_time(), RankPlace()
    log, ledger = MessageLog(place, announced={} if announced is None else announced, hear=hear), Ledger(place)
    mode = DryMode(ledger, subject.operations)
    with (
        dry_world(rank, plan.devices, log),
        ledger.watching_sizes(),
        _explain_refusals(place),
        mode,
        _hosting(ledger),
        accelerated(),
    ):
        run = shortened(plan) if brief else plan
        step = _Run(subject, run, place, log, ledger)
        step.step()
        splits, kept, stage = step.splits(plan.microbatches), step.watch.kept, step.parallel.runtime.meshes.stage_index
        messages = tuple(log.messages)
        if run is not plan:
            messages = lengthened(messages, run.microbatches, plan.microbatches)
        del step
    return RoleRun(
        rank=rank, stage=stage, role="", ranks=(rank,), messages=messages, samples=tuple(ledger.samples),
        peak=breakdown(ledger.at_peak), kept=kept, splits=splits, seconds=process_time() - begun,
        host=ledger.peak_host, notes=_notes(plan, run),
    ), log.announced  # fmt: skip


@contextmanager
def _hosting(ledger: Ledger) -> Iterator[None]:
    """What is copied to host memory is told apart, as the CPU's is the device's here."""
    plain = offload.host_like

    def host_like(tensor: Tensor) -> Tensor:
        copy = plain(tensor)
        ledger.use([copy], Use.HOST)
        return copy

    offload.host_like = host_like
    try:
        yield
    finally:
        offload.host_like = plain


@contextmanager
def _explain_refusals(place: RankPlace) -> Iterator[None]:
    try:
        yield
    except GalvatronError:
        raise
    except Exception as error:  # of the user's model, of torch, or of what it cannot do without data
        where = f"{place.phase}{place.layer and f' of {place.layer}'}"
        raise DryRunError(f"It stops in {where}: {type(error).__name__}: {str(error).strip()[:200]}") from error


def _notes(plan: Plan, run: Plan) -> tuple[str, ...]:
    notes = ["All numbers are taken to be finite, as a step without an overflow has them."]
    if any(lines_of(run.strategy).spread for stage in plan.stages for run in stage.runs):
        notes.append("Routers are taken to send every expert as many tokens as every other.")
    if left := plan.microbatches - run.microbatches:
        notes.append(
            f"{run.microbatches} of {plan.microbatches} micro-batches were run; the other {left} send and hold what "
            "two in the middle were seen to do alike."
        )
    return tuple(notes)


class DryWatch(Watch):
    """Tells where the rank is, and nobody else."""

    def __init__(self, place: RankPlace, ledger: Ledger, *, splits_backward: bool) -> None:
        super().__init__(DEVICE)
        self._place, self._ledger = place, ledger
        # what outlives a backward pass: what gradients of weights are made of later, or the sums that FSDP2 keeps
        self._outlives = Use.ACTIVATIONS if splits_backward else Use.GRADIENTS
        self.kept: dict[str, int] = {}  # by layer, behind the first micro-batch's forward

    def at(self, phase: StepPhase, number: int = -1, step: int | None = None) -> None:
        """This rank comes to a phase."""
        super().at(phase, number, step)
        ledger, place = self._ledger, self._place
        ledger.end(During.FORWARD)
        ledger.sample()
        if place.phase is During.BACKWARD:
            ledger.end(During.BACKWARD, self._outlives)
        if place.phase is During.FORWARD and place.microbatch <= 0 and not self.kept:
            self.kept = {name: size for name, size in ledger.kept(place.microbatch).items() if name}
        place.phase, place.microbatch, place.layer, place.between = _DURING[phase], number, "", False

    @contextmanager
    def explained(self, step: int, plan: Plan, stage: int, phase: StepPhase = StepPhase.FORWARD) -> Iterator[None]:  # noqa: ARG002
        """Run a step; nobody else is asked why it fails."""
        yield


@dataclass(slots=True, eq=False)
class _LayerHooks:
    """What is seen of a layer: shapes, and how often it ran, and modules in it, in forward and again in backward."""

    name: str
    place: RankPlace
    mark: Callable[[str], None]  # called when the layer begins or ends
    taken: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    forwards: int = 0
    inside: int = 0
    again: int = 0

    @property
    def runs(self) -> int:
        """How often forward ran, parts of it that were recomputed included."""
        return self.forwards + (-(-self.forwards * self.again // self.inside) if self.inside else 0)

    def attach(self, module: nn.Module) -> None:
        """Put hooks before all others when the layer begins, behind all others when it ends."""
        module.register_forward_pre_hook(self._enter, prepend=True)
        module.register_forward_pre_hook(self._note_inputs, with_kwargs=True)
        module.register_forward_hook(self._note_outputs, prepend=True)
        module.register_forward_hook(self._leave)
        for leaf in module.modules():
            if leaf is not module and next(leaf.children(), None) is None:
                leaf.register_forward_pre_hook(self._count)

    def _enter(self, _module: nn.Module, _args: Any) -> None:
        self.mark(self.name)
        self.forwards += 1

    def _note_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self.taken = _shape((args, kwargs))  # behind the runtime's hooks: what the layer's own code is given

    def _note_outputs(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self.returned = _shape(output)

    def _count(self, _module: nn.Module, _args: Any) -> None:
        if self.place.phase is During.FORWARD:
            self.inside += 1
        else:
            self.again += 1

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self.mark(self.name)
        self.place.between = self.place.phase is During.FORWARD
        # as it lies: looking at it would move it to where code between layers works
        outputs = (one.piece.tensor if isinstance(one, LayoutTensor) else one for one in tensors_of(output))
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(lambda _gradient: self.mark(self.name))  # type: ignore[no-untyped-call]
                return


class _Run:
    def __init__(self, subject: Subject, plan: Plan, place: RankPlace, log: MessageLog, ledger: Ledger) -> None:
        self.subject, self.plan, self.place, self.ledger, self._log = subject, plan, place, ledger, log
        self._wholes = {name: tuple(one.shape) for name, one in subject.model.named_parameters(remove_duplicate=False)}
        model = copy_with(subject.model, _zeros_like)
        zeros = map_tensors(subject.batch, lambda one: torch.zeros(one.shape, dtype=one.dtype, device=DEVICE))
        ledger.forget(tensors_of(zeros))  # a loop's data are in host memory, until a rank takes its own of them
        size, samples = batch_size(zeros), plan.global_batch  # the first samples, all of which stay held
        self.batch = map_tensors(zeros, lambda one: one[:samples] if one.dim() and len(one) == size else one)
        self.parallel: Any = ParallelModel(
            model,
            plan,
            subject.layers,
            resize_batch(subject.batch, plan.global_batch),
            loss_fn=subject.loss_fn,
            device=DEVICE,
            examined=subject.examined,
            precision=subject.precision,
        )
        self.watch = self.parallel.watch = DryWatch(place, ledger, splits_backward=plan.schedule.splits_backward)
        self.optimizer = self.parallel.optimizer(subject.optimizer)
        self._seen = {layer.name: _LayerHooks(layer.name, place, self._mark) for layer in subject.layers}
        self._attach()

    def step(self) -> None:
        """Warm the optimizer, then one step."""
        self._sort()
        self._make_states()
        self._sort()
        self.place.phase = During.BETWEEN
        self.ledger.watch()
        self.parallel.train_step(self.batch, self.optimizer)
        self.watch.at(StepPhase.BETWEEN)

    def _owned(self) -> list[Any]:
        return [one for runtime in self.parallel.runtimes for one in runtime.owned]

    def _make_states(self) -> None:
        """The states that the optimizer makes in its first step, which is not the one that is looked at."""
        self.place.phase = During.OPTIMIZER
        sent = len(self._log.messages)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        del self._log.messages[sent:]

    def _sort(self) -> None:
        ledger, owned = self.ledger, self._owned()
        for runtime in self.parallel.runtimes:
            tensors = [*runtime.model.parameters(), *runtime.model.buffers()]
            ledger.use(map(local_tensor, tensors), Use.PARAMETERS)
        ledger.use((local_tensor(one.parameter.detach()) for one in owned), Use.PARAMETERS)
        ledger.use((one.share.part.detach() for one in owned if one.share is not None), Use.PARAMETERS)
        for runtime in self.parallel.runtimes:
            ledger.use(runtime.reducer.buffers, Use.GRADIENTS)
        hosted = [one.host.copy for one in owned if one.host is not None]
        below = {id(copy) for copy in hosted}
        states = [s for one, held in self.optimizer.state.items() if id(one) not in below for s in tensors_of(held)]
        states += [one.held.detach() for one in owned if one.held is not one.parameter]
        ledger.use(map(local_tensor, states), Use.OPTIMIZER)
        ledger.use((local_tensor(copy.detach()) for copy in hosted), Use.HOST)
        ledger.use((s for copy in hosted for s in tensors_of(self.optimizer.state.get(copy, ()))), Use.HOST)

    def _attach(self) -> None:
        # in place of layers of other stages a structure has modules that pass on what they are given
        for runtime in self.parallel.runtimes:
            for layer in [placed.layer for placed in runtime.stage]:
                for path in layer.modules:
                    self._seen[layer.name].attach(runtime.model.get_submodule(path))
        for one in self._owned():
            if one.parameter.requires_grad:
                one.parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.ledger.use([local_tensor(parameter.grad)], Use.GRADIENTS)

    def _mark(self, name: str) -> None:
        if self.place.phase is During.FORWARD:
            self.ledger.end(During.FORWARD, following=name)
        else:
            grads = [one.parameter.grad for one in self._owned()]
            self.ledger.use((local_tensor(grad) for grad in grads if grad is not None), Use.GRADIENTS)
        self.ledger.sample()
        self.place.layer, self.place.between = name, False

    def splits(self, microbatches: int) -> tuple[LayerSplit, ...]:
        """What was done to the layers that this rank has, in a step of so many micro-batches."""
        layers = [one.layer for runtime in self.parallel.runtimes for one in runtime.stage]
        splits: dict[str, list[ParameterSplit]] = {layer.name: [] for layer in layers}
        for one in self._owned():
            updated, held = local_tensor(one.updated.detach()), local_tensor(one.parameter.detach())
            split = ParameterSplit(
                one.names[0], self._wholes.get(one.names[0], ()), tuple(held.shape), updated.numel(),
                one.is_zero, one.host is not None, tuple(one.parameter.shape),
                not self.subject.unreached.issuperset(one.names),
            )  # fmt: skip
            splits[layer_of(one.names[0], layers)].append(split)
        layer_splits = []
        for name, parameters in splits.items():
            seen = self._seen[name]
            forwards = seen.runs * microbatches // self.plan.microbatches
            layer_splits.append(LayerSplit(name, seen.taken, seen.returned, forwards, tuple(parameters)))
        return tuple(layer_splits)


def _shape(value: Any) -> tuple[int, ...]:
    """Of the first floating-point tensor; of the first one where there is none."""
    tensors = list(tensors_of(value))
    first = next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0] if tensors else None)
    return () if first is None else tuple(first.shape)


def _zeros_like(tensor: Tensor) -> Tensor:
    """Without data where a dry run's mode is active; small whole numbers (``mode.SMALL``) are 0: places and kinds of
    tokens, which something looks up."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE).zero_()
