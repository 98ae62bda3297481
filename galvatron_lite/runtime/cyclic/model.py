"""A model that trains by cyclic data parallelism on the launched processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError, NonFiniteLossError
from galvatron_lite.model.batch import LossFn, batch_size, slice_batch
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.trace.meta import prepare_for_training
from galvatron_lite.parallelism.cyclic.mailbox import ProcessMailbox
from galvatron_lite.parallelism.cyclic.programme import MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicSetting
from galvatron_lite.parallelism.cyclic.stages import OptimizerFactory, SchedulerFactory, StageStates
from galvatron_lite.parallelism.precision import compute_dtype
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.assignment import check_samples
from galvatron_lite.runtime.checkpoint.manifest import FIELD
from galvatron_lite.runtime.cyclic.checkpoint import CyclicCheckpointer, latest
from galvatron_lite.runtime.cyclic.setup import CyclicOptions, average_buffers, local_shards, set_up
from galvatron_lite.runtime.loss.weights import LossWeight, check_even, check_reduction, share_scales
from galvatron_lite.runtime.mesh import join_world
from galvatron_lite.runtime.monitor.observer import Observable, observed
from galvatron_lite.runtime.parameters.full_state import gather_named, put
from galvatron_lite.runtime.parameters.use import check_hooks
from galvatron_lite.runtime.peers import Peers, at_first, broadcast_values, from_rank_zero
from galvatron_lite.runtime.user_names import UserNames
from galvatron_lite.world import pick_device

CLIPPING = (
    "Under cyclic data parallelism each stage's gradient is complete, and used, at another time, so the whole gradient "
    "has no norm. Leave it out, or clip each stage by itself in an optimizer of your own."
)
ELSEWHERE: Mapping[str, str] = {
    "param_groups": "What optimizer(factory, **options) returns has param_groups; the model makes its groups itself.",
    "clip_grad_norm": CLIPPING,
    "outputs": "To see outputs, load full_state_dict() into a model that is not split.",
}
"""Methods of other models that train in parallel, and what to do here instead."""
_STATES = "save(folder) of the model keeps the optimizers' states, and load(folder) sets them."
_STEPS = (
    "train_step(batch, optimizer) of the model steps each stage's optimizer when its gradient is complete. A scheduler "
    "that steps with it is given when it is made: optimizer(factory, scheduler=make_scheduler), where "
    "make_scheduler(optimizer) returns the scheduler of a stage."
)


def _refused(name: str, remedy: str) -> Any:
    """A method of the optimizer that raises an error when it is looked up, as schedulers look up but do not call it."""

    def look_up(_optimizer: CyclicOptimizer) -> NoReturn:
        raise InputError(f"{name} of the optimizer", "cyclic data parallelism", remedy)

    return property(look_up)


class CyclicOptimizer(torch.optim.Optimizer):
    """The optimizers of the stages of a process. Each steps when the gradient of its stage is complete.

    It is a subclass of ``Optimizer`` so that code that expects one, as torch's schedulers, gets helpful errors.

    Attributes:
        stages: optimizers by number of the stage.
    """

    def __init__(self, states: Mapping[int, StageStates]) -> None:
        self.stages = {stage: state.optimizer for stage, state in states.items() if state.optimizer is not None}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all stages, in order. Options may be read and set between training steps."""
        return [group for _, optimizer in sorted(self.stages.items()) for group in optimizer.param_groups]

    step = _refused("step", _STEPS)
    zero_grad = _refused("zero_grad", "train_step(batch, optimizer) of the model begins each stage's gradient anew.")
    state_dict = _refused("state_dict", _STATES)
    load_state_dict = _refused("load_state_dict", _STATES)


