"""A model that trains as a plan says, on the launched world."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import LossFn, batch_of_call, batch_size, tensors_of
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.trace.meta import prepare_for_training
from galvatron_lite.parallelism.precision import compute_dtype, holding_copies
from galvatron_lite.parallelism.process_groups import ProcessGroups
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.parallelism.zero.apply import abandon_pass, set_all_reduce
from galvatron_lite.plans.io import read_plan
from galvatron_lite.plans.phases import PlannedPhase
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.assignment import check_samples
from galvatron_lite.runtime.batch_checks import GlobalBatches
from galvatron_lite.runtime.checkpoint.saving import Saving
from galvatron_lite.runtime.compiled import check_compile
from galvatron_lite.runtime.loss.tensor import global_mean, guard_loss
from galvatron_lite.runtime.loss.weights import LossWeight, check_reduction
from galvatron_lite.runtime.mesh import build_meshes
from galvatron_lite.runtime.monitor.notes import StepPhase
from galvatron_lite.runtime.monitor.observer import Observable, observed
from galvatron_lite.runtime.monitor.watch import Watch
from galvatron_lite.runtime.optimizer import OptimizerSteps, fused_on_host, split_groups
from galvatron_lite.runtime.parallelize import parallelize
from galvatron_lite.runtime.parameters.full_state import full_state_dict, load_full_state_dict
from galvatron_lite.runtime.parameters.managed import multiply_gradients
from galvatron_lite.runtime.parameters.pieces import entries_of
from galvatron_lite.runtime.parameters.use import (
    ParameterCopies,
    ParameterUse,
    check_hooks,
    guard_model,
    is_alone,
    moved_error,
    retire,
)
from galvatron_lite.runtime.phases import Steering
from galvatron_lite.runtime.preparation import Examined, SetupOptions
from galvatron_lite.runtime.reshard.original import OriginalModel
from galvatron_lite.runtime.reshard.reshard import Resharded, reshard
from galvatron_lite.runtime.scaling import LossScaler
from galvatron_lite.runtime.stage_calls import Calls, SyncedBuffers, draws_of
from galvatron_lite.runtime.stages import StageRuntime
from galvatron_lite.runtime.step_end import (
    GradientsAside,
    accumulated_step,
    clip_factor,
    finish_step,
    output_count,
    pipelined_loss,
    pipelined_outputs,
    pipelined_step,
    reduced,
)
from galvatron_lite.world import pick_device

OptimizerFactory = Callable[..., torch.optim.Optimizer]


class ParallelModel(Saving, Observable, nn.Module):
    """A model split over the launched world; every rank makes one, alike, and gives it the same global batches.

    Without a pipeline it is used like the model: ``loss = parallel(batch); loss.backward(); optimizer.step()``.
    ``train_step`` does a whole step under every plan. ``parameters()`` are this rank's shards; ``full_state_dict()`` is
    the whole model's state, to be saved.

    Args:
        model: the user's model, changed in place. Real parameters are made equal to rank 0's; a model on the meta
            device is given initial values.
        plan: for this model and this world.
        layers: of the model, from ``discover_layers``.
        batch: an example batch; needed where the plan splits blocks by tensor parallelism, and where layers of
            different pipeline stages read more than the output of the layer before them.
        synced_buffers: buffers that forward passes update from the samples, by name: ``mean`` or ``sum``, how the
            updates of shares of a batch are joined.
        device: of this rank; its GPU or the CPU if not given.
        precision: ``fp32``, ``bf16`` or ``fp16`` compute; the plan's if not given.
        max_grad_norm: clip the gradient to this norm in ``train_step``; None: do not clip.
        tensor_plans: how layers are split by tensor parallelism, by name; inferred if not given.
        examined: what ``parallelize.examine`` finds of the model under this plan; examined here if not given.

    All other arguments are those of ``auto_parallelize``.

    Attributes:
        module: the user's model.
        plan: the plan.
        entries: of the whole model's state.
        scaler: scales the loss under fp16; None in other precisions.
        origin: what the model was before it was split.
        averages: copies of its parameters, see ``__deepcopy__``.
        steering: what changes the plan between steps (phases, adapting); None: nothing does.
        plan_check: raises ``InputError`` for a plan that would train otherwise than one process; None: any may.
        runtimes: what trains the parts of the model that are on this rank.
        runtime: the first of them.
        copies: the model's structure once more for each other part.
        calls: how models of stages are called.
        watch: knows where this rank is in its step, and why a step fails.

    Raises:
        LaunchError: the world's size is not the plan's.
        InputError: the plan does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        layers: Sequence[Layer],
        batch: Any = None,
        *,
        loss_fn: LossFn | None = None,
        loss_weight: LossWeight | None = None,
        loss_reduction: str = "mean",
        synced_buffers: Mapping[str, str] | None = None,
        device: torch.device | str | None = None,
        precision: str | None = None,
        max_grad_norm: float | None = None,
        tensor_plans: Mapping[str, TensorPlan] | None = None,
        examined: Examined | None = None,
        init_fn: Callable[[nn.Module], None] | None = None,
        seed: int = 0,
        expert_capacity: float | None = None,
        compile: bool | str = False,  # noqa: A002 - torch's word
        randomness: str = "own",
        timeout: float | None = None,
        local_batch: bool = False,
    ) -> None:
        super().__init__()
        check_reduction(loss_reduction, loss_weight)
        prepare_for_training(model)
        if not is_alone(plan):
            check_hooks(model)
        self.device = pick_device() if device is None else torch.device(device)
        self.plan, self.max_grad_norm = plan, max_grad_norm
        compute = compute_dtype(precision or plan.precision)
        self.entries = entries_of(model, layers)
        draws = draws_of(randomness, model, plan, layers, batch, seed, compiles=bool(compile))
        options = SetupOptions(
            self.device, compute, tensor_plans, init_fn, seed, loss_fn, expert_capacity, ProcessGroups(timeout=timeout),
            check_compile(compile, plan), draws, examined,
        )  # fmt: skip
        self.watch = Watch(self.device, timeout)
        self.origin = OriginalModel(model, layers, batch, options, precision)
        buffers = SyncedBuffers(synced_buffers or {})
        self.calls = Calls(compute, self.device, loss_fn, draws, loss_weight, loss_reduction, buffers=buffers)
        self.module = model
        self.scaler: LossScaler | None = None
        before = [(name, weakref.ref(one)) for name, one in model.named_parameters()]
        self.adopt(plan, self._set_up(model, layers, batch, options), options)
        retire(before, self.runtimes)
        self.averages: list[weakref.ref[ParameterCopies]] = []
        self.steering: Steering | None = None
        self.plan_check: Callable[[Plan], None] | None = None
        self.origin.settle()
        self._aside: weakref.ref[GradientsAside] | None = None
        self._optimizers, self._turns, self._interrupted = OptimizerSteps(self), 1, False
        self._batches = GlobalBatches(self.device, batch, local_batch, timeout)

    def _set_up(
        self, model: nn.Module, layers: Sequence[Layer], batch: Any, options: SetupOptions
    ) -> Sequence[StageRuntime]:
        meshes = build_meshes(self.plan, self.device.type, options.groups)
        return parallelize(model, self.plan, layers, batch, meshes, options)

    def adopt(self, plan: Plan, runtimes: Sequence[StageRuntime], options: SetupOptions) -> None:
        """Train with what another plan made of the model; called by ``reshard``."""
        self.plan, self.runtimes, self.runtime = plan, runtimes, runtimes[0]
        self.copies = nn.ModuleList(runtime.model for runtime in runtimes[1:])
        self.use, self.calls.compute = ParameterUse(runtimes, plan), options.compute
        scaled = options.compute is torch.float16
        self.scaler = (self.scaler or LossScaler(self._norm, self._multiply)) if scaled else None
        guard_model(self.module, self)  # with another plan, hooks of the one before are gone
        self._show()

    def switch(
        self, plan: Plan | Path | str, optimizer: torch.optim.Optimizer, scheduler: Any = None, **options: Any
    ) -> Resharded:
        """Train on under another plan (or the file that holds it), between two steps; all ranks call it.

        See ``runtime.reshard.reshard.reshard``.
        """
        wanted = plan if isinstance(plan, Plan) else read_plan(plan)
        with self._watched(StepPhase.SWITCHING):
            return reshard(self, optimizer, wanted, scheduler, **options)

    @property
    def phase(self) -> PlannedPhase | None:
        """The phase of the next step, whose batch and sequence it is to be given; None without phases."""
        return None if self.steering is None else self.steering.phase

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a global batch: ``parallel(batch)``, or as the model is called; then ``loss.backward()``.

        The value is that of the whole batch on every rank. Where the plan has a pipeline or micro-batches, and
        gradients are wanted, their backward passes are done within the call (``runtime.step_end.GradientsAside``).

        Raises:
            InputError: the batch cannot be shared evenly, or is to get gradients; there are gradients of another batch
                that was worked on in micro-batches; a parameter has a hook, or was frozen when the plan was applied and
                is to be trained; a plan with a pipeline is run in evaluation mode with gradients.
        """
        call: Callable[..., Tensor] = self._loss
        if "torch._dynamo" in sys.modules:  # torch.compile(parallel) traces none of it: compile= does, by block
            call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
        return call(*args, **kwargs)

    def _loss(self, *args: Any, **kwargs: Any) -> Tensor:
        batch = self._batches(batch_of_call(args, kwargs), self.watch.group)
        if not is_alone(self.plan) and any(tensor.requires_grad for tensor in tensors_of(batch)):
            remedy = "Ranks and micro-batches work on shares of the batch, whose gradients stay with them: detach it."
            raise InputError("batch", "a tensor that requires a gradient", remedy)
        self.note_call()
        if torch.is_grad_enabled() and self.training and self._steps_when_called():
            return self._stepped(batch)
        if len(self.plan.stages) > 1:
            if not torch.is_grad_enabled():
                return self._evaluated(batch)
            remedy = (
                "Under torch.no_grad() the call gives the loss, and outputs(batch) the outputs; call train() to train."
            )
            raise InputError("plan", f"{len(self.plan.stages)} stages in evaluation mode", remedy)
        ((part,),) = self._parts(batch, 1)
        self._begin()
        self.calls.buffers.begin(self.runtimes if self.training else (), 1)
        loss = self.local_loss(part)
        self.calls.buffers.finish()
        if not loss.requires_grad:
            self._show()
        for runtime in self.runtimes:
            set_all_reduce(runtime.sharded.replicated, True)
            if runtime.updates.hosts and loss.requires_grad:  # gradients may be zeroed between forward and backward
                loss.register_hook(runtime.updates.follow_hosts)  # type: ignore[no-untyped-call]
            runtime.reducer.watch(loss, runtime.updates.deliver)
        shares = self.runtime.traffic.glue.batch
        group = self.runtime.glue_groups.batch
        return self._guarded(loss if group is None else global_mean(loss, group, shares))

    def outputs(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own outputs for a batch, complete on every rank, without gradients: ``outputs(batch)``, or as the
        model is called. Tensors without samples (a loss) are means over the ranks' shares of the samples.

        With a pipeline they are made in the plan's micro-batches where these divide the batch, else in one; what is
        neither a tensor in a nest of mappings, tuples and lists nor a plain value (a cache) is None then.

        Raises:
            InputError: the batch cannot be shared evenly.
        """
        batch = self._batches(batch_of_call(args, kwargs), self.watch.group)
        with torch.no_grad():
            self._begin(trains=False)
            try:
                if self.runtime.pipeline is None:
                    ((part,),) = self._parts(batch, 1)
                    return self._outputs(part)
                return pipelined_outputs(self, self._parts(batch, output_count(batch_size(batch), self.plan)))
            finally:
                self._show()

    def _evaluated(self, batch: Any) -> Tensor:
        self._begin(trains=False)
        count = output_count(batch_size(batch), self.plan)
        self.calls.buffers.begin(self.runtimes if self.training else (), count)
        loss = pipelined_loss(self, self._parts(batch, count))
        self.calls.buffers.finish()
        self._show()
        return reduced(self, [loss], with_norm=False)[0]

    def _outputs(self, part: Any) -> Any:
        return self.calls.outputs(self.runtime, part)[0]

    def train_step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None) -> Tensor:
        """One optimizer step on a global batch, in the plan's micro-batches.

        Args:
            batch: the same global batch on every rank, or with ``local_batch`` this rank's share. A list of several
                batches is one step on all of their samples, each batch in the plan's micro-batches.
            optimizer: over ``parameters()`` or ``param_groups()``.
            max_grad_norm: clip the gradient to this norm; that of the constructor if not given.

        Returns:
            The batch's loss, the same on every rank.

        Raises:
            InputError: the batch cannot be shared evenly, ranks give unlike batches, or the optimizer would not train
                as in one process.
            NonFiniteLossError: the loss or the gradient's norm is NaN or infinite; the gradients are
                dropped, the parameters unchanged. Under fp16 a step whose gradient overflows is skipped instead, and
                the loss scaled less from then on.
            PeerError: another rank is gone, failed or hangs.
            ExhaustedError: memory ran out.
        """
        with self.watch.explained(self.step, self.plan, self.runtime.meshes.stage_index, StepPhase.BATCH):
            batch, self._turns = self._batches.of_step(batch, self.watch.group)
        loss: Tensor = self._train_step(batch, optimizer, max_grad_norm)
        return loss

    @observed
    def _train_step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Tensor:
        train = self.plain_step if self.steering is None else self.steering.train_step
        with self.watch.explained(self.step, self.plan, self.runtime.meshes.stage_index):
            return train(batch, optimizer, max_grad_norm)

    def plain_step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None) -> Tensor:
        """``train_step`` under the plan as it is."""
        self._optimizers.check(optimizer)
        self._called = False
        largest = self.max_grad_norm if max_grad_norm is None else max_grad_norm
        try:
            value, is_finite = finish_step(self, self.backward_step(batch), largest)
        except BaseException:  # training may go on behind it, without what this step left
            optimizer.zero_grad(set_to_none=True)
            for runtime in self.runtimes:
                runtime.updates.drop_gradients()
            raise
        if is_finite:
            self.watch.at(StepPhase.OPTIMIZER)
            optimizer.step()
            self.publish()  # torch calls no hook of an optimizer of another library
        optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return value

    def backward_step(self, batch: Any) -> Tensor:
        """Forward and backward of a global batch, up to reduced gradients (under fp16 scaled ones).

        Returns:
            This rank's part of the loss: the sum over the ranks of the world is the batch's loss.
        """
        self._begin()
        self._interrupted = True
        lifted = 1.0 if self.scaler is None else self.scaler.get_scale()
        self.calls.buffers.begin(self.runtimes, self.plan.microbatches)
        with holding_copies(self.calls.compute, self.device):
            parts = self._parts(batch, self.plan.microbatches * self._turns)
            step = accumulated_step if self.runtime.pipeline is None else pipelined_step
            loss = step(self, parts, lifted)
        self.watch.at(StepPhase.GRADIENTS)
        self.calls.buffers.finish()
        for runtime in self.runtimes:
            runtime.reducer.finish()
        if self.runtime.shared is not None:
            self.runtime.shared.reduce()
        for runtime in self.runtimes:
            runtime.updates.deliver()
        self._interrupted = False
        return loss / lifted

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add up gradients on this rank; the first one outside sums them over the ranks.

        Layers under ZeRO reduce at every backward pass.
        """
        with ExitStack() as stack:
            for runtime in self.runtimes:
                stack.enter_context(runtime.reducer.no_sync())
            yield

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the whole model's gradient to a norm, after backward; returns its norm before. All ranks call it."""
        norm = self._norm()
        self._multiply(clip_factor(norm, max_norm))
        return norm

    def _steps_when_called(self) -> bool:
        adds_on_host = self.has_gradients() and any(runtime.updates.hosts for runtime in self.runtimes)
        several = len(self.plan.stages) > 1 or (self.plan.microbatches > 1 and not adds_on_host)
        return self.scaler is None and several

    def _stepped(self, batch: Any) -> Tensor:
        aside = GradientsAside(self, None if self._aside is None else self._aside())
        self._turns, self._aside = 1, weakref.ref(aside)
        return self._guarded(aside.loss_of(batch))

    def _guarded(self, loss: Tensor) -> Tensor:
        def parameters() -> frozenset[int]:
            held = (tensor for stage in self.runtimes for one in stage.owned for tensor in (one.parameter, one.updated))
            return frozenset(map(id, (*nn.Module.parameters(self), *held)))

        return loss if is_alone(self.plan) else guard_loss(loss, parameters)

    def has_gradients(self) -> bool:
        """Whether parameters on this rank have gradients."""
        return any(one.gradient is not None for runtime in self.runtimes for one in runtime.owned)

    def _watched(self, phase: StepPhase = StepPhase.SAVING) -> AbstractContextManager[None]:
        return self.watch.explained(self.step, self.plan, self.runtime.meshes.stage_index, phase)

    def _norm(self) -> Tensor:
        return reduced(self, [])[-1].sqrt()

    def _multiply(self, factor: Tensor) -> None:
        for runtime in self.runtimes:
            multiply_gradients(runtime.owned, factor)

    def param_groups(self, groups: Any = None) -> list[dict[str, Any]]:
        """Parameter groups for any torch optimizer: shards of unlike kinds are in separate groups.

        Args:
            groups: parameters or groups with options, as an optimizer takes them; all parameters if not given.
        """
        return split_groups(self.parameters() if groups is None else groups)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """What an optimizer updates on this rank, by name: shards, rows under ZeRO-1, copies in host memory."""
        every = [one for runtime in self.runtimes for one in runtime.owned]
        updated = {one.parameter: one.updated for one in every}
        by_name = {name: one.updated for one in every for name in one.names}
        for name, one in super().named_parameters(*args, **kwargs):
            # while FSDP has gathered a layer, its modules hold other tensors, by the same names
            gathered = next((by_name[path] for path in (name.partition(".")[2], name) if path in by_name), one)
            yield name, updated.get(one, gathered)

    def optimizer(self, factory: OptimizerFactory, **options: Any) -> torch.optim.Optimizer:
        """An optimizer over this rank's shards: ``parallel.optimizer(torch.optim.AdamW, lr=1e-3)``; all ranks call it.

        Raises:
            InputError: its update of an element depends on others (Adafactor, LAMB, Muon), which the plan has on other
                ranks.
        """
        groups = self.param_groups()
        beside = self.device.type != "cpu"  # on a machine without an accelerator the host is the device
        made = factory(fused_on_host(groups, factory, options) if beside else groups, **options)
        self._optimizers.check(made, lambda groups: factory(groups, **options))
        return made

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: ARG002
        """What ``to``, ``half``, ``cuda`` and the like call; nothing to do where parameters are so already.

        Raises:
            InputError: another device or dtype.
        """
        for dtype in {parameter.dtype for parameter in self.parameters()}:
            wanted = fn(torch.empty(0, dtype=dtype, device=self.device))
            if (wanted.dtype, wanted.device) != (dtype, self.device):
                raise moved_error(wanted.dtype, wanted.device)
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> ParameterCopies:
        """Copies of this rank's parameters, as ``torch.optim.swa_utils.AveragedModel(parallel)`` takes them.

        ``averaged.module.full_state_dict()`` gives whole averages; all ranks call it.
        """
        return ParameterCopies(self)

    def publish(self) -> None:
        """After something else than a torch optimizer updated parameters, before they are looked at: every rank gets
        what the others (or the host) updated. All ranks call it; using the model does, too.
        """
        for runtime in self.runtimes:
            runtime.updates.publish()

    def _show(self) -> None:
        for runtime in self.runtimes:
            runtime.updates.show()

    def _begin(self, *, trains: bool = True) -> None:
        trains = trains and self.training and torch.is_grad_enabled()
        if trains:
            self.use.check()
        if self.calls.draws is not None:
            self.calls.draws.begin_step(self.step - self._looped, trains)
        for runtime in self.runtimes:
            if self._interrupted or runtime.reducer.is_running:
                runtime.reducer.abandon()
                abandon_pass(runtime.model)
            runtime.updates.begin()
        self._interrupted = False
        if self.use.has_changed():
            for module in (module for runtime in self.runtimes for module in runtime.sharded.zero_modules):
                module.reshard()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's ``state_dict()`` on the CPU of every rank, under the user's own names; all ranks call it.

        It is what the unsplit model loads, and every other plan. See ``runtime.parameters.full_state``.
        """
        with self._watched():
            return full_state_dict(self)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set this rank's shares of a whole state, of any plan or of the unsplit model; every rank gives all of it.

        Raises:
            InputError: an entry this rank needs is missing, or has another shape.
        """
        load_full_state_dict(self, state)

    def _parts(self, batch: Any, count: int) -> list[list[Any]]:
        """By stage of this rank its rows of every micro-batch, in the layout of the stage's glue code."""
        samples = batch_size(batch)
        self._check_samples(samples, count)
        self.calls.rows = samples // count
        stages = [self.runtime] if self.runtime.pipeline is None else self.runtimes
        return [self.calls.parts(runtime, batch) for runtime in stages]

    def _check_samples(self, samples: int, count: int) -> None:
        check_samples(samples, self.plan, count)

    def local_loss(self, part: Any) -> Tensor:
        """The loss of this rank's samples of a micro-batch, without a pipeline."""
        return self.calls.loss(self.runtime, part)
