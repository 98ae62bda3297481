"""A model that DeepSpeed's engine trains by a plan, with the interface of ``runtime.engine.ParallelModel``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError, NonFiniteLossError
from galvatron_lite.model.balancing import LOGITS, asks_balance
from galvatron_lite.model.batch import (
    LossFn,
    batch_of_call,
    batch_size,
    call_model,
    loss_of,
    map_tensors,
    model_inputs,
    slice_batch,
)
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.trace.meta import meta_copy, prepare_for_training
from galvatron_lite.parallelism.backends import DEEPSPEED
from galvatron_lite.parallelism.wrapping import wrap_forward
from galvatron_lite.plans.export.deepspeed import config_of, zero_stage
from galvatron_lite.plans.export.fields import nested
from galvatron_lite.plans.io import check_runs
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.assignment import LayerAssignment, check_samples, place_layers
from galvatron_lite.runtime.batch_checks import GlobalBatches
from galvatron_lite.runtime.checkpoint.checkpointer import Checkpointer
from galvatron_lite.runtime.checkpoint.saving import Saving
from galvatron_lite.runtime.deepspeed.library import EngineOptimizer, check_engine, load
from galvatron_lite.runtime.deepspeed.saving import DeepSpeedSaver, full_state_dict, load_full_state_dict
from galvatron_lite.runtime.loss.weights import LossWeight, ShareScale, check_reduction, share_scales, weighted
from galvatron_lite.runtime.mesh import join_world
from galvatron_lite.runtime.monitor.notes import StepPhase
from galvatron_lite.runtime.monitor.observer import Observable, observed
from galvatron_lite.runtime.monitor.watch import Watch
from galvatron_lite.runtime.parameters.materialize import InitFn, Materializer
from galvatron_lite.runtime.parameters.use import check_hooks, refuse_copies
from galvatron_lite.runtime.peers import broadcast_values
from galvatron_lite.runtime.sharding import tied_layers
from galvatron_lite.runtime.user_names import UserNames
from galvatron_lite.world import pick_device

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OptimizerFactory = Callable[..., torch.optim.Optimizer]


class DeepSpeedModel(Saving, Observable, UserNames):
    """A model that DeepSpeed's engine trains. Every rank creates one and passes it the same global batches.

    DeepSpeed's engine is created together with the optimizer, by ``parallel.optimizer(factory, **options)``, which is
    required before training and ``outputs``. Checkpoints have the format of all plans; see ``DeepSpeedSaver``.

    Args:
        plan: with one ZeRO stage for all layers.
        precision: of parameters and compute, beside float32 master copies; default: that of the plan.

    All other arguments are those of ``ParallelModel``; no example batch is needed.

    Attributes:
        config: DeepSpeed's configuration, by dotted keys.

    Raises:
        LaunchError: the world does not have the plan's size, or DeepSpeed is missing.
        InputError: the plan does not fit the model, or DeepSpeed cannot run it.
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
        device: torch.device | str | None = None,
        precision: str | None = None,
        max_grad_norm: float | None = None,
        init_fn: InitFn | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_reduction(loss_reduction, loss_weight)
        self._loss_weight, self._loss_reduction = loss_weight, loss_reduction
        self._scales = dict[int, ShareScale]()
        prepare_for_training(model)
        check_hooks(model)
        for name, one in model.named_parameters():
            if one.dim() == 0 or one.dtype is torch.float64:
                kind, change = ("in float64", "cast it") if one.dim() else ("without dimensions", "give it one")
                remedy = f"DeepSpeed takes no parameter {kind}: {change} (torch.ones(1)), or take another backend."
                raise InputError("parameter", name, remedy)
        if plan.devices > 1 and asks_balance(model, batch):
            remedy = "DeepSpeed's ranks balance experts over their own tokens: set it to False, or take our backend."
            raise InputError(f"output_{LOGITS}", True, remedy)
        self.device = pick_device() if device is None else torch.device(device)
        self.plan, self.max_grad_norm, self._loss_fn = check_runs(plan, DEEPSPEED), max_grad_norm, loss_fn
        join_world(plan, self.device.type)
        strategies = [run.strategy for stage in plan.stages for run in stage.runs]
        sharded = (strategy for strategy in strategies if zero_stage(strategy))
        pinned = self.device.type == "cuda"
        self.config = config_of(
            plan, next(sharded, strategies[0]), precision=precision, max_grad_norm=max_grad_norm, pinned=pinned
        )
        self._compute = _DTYPES[precision or plan.precision]
        self._in_buffers = self._compute is not None and not self.config["zero_optimization.stage"]  # gradients
        # in a list, so that it is no submodule
        self._library, self._pristine = load(self.device), [meta_copy(model)]
        self.dtypes = {name: one.dtype for name, one in model.named_parameters(remove_duplicate=False)}
        self._place(model, place_layers(plan, layers)[0], init_fn, seed)
        self.module, self._engines = model, list[Any]()
        if self.config["zero_optimization.stage"] == 3:
            refuse_copies(model, "A rank has a part of it: load full_state_dict() into a model that is not split.")
        self._pending: tuple[float | None, Tensor | None] = None, None
        self._has_gradients = False  # of a loop's own backward, which no step has used
        self.watch = Watch(self.device)
        self._global_batches = GlobalBatches(self.device, batch)

    def _place(self, model: nn.Module, stage: Sequence[LayerAssignment], init_fn: InitFn | None, seed: int) -> None:
        """Initialize each layer and wrap its recomputation; under ZeRO-3 keep only the shards of this rank."""
        broadcast_values(model, self.device)
        materializer = Materializer(model, [placed.layer for placed in stage], self.device, seed, init_fn)
        for layers in tied_layers(model, stage):
            for placed in layers:
                materializer.place(placed.layer)
            for placed in layers:
                for module in map(model.get_submodule, placed.layer.modules):
                    wrap_forward(module, placed.strategy)
                    if self.config["zero_optimization.stage"] == 3:
                        if self._compute is not None:
                            module.to(self._compute)
                        self._library.zero.Init(module=module, config_dict_or_path=nested(self.config))

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine; None: there is no optimizer yet."""
        return self._engines[0] if self._engines else None

    def optimizer(self, factory: OptimizerFactory, **options: Any) -> torch.optim.Optimizer:
        """Create an optimizer over the trained parameters, and the engine that steps it."""
        return self._bind(factory(self.param_groups(), **options), factory, options)

    def param_groups(self, groups: Any = None) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer: ``groups``, or by default all trained parameters."""
        if groups is None:
            groups = [{"params": [parameter for parameter in self.module.parameters() if parameter.requires_grad]}]
        return [dict(group) if isinstance(group, Mapping) else {"params": [group]} for group in groups]

    def _bind(
        self, inner: torch.optim.Optimizer, factory: OptimizerFactory | None = None, options: Any = None
    ) -> EngineOptimizer:
        if self._engines:
            raise InputError("optimizer", type(inner).__name__, "The model has one already: it is made once.")
        if self.config["zero_optimization.stage"] == 3 and not all(group["params"] for group in inner.param_groups):
            remedy = "Under ZeRO-3 parameters are empty, with one dim: group them by name, or by p.ds_shape."
            raise InputError("param_groups", "a group without parameters", remedy)
        if factory is None:
            warnings.warn(
                "Checkpoints cannot have the states of this optimizer: make it with parallel.optimizer(factory).",
                stacklevel=4,
            )
        data = nested(self.config)
        engine = self._library.initialize(model=self.module, optimizer=inner, config=data, dist_init_required=False)[0]
        check_engine(engine, self.config)
        self._engines.append(engine)
        return EngineOptimizer(inner, self.update, self.drop_gradients, factory, options)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean loss of a global batch in a single pass: ``parallel(batch)``, or called as the model is.

        Call ``loss.backward(); optimizer.step()`` next. The value is the mean over the global batch on every rank.

        Raises:
            InputError: there is no optimizer yet, or the batch cannot be shared evenly.
        """
        engine = self._ready()
        (microbatch,) = self._microbatches(self._global_batches(batch_of_call(args, kwargs)), 1)
        if torch.is_grad_enabled():
            self._check_gradients()
        engine.set_gradient_accumulation_boundary(True)
        self.note_call()
        loss = self._local_loss(microbatch)
        if not torch.is_grad_enabled():
            return self._mean(loss)
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        mean: Tensor = _MeanLoss.apply(anchor, self._mean(loss), partial(self._backward, loss))  # type: ignore[no-untyped-call]
        return mean

    def _backward(self, loss: Tensor, factor: Tensor) -> None:
        with torch.enable_grad():  # a single pass has one micro-batch, whatever their number in the plan
            self.engine.backward(loss * factor.to(loss.dtype), scale_wrt_gas=False)
        self._has_gradients = True

    def _check_gradients(self) -> None:
        if self._has_gradients and (self._in_buffers or self.config["zero_optimization.stage"] in (1, 2)):
            remedy = (
                "Under this plan DeepSpeed does not add to those of the batch before, which no step has used: call "
                "train_step([batch, batch], optimizer), or take ZeRO-3."
            )
            raise InputError("gradients", "of two batches", remedy)

    def drop_gradients(self) -> None:
        """Drop gradients that no step has used; nothing if there are none."""
        if self._has_gradients and (self._in_buffers or "zero_optimization.offload_optimizer.device" in self.config):
            remedy = "Under this plan DeepSpeed keeps them until the optimizer's step: call it before zero_grad."
            raise InputError("gradients", "dropped", remedy)
        if self._has_gradients:
            self.engine.optimizer.zero_grad()
        self._has_gradients = False

    def outputs(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs for a global batch, without gradients, on every rank; see ``ParallelModel.outputs``."""
        engine = self._ready()
        (microbatch,) = self._microbatches(self._global_batches(batch_of_call(args, kwargs)), 1)
        rows = batch_size(microbatch)
        with torch.no_grad():
            outputs = call_model(engine, model_inputs(engine.module, microbatch))
            return map_tensors(outputs, lambda tensor: self._gathered(tensor, rows))

    @observed
    def train_step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None) -> Tensor:
        """One optimizer step on a global batch, in the plan's micro-batches; see ``ParallelModel.train_step``.

        Args:
            batch: the same global batch on every rank; a list of several is one step on all of their samples.
            optimizer: from ``optimizer``; or an optimizer over ``parameters()``, for which the engine is created.
            max_grad_norm: clip the gradient to this norm; default: that of the constructor.
        """
        if not self._engines:
            self._bind(optimizer)
        inner = optimizer.inner if isinstance(optimizer, EngineOptimizer) else optimizer
        if inner is not self.engine.basic_optimizer:
            raise InputError("optimizer", type(inner).__name__, "The engine was made with another one: give that.")
        self._called = False
        with self.watch.explained(self.step, self.plan, 0):
            batch, batches = self._global_batches.of_step(batch)
            loss = self._mean(self._accumulate(batch, self.plan.microbatches * batches))
            self._pending = max_grad_norm, loss
            self.watch.at(StepPhase.OPTIMIZER)
            # schedulers check whether ``step`` of the optimizer was called
            (optimizer.step if isinstance(optimizer, EngineOptimizer) else self.update)()
        self.step += 1
        return loss

    def _accumulate(self, batch: Any, count: int) -> Tensor:
        """Run forward and backward for this rank's samples, and return their mean loss."""
        engine = self._ready()
        self._check_gradients()
        total = torch.zeros((), device=self.device)
        for number, microbatch in enumerate(self._microbatches(batch, count)):
            engine.set_gradient_accumulation_boundary(number == count - 1)
            self.watch.at(StepPhase.FORWARD, number)
            loss = self._local_loss(microbatch)
            self.watch.at(StepPhase.BACKWARD, number)
            engine.backward(loss / count, scale_wrt_gas=False)
            total += loss.detach().float() / count
        return total

    def update(self) -> None:
        """Update the parameters with the clipped gradients of the last backward pass, and drop the gradients.

        Raises:
            NonFiniteLossError: see ``train_step``.
        """
        (norm, loss), self._pending, self._has_gradients = self._pending, (None, None), False
        engine, largest = self._ready(), (self.max_grad_norm if norm is None else norm) or 0.0
        applied = self._clip(engine, largest, loss)
        if applied:
            engine.step()
            applied = engine.was_step_applied()
        failed = not applied and self._compute is not torch.float16  # with loss scaling, steps may be skipped
        if failed or (loss is not None and not bool(loss.isfinite())):
            value = "unknown" if loss is None else float(loss)
            raise NonFiniteLossError(
                f"The loss or the gradient's norm is not finite (loss {value}). The step was not taken. "
                "Look at the batch, lower the learning rate, or clip the gradient (max_grad_norm)."
            )
        self.note_update()

    def _clip(self, engine: Any, largest: float, loss: Tensor | None) -> bool:
        """Clip the gradient. If it is not finite, drop it and return False."""
        if engine.optimizer is not engine.basic_optimizer:
            engine.optimizer.clip_grad = largest  # DeepSpeed clips, and checks for overflow, in its step
            return True
        trained = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        norm = nn.utils.clip_grad_norm_(trained, largest or float("inf"))
        if bool(norm.isfinite()) and (loss is None or bool(loss.isfinite())):
            return True
        engine.zero_grad()
        return False

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the full ``state_dict()``, from master copies, on the CPU of every rank. All ranks call it."""
        return full_state_dict(self.module, self.dtypes, has_engine=bool(self._engines))

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a full ``state_dict()`` of any plan or of the plain model. All ranks call it with the full state."""
        load_full_state_dict(self.module, state)

    def _watched(self, phase: StepPhase = StepPhase.SAVING) -> AbstractContextManager[None]:
        return self.watch.explained(self.step, self.plan, 0, phase)

    def _new_saver(self) -> Checkpointer:
        return DeepSpeedSaver(self, *self._pristine)

    def _ready(self) -> Any:
        if not self._engines:
            remedy = "Make it first: optimizer = parallel.optimizer(torch.optim.AdamW, lr=...)."
            raise InputError("optimizer", None, remedy)
        return self._engines[0]

    def _microbatches(self, batch: Any, count: int) -> list[Any]:
        """This rank's samples of each micro-batch, on its device and in the dtype of compute."""
        samples, ranks, rank = batch_size(batch), self.plan.devices, dist.get_rank()
        check_samples(samples, self.plan, count)
        rows = samples // (count * ranks)
        scales = share_scales(self._loss_weight, self._loss_reduction, batch, count * ranks)
        starts = range(rank * rows, samples, rows * ranks)
        microbatches = [map_tensors(slice_batch(batch, start, start + rows), self._placed) for start in starts]
        self._scales.clear()
        self._scales.update(zip(map(id, microbatches), scales[rank::ranks], strict=True))
        return microbatches

    def _placed(self, tensor: Tensor) -> Tensor:
        cast = self._compute if tensor.is_floating_point() else None
        return tensor.to(self.device, cast, non_blocking=True)

    def _local_loss(self, microbatch: Any) -> Tensor:
        scale = self._scales[id(microbatch)]
        with scale.inside():
            output = call_model(self.engine, model_inputs(self.engine.module, microbatch))
            loss = loss_of(output, microbatch, self._loss_fn)
        return weighted(loss, scale.total)

    def _mean(self, loss: Tensor) -> Tensor:
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        return total / self.plan.devices

    def _gathered(self, tensor: Tensor, rows: int) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            return self._mean(tensor).to(tensor.dtype) if tensor.is_floating_point() else tensor
        pieces = [torch.empty_like(tensor) for _ in range(self.plan.devices)]
        dist.all_gather(pieces, tensor.contiguous())
        return torch.cat(pieces)


class _MeanLoss(torch.autograd.Function):
    """Returns the mean loss of all ranks in forward; its backward is the engine's."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, mean: Tensor, backward: Callable[[Tensor], None]) -> Tensor:
        ctx.engine_backward = backward
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.engine_backward(gradient)
        return torch.zeros_like(gradient), None, None
