"""The dry run: the real runtime trains one rank of a plan for a step, on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """A model and its batch, examined once for all ranks that are run."""

    model: nn.Module  # with or without values; it is not changed
    layers: tuple[Layer, ...]  # of the model
    batch: Any  # a global batch of the plan's size; only shapes count
    examined: Examined  # what the runtime needs to know of the model
    loss_fn: LossFn | None = None  # as for ``auto_parallelize``
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW  # called with parameter groups
    precision: str | None = None  # of compute; None: the plan's
    unreached: frozenset[str] = frozenset()  # parameters that get no gradient under any plan
    operations: FakeCache = field(default_factory=FakeCache)  # results of operations, shared by all ranks


def subject_of(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    blocks: BlockNames | None = None,
    layers: tuple[Layer, ...] = (),
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    precision: str | None = None,
) -> Subject:
    """Examine a model for the dry runs of a plan; its ``layers`` are discovered unless they are given."""
    layers = layers or discover_layers(model, batch, blocks)
    stages, meta_batch = place_layers(plan, layers), map_tensors(batch, lambda tensor: tensor.to("meta"))
    full_batch = resize_batch(meta_batch, plan.global_batch)
    examined = examine(model, layers, stages, range(len(stages)), batch, loss_fn)
    unreached = _unreached(model, meta_batch, loss_fn)
    return Subject(model, layers, full_batch, examined, loss_fn, optimizer, precision, unreached)


def _unreached(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> frozenset[str]:
    """Names of parameters that are frozen, or that the loss does not depend on as far as shapes show."""
    twin = meta_copy(model)
    trained = {name: parameter for name, parameter in twin.named_parameters() if parameter.requires_grad}
    named = twin.named_parameters(remove_duplicate=False)
    frozen = frozenset(name for name, parameter in named if not parameter.requires_grad)
    try:
        with shapes_only(Recorder()):
            loss = loss_of(call_model(twin, batch), batch, loss_fn)
            gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    except Exception:  # a user's model may do what has no meaning without data
        return frozen
    return frozen.union(name for name, gradient in zip(trained, gradients, strict=True) if gradient is None)


def dry_run(
    subject: Subject,
    plan: Plan,
    rank: int,
    hear: Hear | None = None,
    announced: Announced | None = None,
    *,
    brief: bool = False,
) -> tuple[RoleRun, Announced]:
    """Set up one rank and run a step of it: forward, backward, sums, optimizer.

    The optimizer has its states when the step begins, as in every step but the first.

    Args:
        subject: what is trained.
        plan: how it is split.
        rank: of the plan's world.
        hear: returns what other ranks announce to this one.
        announced: filled with what the rank announces, also if the run does not end.
        brief: leave out micro-batches that repeat others (``repeat``).

    Raises:
        DryRunError: what runs depends on values.
        UnlikeError: micro-batches that should repeat others do not; only if ``brief``.
        UnheardError: a rank that announces something to this one was not run yet.
        LaunchError: this process has joined a world.
        InputError: the plan does not fit the model.
    """
    start, place = process_time(), RankPlace()
    log, ledger = MessageLog(place, announced={} if announced is None else announced, hear=hear), Ledger(place)
    with (
        dry_world(rank, plan.devices, log),
        ledger.tracking_resizes(),
        _explain_refusals(place),
        DryMode(ledger, subject.operations),
        _classify_host_copies(ledger),
        accelerated(),
    ):
        run_plan = shortened(plan) if brief else plan
        run = _Run(subject, run_plan, place, log, ledger)
        run.step()
        splits, kept, stage = run.splits(plan.microbatches), run.watch.kept, run.parallel.runtime.meshes.stage_index
        messages = tuple(log.messages)
        if run_plan is not plan:
            messages = lengthened(messages, run_plan.microbatches, plan.microbatches)
        del run
    return RoleRun(
        rank=rank, stage=stage, role="", ranks=(rank,), messages=messages, samples=tuple(ledger.samples),
        peak=breakdown(ledger.at_peak), kept=kept, splits=splits, seconds=process_time() - start,
        host=ledger.peak_host, notes=_notes(plan, run_plan),
    ), log.announced  # fmt: skip


@contextmanager
def _classify_host_copies(ledger: Ledger) -> Iterator[None]:
    """Count copies in host memory apart; tensors of the device lie on the CPU here, too."""
    original = offload.host_like

    def host_like(tensor: Tensor) -> Tensor:
        copy = original(tensor)
        ledger.classify([copy], Use.HOST)
        return copy

    offload.host_like = host_like
    try:
        yield
    finally:
        offload.host_like = original


@contextmanager
def _explain_refusals(place: RankPlace) -> Iterator[None]:
    try:
        yield
    except GalvatronError:
        raise
    except Exception as error:  # of the user's model or of torch, which may need data
        where = f"{place.phase}{place.layer and f' of {place.layer}'}"
        raise DryRunError(f"It stops in {where}: {type(error).__name__}: {str(error).strip()[:200]}") from error


def _notes(plan: Plan, run_plan: Plan) -> tuple[str, ...]:
    notes = ["All numbers are taken to be finite, as a step without an overflow has them."]
    if any(lines_of(run.strategy).spread for stage in plan.stages for run in stage.runs):
        notes.append("Routers are taken to send every expert as many tokens as every other.")
    if left := plan.microbatches - run_plan.microbatches:
        notes.append(
            f"{run_plan.microbatches} of {plan.microbatches} micro-batches were run; the other {left} send and hold "
            "what two in the middle were seen to do alike."
        )
    return tuple(notes)


class DryWatch(Watch):
    """Follows where the rank is in its step, and keeps the ledger up to date."""

    def __init__(self, place: RankPlace, ledger: Ledger, *, splits_backward: bool) -> None:
        super().__init__(DEVICE)
        self._place, self._ledger = place, ledger
        # of what outlives a backward pass: inputs of later weight passes, or the sums that FSDP2 keeps
        self._use_behind_backward = Use.ACTIVATIONS if splits_backward else Use.GRADIENTS
        self.kept: dict[str, int] = {}  # bytes by layer, behind the first micro-batch's forward

    def at(self, phase: StepPhase, number: int = -1, step: int | None = None) -> None:
        """Enter a phase."""
        super().at(phase, number, step)
        ledger, place = self._ledger, self._place
        ledger.end(During.FORWARD)
        ledger.sample()
        if place.phase is During.BACKWARD:
            ledger.end(During.BACKWARD, self._use_behind_backward)
        if place.phase is During.FORWARD and place.microbatch <= 0 and not self.kept:
            self.kept = {name: size for name, size in ledger.saved_by_layer(place.microbatch).items() if name}
        place.phase, place.microbatch, place.layer, place.between = _DURING[phase], number, "", False

    @contextmanager
    def explained(self, step: int, plan: Plan, stage: int, phase: StepPhase = StepPhase.FORWARD) -> Iterator[None]:  # noqa: ARG002
        """Run a step; there are no other ranks to ask why it fails."""
        yield


@dataclass(slots=True, eq=False)
class _LayerHooks:
    """Hooks of a layer that observe its shapes and count its passes."""

    name: str
    place: RankPlace
    mark: Callable[
        ..., None
    ]  # called when a pass of the layer begins or ends, in forward with what it takes or returns
    taken: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    forwards: int = 0
    # calls of the layer's innermost modules
    forward_calls: int = 0
    recompute_calls: int = 0

    @property
    def runs(self) -> int:
        """How often forward ran, including parts that were recomputed."""
        if not self.forward_calls:
            return self.forwards
        return self.forwards - (-self.forwards * self.recompute_calls // self.forward_calls)

    def attach(self, module: nn.Module) -> None:
        """Attach hooks before all others at the layer's begin, and after all others at its end."""
        module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(self._note_inputs, with_kwargs=True)
        module.register_forward_hook(self._note_outputs, prepend=True)
        module.register_forward_hook(self._leave)
        for leaf in module.modules():
            if leaf is not module and next(leaf.children(), None) is None:
                leaf.register_forward_pre_hook(self._count)

    def _enter(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self.mark(self.name, _local((args, kwargs)))
        self.forwards += 1

    def _note_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self.taken = _shape((args, kwargs))  # after the runtime's hooks: what the layer's code receives

    def _note_outputs(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self.returned = _shape(output)

    def _count(self, _module: nn.Module, _args: Any) -> None:
        if self.place.phase is During.FORWARD:
            self.forward_calls += 1
        else:
            self.recompute_calls += 1

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        outputs = _local(output)
        self.mark(self.name, outputs)
        self.place.between = self.place.phase is During.FORWARD
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(lambda _gradient: self.mark(self.name))  # type: ignore[no-untyped-call]
                return


class _Run:
    """One rank, set up under a plan."""

    def __init__(self, subject: Subject, plan: Plan, place: RankPlace, log: MessageLog, ledger: Ledger) -> None:
        self.subject, self.plan, self.place, self.ledger, self._log = subject, plan, place, ledger, log
        named = subject.model.named_parameters(remove_duplicate=False)
        self._full_shapes = {name: tuple(parameter.shape) for name, parameter in named}
        model = copy_with(subject.model, _zeros_like)
        zeros = map_tensors(subject.batch, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype, device=DEVICE))
        ledger.exclude(tensors_of(zeros))  # a training loop's batch is in host memory
        size, samples = batch_size(zeros), plan.global_batch

        def first_samples(tensor: Tensor) -> Tensor:
            return tensor[:samples] if tensor.dim() and len(tensor) == size else tensor

        self.batch = map_tensors(zeros, first_samples)
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
        self._hooks = {layer.name: _LayerHooks(layer.name, place, self._mark) for layer in subject.layers}
        self._attach()

    def step(self) -> None:
        """Give the optimizer its states, then run one step."""
        self._classify()
        self._make_states()
        self._classify()
        self.place.phase = During.BETWEEN
        self.ledger.reset_peak()
        self.parallel.train_step(self.batch, self.optimizer)
        self.watch.at(StepPhase.BETWEEN)

    @property
    def _parameters(self) -> list[Any]:
        return [managed for runtime in self.parallel.runtimes for managed in runtime.owned]

    def _make_states(self) -> None:
        """Run the optimizer's first step, which makes its states; its messages are not recorded."""
        self.place.phase = During.OPTIMIZER
        sent = len(self._log.messages)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        del self._log.messages[sent:]

    def _classify(self) -> None:
        """Count parameters, gradient buffers and optimizer states as such."""
        classify, managed = self.ledger.classify, self._parameters
        for runtime in self.parallel.runtimes:
            classify(map(local_tensor, (*runtime.model.parameters(), *runtime.model.buffers())), Use.PARAMETERS)
        classify((local_tensor(each.parameter.detach()) for each in managed), Use.PARAMETERS)
        classify((each.share.part.detach() for each in managed if each.share is not None), Use.PARAMETERS)
        for runtime in self.parallel.runtimes:
            classify(runtime.reducer.buffers, Use.GRADIENTS)
        host_copies = [each.host.copy for each in managed if each.host is not None]
        on_host = {id(copy) for copy in host_copies}
        states = [
            state
            for parameter, held in self.optimizer.state.items()
            if id(parameter) not in on_host
            for state in tensors_of(held)
        ]
        states += [each.held.detach() for each in managed if each.held is not each.parameter]
        classify(map(local_tensor, states), Use.OPTIMIZER)
        classify((local_tensor(copy.detach()) for copy in host_copies), Use.HOST)
        host_states = (self.optimizer.state.get(copy, ()) for copy in host_copies)
        classify((state for held in host_states for state in tensors_of(held)), Use.HOST)

    def _attach(self) -> None:
        # layers of other stages are stubs here
        for runtime in self.parallel.runtimes:
            for placed in runtime.stage:
                for path in placed.layer.modules:
                    self._hooks[placed.layer.name].attach(runtime.model.get_submodule(path))
        for managed in self._parameters:
            if managed.parameter.requires_grad:
                managed.parameter.register_post_accumulate_grad_hook(self._classify_gradient)

    def _classify_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.ledger.classify([local_tensor(parameter.grad)], Use.GRADIENTS)

    def _mark(self, name: str, passed: Sequence[Tensor] = ()) -> None:
        if self.place.phase is During.FORWARD:
            self.ledger.end(During.FORWARD, following=name, passed=passed)
        else:
            for managed in self._parameters:
                self._classify_gradient(managed.parameter)
        self.ledger.sample()
        self.place.layer, self.place.between = name, False

    def splits(self, microbatches: int) -> tuple[LayerSplit, ...]:
        """Return how this rank's layers are split, and their passes in a step of so many micro-batches."""
        layers = [placed.layer for runtime in self.parallel.runtimes for placed in runtime.stage]
        parameters: dict[str, list[ParameterSplit]] = {layer.name: [] for layer in layers}
        for managed in self._parameters:
            name = managed.names[0]
            split = ParameterSplit(
                name,
                self._full_shapes.get(name, ()),
                tuple(local_tensor(managed.parameter.detach()).shape),
                local_tensor(managed.updated.detach()).numel(),
                managed.is_zero,
                managed.host is not None,
                tuple(managed.parameter.shape),
                not self.subject.unreached.issuperset(managed.names),
            )
            parameters[layer_of(name, layers)].append(split)
        splits = []
        for name, layer_parameters in parameters.items():
            hooks = self._hooks[name]
            forwards = hooks.runs * microbatches // self.plan.microbatches
            splits.append(LayerSplit(name, hooks.taken, hooks.returned, forwards, tuple(layer_parameters)))
        return tuple(splits)


def _local(value: Any) -> list[Tensor]:
    """Return the local pieces of tensors: reading the tensors would redistribute them for the code between layers."""
    return [tensor.piece.tensor if isinstance(tensor, LayoutTensor) else tensor for tensor in tensors_of(value)]


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of the first floating-point tensor, or else of the first tensor."""
    tensors = list(tensors_of(value))
    first = next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0] if tensors else None)
    return () if first is None else tuple(first.shape)


def _zeros_like(tensor: Tensor) -> Tensor:
    """Make a tensor without data where ``DryMode`` is active; small integer tensors, which are looked up, are 0."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE).zero_()
