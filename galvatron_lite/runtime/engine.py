"""Training steps of a model that is split by a plan, on the launched processes."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from galvatron_lite.runtime.compiled import check_compile
from galvatron_lite.runtime.loss.tensor import global_mean, guard_loss
from galvatron_lite.runtime.loss.weights import LossWeight, check_reduction
from galvatron_lite.runtime.mesh import build_meshes
from galvatron_lite.runtime.monitor.notes import StepPhase
from galvatron_lite.runtime.monitor.observer import observed
from galvatron_lite.runtime.monitor.watch import Watch
from galvatron_lite.runtime.optimizer import OptimizerSteps
from galvatron_lite.runtime.parallelize import parallelize
from galvatron_lite.runtime.parameters.pieces import entries_of
from galvatron_lite.runtime.parameters.use import ParameterUse, check_hooks, guard_model, is_alone, retire
from galvatron_lite.runtime.phases import Steering
from galvatron_lite.runtime.preparation import Examined, SetupOptions
from galvatron_lite.runtime.reshard.original import OriginalModel
from galvatron_lite.runtime.reshard.reshard import Resharded, reshard
from galvatron_lite.runtime.scaling import LossScaler
from galvatron_lite.runtime.sharded_model import ShardedModel
from galvatron_lite.runtime.stage_calls import Calls, SyncedBuffers, draws_of
from galvatron_lite.runtime.stages import StageRuntime
from galvatron_lite.runtime.steps import (
    PendingGradients,
    accumulated_step,
    finish_step,
    output_count,
    pipelined_loss,
    pipelined_outputs,
    pipelined_step,
    sum_over_world,
)
from galvatron_lite.world import pick_device


class ParallelModel(ShardedModel):
    """A model split over the launched processes. Every rank creates it alike, and passes the same global batches.

    Without a pipeline it is used like the model: ``loss = parallel(batch); loss.backward(); optimizer.step()``.
    ``train_step`` does a full step under every plan. ``parameters()`` are this rank's shards; ``full_state_dict()`` is
    the full model's state, to be saved.

    Args:
        model: the user's model, changed in place. Real parameters are set to those of rank 0; a model on the meta
            device is initialised.
        plan: for this model and this number of processes.
        layers: of the model, from ``discover_layers``.
        batch: an example batch; needed where the plan splits blocks by tensor parallelism, and where layers of
            different pipeline stages read more than the output of the layer before them.
        synced_buffers: buffers that forward passes update from the samples, by name: ``mean`` or ``sum``, how the
            updates of shares of a batch are joined.
        device: of this rank; default: its GPU, or the CPU.
        precision: ``fp32``, ``bf16`` or ``fp16`` compute; default: the plan's.
        max_grad_norm: clip the gradient to this norm in ``train_step``; None: do not clip.
        tensor_plans: how layers are split by tensor parallelism, by name; default: inferred.
        examined: what ``preparation.examine`` returned for the model under this plan; default: examined here.

    All other arguments are those of ``auto_parallelize``.

    Attributes:
        scaler: scales the loss under fp16; None in other precisions.
        origin: the model before it was split.
        steering: changes the plan between steps (phases, adaptive plans); None: nothing does.
        plan_check: raises ``InputError`` for a plan that would not train as one process does; None: all plans do.

    Raises:
        LaunchError: the number of processes is not the plan's.
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
        self.module, self.plan, self.max_grad_norm = model, plan, max_grad_norm
        self.device = pick_device() if device is None else torch.device(device)
        self.entries = entries_of(model, layers)
        double = any(one.dtype in (torch.float64, torch.complex128) for one in model.parameters())
        self.sum_dtype = torch.float64 if double else torch.float32
        draws = draws_of(randomness, model, plan, layers, batch, seed, compiles=bool(compile))
        options = SetupOptions(
            device=self.device,
            compute=compute_dtype(precision or plan.precision),
            tensor_plans=tensor_plans,
            init_fn=init_fn,
            seed=seed,
            loss_fn=loss_fn,
            expert_capacity=expert_capacity,
            groups=ProcessGroups(timeout=timeout),
            compile=check_compile(compile, plan),
            draws=draws,
            examined=examined,
        )
        self.watch = Watch(self.device, timeout)
        self.origin = OriginalModel(model, layers, batch, options, precision)
        buffers = SyncedBuffers(synced_buffers or {})
        self.calls = Calls(options.compute, self.device, loss_fn, draws, loss_weight, loss_reduction, buffers=buffers)
        self.scaler: LossScaler | None = None
        unsplit = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]
        self.adopt(plan, self._set_up(model, layers, batch, options), options)
        retire(unsplit, self.runtimes)
        self.averages = []
        self.steering: Steering | None = None
        self.plan_check: Callable[[Plan], None] | None = None
        self.origin.settle()
        self._pending: weakref.ref[PendingGradients] | None = None
        self._optimizers = OptimizerSteps(self)
        # ranks of other stages must know which values between stages have gradients
        trained = self._trained if len(plan.stages) > 1 else tuple
        self.global_batches = GlobalBatches(self.device, batch, local_batch, timeout, trained)
        self._batch_count = 1  # batches that make up the present step
        self._interrupted = False  # whether an error ended the last backward pass

    def _set_up(
        self, model: nn.Module, layers: Sequence[Layer], batch: Any, options: SetupOptions
    ) -> Sequence[StageRuntime]:
        meshes = build_meshes(self.plan, self.device.type, options.groups)
        return parallelize(model, self.plan, layers, batch, meshes, options)

    def adopt(self, plan: Plan, runtimes: Sequence[StageRuntime], options: SetupOptions) -> None:
        """Train with the runtimes of a plan, from now on; called by ``reshard``."""
        self.plan, self.runtimes, self.runtime = plan, runtimes, runtimes[0]
        self.copies = nn.ModuleList(runtime.model for runtime in runtimes[1:])
        self.use, self.calls.compute = ParameterUse(runtimes, plan), options.compute
        if options.compute is not torch.float16:
            self.scaler = None
        elif self.scaler is None:
            self.scaler = LossScaler(self.gradient_norm, self.scale_gradients)
        guard_model(self.module, self)  # a change of plan has removed the hooks
        self._show_parameters()

    def switch(
        self, plan: Plan | Path | str, optimizer: torch.optim.Optimizer, scheduler: Any = None, **options: Any
    ) -> Resharded:
        """Change the plan (or the file that contains it) between two steps; all ranks call it.

        See ``runtime.reshard.reshard.reshard``.
        """
        new_plan = plan if isinstance(plan, Plan) else read_plan(plan)
        with self._watched(StepPhase.SWITCHING):
            return reshard(self, optimizer, new_plan, scheduler, **options)

    @property
    def phase(self) -> PlannedPhase | None:
        """The phase of the next step, which determines its batch and sequence; None without phases."""
        return None if self.steering is None else self.steering.phase

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a global batch: ``parallel(batch)``, or as the model is called; then ``loss.backward()``.

        The value is that of the full batch on every rank. Where the plan has a pipeline or micro-batches, and
        gradients are wanted, the backward passes run inside this call (``runtime.steps.PendingGradients``).

        Raises:
            InputError: the batch cannot be shared evenly, or requires gradients; there are gradients of another batch
                that ran in micro-batches; a parameter has a hook, or was frozen when the plan was applied and now
                requires a gradient; a plan with a pipeline runs in evaluation mode with gradients.
        """
        call: Callable[..., Tensor] = self._loss
        if "torch._dynamo" in sys.modules:  # torch.compile(parallel) traces none of it: compile= does, by block
            call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
        return call(*args, **kwargs)

    def _trained(self) -> list[tuple[bool, bool]]:
        return [(one.parameter.requires_grad, one.updated.requires_grad) for one in self.managed]

    def _loss(self, *args: Any, **kwargs: Any) -> Tensor:
        batch = self.global_batches(batch_of_call(args, kwargs), self.watch.group)
        if not is_alone(self.plan) and any(tensor.requires_grad for tensor in tensors_of(batch)):
            remedy = "Ranks and micro-batches work on shares of the batch, whose gradients stay with them: detach it."
            raise InputError("batch", "a tensor that requires a gradient", remedy)
        self.note_call()
        if torch.is_grad_enabled() and self.training and self._runs_backward_when_called():
            pending = PendingGradients(self, None if self._pending is None else self._pending())
            self._batch_count, self._pending = 1, weakref.ref(pending)
            return self._guard_loss(pending.loss_of(batch))
        if len(self.plan.stages) > 1:
            if not torch.is_grad_enabled():
                return self._pipelined_loss(batch)
            remedy = (
                "Under torch.no_grad() the call gives the loss, and outputs(batch) the outputs; call train() to train."
            )
            raise InputError("plan", f"{len(self.plan.stages)} stages in evaluation mode", remedy)
        ((part,),) = self._parts(batch, 1)
        self._prepare_pass()
        self.calls.buffers.begin(self.runtimes if self.training else (), 1)
        loss = self.local_loss(part)
        self.calls.buffers.finish()
        if not loss.requires_grad:
            self._show_parameters()
        for runtime in self.runtimes:
            set_all_reduce(runtime.sharded.replicated, True)
            if runtime.updates.hosts and loss.requires_grad:  # gradients may be zeroed between forward and backward
                loss.register_hook(runtime.updates.follow_hosts)  # type: ignore[no-untyped-call]
            runtime.reducer.watch(loss, runtime.updates.deliver)
        group = self.runtime.samples_group
        return self._guard_loss(loss if group is None else global_mean(loss, group, self.runtime.traffic.glue.batch))

    def _runs_backward_when_called(self) -> bool:
        adds_on_host = self.has_gradients() and any(runtime.updates.hosts for runtime in self.runtimes)
        several = len(self.plan.stages) > 1 or (self.plan.microbatches > 1 and not adds_on_host)
        return self.scaler is None and several

    def _guard_loss(self, loss: Tensor) -> Tensor:
        def parameter_ids() -> frozenset[int]:
            local = (tensor for managed in self.managed for tensor in (managed.parameter, managed.updated))
            return frozenset(map(id, (*nn.Module.parameters(self), *local)))

        return loss if is_alone(self.plan) else guard_loss(loss, parameter_ids)

    def _pipelined_loss(self, batch: Any) -> Tensor:
        """The loss of a batch under a pipeline, without gradients."""
        self._prepare_pass(trains=False)
        count = output_count(batch_size(batch), self.plan)
        self.calls.buffers.begin(self.runtimes if self.training else (), count)
        loss = pipelined_loss(self, self._parts(batch, count))
        self.calls.buffers.finish()
        self._show_parameters()
        return sum_over_world(self, [loss], with_norm=False)[0]

    def outputs(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own outputs for a batch, complete on every rank, without gradients: ``outputs(batch)``, or as the
        model is called. Tensors without samples (a loss) are means over the ranks' shares of the samples.

        With a pipeline the batch runs in the plan's micro-batches where these divide it, else at once; what is neither
        a tensor in a nest of mappings, tuples and lists nor a plain value (a cache) is then None.

        Raises:
            InputError: the batch cannot be shared evenly.
        """
        batch = self.global_batches(batch_of_call(args, kwargs), self.watch.group)
        with torch.no_grad():
            self._prepare_pass(trains=False)
            try:
                if self.runtime.pipeline is None:
                    ((part,),) = self._parts(batch, 1)
                    return self._outputs(part)
                return pipelined_outputs(self, self._parts(batch, output_count(batch_size(batch), self.plan)))
            finally:
                self._show_parameters()

    def train_step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None) -> Tensor:
        """One optimizer step on a global batch, in the plan's micro-batches.

        Args:
            batch: the same global batch on every rank, or with ``local_batch`` this rank's share. A list of several
                batches is one step on all of their samples, each batch in the plan's micro-batches.
            optimizer: over ``parameters()`` or ``param_groups()``.
            max_grad_norm: clip the gradient to this norm; default: that of the constructor.

        Returns:
            The batch's loss, the same on every rank.

        Raises:
            InputError: the batch cannot be shared evenly, ranks pass different batches, or the optimizer would not
                train as in one process.
            NonFiniteLossError: the loss or the gradient's norm is NaN or infinite; the gradients are dropped, the
                parameters unchanged. Under fp16 a step whose gradient overflows is skipped instead, and the loss scale
                reduced.
            PeerError: another rank is gone, failed or hangs.
            ExhaustedError: memory ran out.
        """
        with self._watched(StepPhase.BATCH):
            batch, self._batch_count = self.global_batches.of_step(batch, self.watch.group)
        loss: Tensor = self._train_step(batch, optimizer, max_grad_norm)
        return loss

    @observed
    def _train_step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Tensor:
        train = self.plain_step if self.steering is None else self.steering.train_step
        with self.watch.explained(self.step, self.plan, self.runtime.meshes.stage_index):
            return train(batch, optimizer, max_grad_norm)

    def plain_step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None) -> Tensor:
        """``train_step`` under the present plan."""
        self._optimizers.check(optimizer)
        self._called = False
        max_norm = self.max_grad_norm if max_grad_norm is None else max_grad_norm
        try:
            loss, is_finite = finish_step(self, self.backward_step(batch), max_norm)
        except BaseException:  # training may continue after it, without the gradients of this step
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
        return loss

    def backward_step(self, batch: Any) -> Tensor:
        """Forward and backward of a global batch, up to reduced gradients (under fp16 scaled gradients).

        Returns:
            This rank's part of the loss: the sum over all ranks is the batch's loss.
        """
        self._prepare_pass()
        self._interrupted = True
        loss_scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        self.calls.buffers.begin(self.runtimes, self.plan.microbatches)
        with holding_copies(self.calls.compute, self.device):
            parts = self._parts(batch, self.plan.microbatches * self._batch_count)
            step = accumulated_step if self.runtime.pipeline is None else pipelined_step
            loss = step(self, parts, loss_scale)
        self.watch.at(StepPhase.GRADIENTS)
        self.calls.buffers.finish()
        for runtime in self.runtimes:
            runtime.reducer.finish()
        if self.runtime.shared is not None:
            self.runtime.shared.reduce()
        for runtime in self.runtimes:
            runtime.updates.deliver()
        self._interrupted = False
        return loss / loss_scale

    def local_loss(self, part: Any) -> Tensor:
        """The loss of this rank's samples of a micro-batch, without a pipeline."""
        return self.calls.loss(self.runtime, part)

    def _outputs(self, part: Any) -> Any:
        """The model's outputs for a micro-batch, without a pipeline."""
        return self.calls.outputs(self.runtime, part)[0]

    def _parts(self, batch: Any, count: int) -> list[list[Any]]:
        """This rank's rows of each micro-batch in the layout of the stage's glue code, by stage of this rank."""
        samples = batch_size(batch)
        check_samples(samples, self.plan, count)
        self.calls.rows = samples // count
        stages = [self.runtime] if self.runtime.pipeline is None else self.runtimes
        return [self.calls.parts(runtime, batch) for runtime in stages]

    def _prepare_pass(self, *, trains: bool = True) -> None:
        """Bring parameters up to date before the model runs, and drop what an interrupted pass left."""
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
        self.release_gathered()