class CyclicModel(Observable, UserNames):
    """A model whose micro-batches enter its stages one after another, two time steps apart.

    It changes the training rule: some gradients are those of parameters one step old (``rules``). Every rank creates
    the same model and passes it the same global batches. The passes of a training step continue in the next call of
    ``train_step``; ``drain`` and ``flush`` end them. The random numbers of a pass (dropout) depend only on rank 0's
    ``torch.initial_seed()``, the stage and the micro-batch, and are the same in every setting.

    Args:
        plan: of cyclic data parallelism.
        batch: an example batch; required if layers read more than the output of the previous stage.
        loss_weight, loss_reduction: batches whose micro-batches have different weights are refused.
        precision: of compute, ``fp32`` or ``bf16``; default: that of the plan.
        max_grad_norm: refused, as no process has the full gradient.
        timeout: seconds until a missing message is an error.
        early_release: run the backward passes of a time step before its forward passes (``single`` only), so that the
            activations of at most N*N/2 + 1 stages are kept instead of N(N+1)/2.

    All other arguments are those of ``ParallelModel``.

    Attributes:
        step: training steps begun.
        runtime: stages and executor of this process.

    Raises:
        LaunchError: the world does not have the plan's size.
        InputError: the plan does not fit the model, stages share parameters, or clipping is requested.
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
        init_fn: Callable[[nn.Module], None] | None = None,
        seed: int = 0,
        timeout: float = 600.0,
        early_release: bool = False,
    ) -> None:
        super().__init__()
        prepare_for_training(model)
        check_hooks(model)
        _refuse_clipping(max_grad_norm)
        check_reduction(loss_reduction, loss_weight)
        self._loss_weight, self._loss_reduction = loss_weight, loss_reduction
        self.device = pick_device() if device is None else torch.device(device)
        self.plan, self.module, self.step = plan, model, 0
        join_world(plan, self.device.type)
        broadcast_values(model, self.device)
        compute = compute_dtype(precision or plan.precision)
        if compute is torch.float16:
            remedy = "Delayed gradients do not have the loss scaling that it needs: use bf16."
            raise InputError("precision", "fp16", remedy)
        draws = from_rank_zero(torch.initial_seed)
        options = CyclicOptions(self.device, compute, loss_fn, init_fn, seed, early_release, draws)
        assert plan.cyclic is not None
        kinds: dict[CyclicSetting, Sequence[MessageContent]] = {
            CyclicSetting.SINGLE: (),
            CyclicSetting.DATA: (MessageContent.PARTIAL, MessageContent.UPDATE),
            CyclicSetting.STAGES: tuple(MessageContent),
        }
        mailbox = ProcessMailbox(kinds[plan.cyclic.setting], self.device, timeout)
        self.runtime = set_up(model, plan, layers, batch, dist.get_rank(), mailbox, options)
        self._checkpointer = CyclicCheckpointer(self.runtime, Peers(timeout))
        self._optimizer: CyclicOptimizer | None = None

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        """Refuse calls: there is no pass through the full model at one version of its parameters.

        Raises:
            InputError: always.
        """
        remedy = (
            "Train it with train_step(batch, optimizer). To use the model, load full_state_dict() into one that is not "
            "split."
        )
        raise InputError("call of the model", "cyclic data parallelism", remedy)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute.

        Raises:
            InputError: a method that other parallel models have; names what to do instead.
        """
        if name in ELSEWHERE:
            raise InputError(f"{name} of the model", "cyclic data parallelism", ELSEWHERE[name])
        return super().__getattr__(name)

    def train(self, mode: bool = True) -> CyclicModel:
        """Set the training mode of the model and of its stages."""
        super().train(mode)
        for part in self.runtime.parts.values():
            part.model.train(mode)
        return self

    def optimizer(
        self, factory: OptimizerFactory, scheduler: SchedulerFactory | None = None, **options: Any
    ) -> CyclicOptimizer:
        """Create the optimizers of the stages: ``cyclic.optimizer(torch.optim.AdamW, lr=1e-3)``.

        Args:
            factory: ``factory(parameters, **options)`` creates the optimizer of a stage.
            scheduler: ``scheduler(optimizer)`` creates the scheduler of a stage, which steps after every update.
            options: for the factory.
        """
        for states in self.runtime.executor.states.values():
            states.make_optimizer(factory, scheduler, **options)
        self._optimizer = CyclicOptimizer(self.runtime.executor.states)
        return self._optimizer

    @observed
    def train_step(self, batch: Any, optimizer: CyclicOptimizer, max_grad_norm: float | None = None) -> Tensor:
        """Begin a training step: run the passes of this process up to the first that needs the next batch.

        After the last step call ``flush`` or ``full_state_dict``, as other processes still wait for messages.

        Args:
            batch: the same global batch on every rank. It must not be changed in place while it is used.
            optimizer: returned by ``optimizer``.
            max_grad_norm: refused.

        Returns:
            The mean loss of the micro-batches that this process finished during the call, each with the parameters that
            it used: the micro-batch of the worker under ``data``, those that the process worked on under ``stages``.

        Raises:
            InputError: the batch cannot be shared evenly, or the optimizer is not this model's.
            LaunchError: another process is gone, or silent for too long.
            NonFiniteLossError: the loss is NaN or infinite. Updates may have used it, so go back to a checkpoint.
        """
        _refuse_clipping(max_grad_norm)
        if optimizer is not self._optimizer:
            remedy = "Give what optimizer(factory, ...) of this model returned: each stage has one of its own."
            raise InputError("optimizer", type(optimizer).__name__, remedy)
        executor = self.runtime.executor
        executor.feed(self.step, self._microbatches(batch))
        executor.run(executor.programme.passes(self.runtime.process, self.step))
        self.step += 1
        return self._take_loss()

    def drain(self) -> Tensor | None:
        """Finish the passes of the steps begun, and keep the delay. All ranks call it.

        Each process then has the newest parameters of its stages, and also the previous version if its next passes use
        it. Training continues as if ``drain`` had not been called.

        Returns:
            The mean loss of the micro-batches that this process finished; None: there were none.
        """
        self.runtime.executor.drain(self.step)
        return self._take_loss() if self.runtime.executor.desk.losses else None

    def flush(self) -> Tensor | None:
        """Finish the passes of the steps begun, and end the delay, so that all processes have the same parameters.

        Running statistics become the mean over the processes. All ranks call it.

        Returns:
            See ``drain``.
        """
        loss = self.drain()
        self.runtime.executor.flush(self.step)
        average_buffers(self.runtime)
        return loss

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the full model's ``state_dict()`` on the CPU of every rank, after ``flush``. All ranks call it."""
        self.flush()
        return gather_named(local_shards(self.runtime), self.runtime.entries)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a full ``state_dict()``, after ``flush``. All ranks call it with the full state.

        Raises:
            InputError: an entry is missing, or has another shape.
        """
        self.flush()
        put(local_shards(self.runtime), self.runtime.entries, state)

    def save(self, folder: Path | str) -> Tensor | None:
        """Write a checkpoint from which the same run continues, after ``drain``. All ranks call it.

        The folder must be visible to all processes. It is complete or absent; a folder of that name is replaced.

        Args:
            folder: of this checkpoint alone, beside others: ``checkpoints/step-100``.

        Returns:
            See ``drain``.

        Raises:
            InputError: it cannot be written (the disk is full). Earlier checkpoints are unchanged.
            LaunchError: another process is gone.
        """
        loss = self.drain()
        self._checkpointer.write(Path(folder), self.step)
        return loss

    def load(self, folder: Path | str) -> None:
        """Continue from a checkpoint of any setting with the same rule and number of workers. All ranks call it.

        Create the optimizer before. In the setting that wrote the checkpoint, the run continues bit for bit. In another
        setting, running statistics are the mean over the processes, and random generators do not change.

        Raises:
            InputError: it is damaged, or of another model, rule, number of workers or optimizer.
            LaunchError: another process is gone.
        """
        self.drain()
        self.step = self._checkpointer.read(Path(folder))

    def load_latest(self, folder: Path | str) -> Path | None:
        """Continue from the newest intact checkpoint of a folder of checkpoints. All ranks call it.

        Returns:
            The folder of the checkpoint; None: there is none.

        Raises:
            InputError: see ``load``.
            LaunchError: another process is gone.
        """
        newest = at_first(self._checkpointer.peers, lambda: latest(folder), FIELD)
        if newest is not None:
            self.load(newest)
        return newest

    def _microbatches(self, batch: Any) -> list[Any]:
        samples, count = batch_size(batch), len(self.plan.stages)
        check_samples(samples, self.plan, count)
        rows = samples // count
        check_even(share_scales(self._loss_weight, self._loss_reduction, batch, count), "cyclic data parallelism")
        return [slice_batch(batch, start, start + rows) for start in range(0, samples, rows)]

    def _take_loss(self) -> Tensor:
        """The mean of the losses since the last call."""
        losses = self.runtime.executor.desk.losses
        mean = torch.stack([loss.to(self.device, torch.float64) for loss in losses.values()]).mean()
        numbers = ", ".join(str(number) for number in losses)
        losses.clear()
        if not bool(mean.isfinite()):
            raise NonFiniteLossError(
                f"The loss of micro-batch {numbers} is not finite ({float(mean)}). Go back to the last checkpoint; "
                "look at the batch, or lower the learning rate."
            )
        return mean


def _refuse_clipping(max_grad_norm: float | None) -> None:
    if max_grad_norm is not None:
        raise InputError("max_grad_norm", max_grad_norm, CLIPPING)
