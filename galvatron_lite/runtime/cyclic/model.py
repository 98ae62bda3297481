"""A model that trains by cyclic data parallelism, on the launched world."""

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
from galvatron_lite.runtime.cyclic.setup import CyclicOptions, even_out, full_state, local_shards, set_up
from galvatron_lite.runtime.loss.weights import LossWeight, check_even, check_reduction, share_scales
from galvatron_lite.runtime.mesh import join_world
from galvatron_lite.runtime.monitor.observer import Observable, observed
from galvatron_lite.runtime.parameters.full_state import put
from galvatron_lite.runtime.parameters.use import check_hooks
from galvatron_lite.runtime.peers import Peers, at_first, broadcast_values, from_rank_zero
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
"""What other models that train in parallel have, and what to do here."""
KEPT = "save(folder) of the model keeps the optimizers' states, and load(folder) sets them."
STEPPED = (
    "train_step(batch, optimizer) of the model steps each stage's optimizer when its gradient is complete. A scheduler "
    "that steps with it is given when it is made: optimizer(factory, scheduler=make_scheduler), where "
    "make_scheduler(optimizer) returns the scheduler of a stage."
)


def _refused(name: str, remedy: str) -> Any:
    """A method of the optimizer that is refused where it is looked up, which is all that a scheduler does."""

    def look_up(_optimizer: CyclicOptimizer) -> NoReturn:
        raise InputError(f"{name} of the optimizer", "cyclic data parallelism", remedy)

    return property(look_up)


class CyclicOptimizer(torch.optim.Optimizer):
    """The optimizers of the stages that a process holds; each steps when its stage's gradient is complete.

    It is an optimizer in name, so that whoever takes it for one (torch's schedulers do) is told what to do instead.

    Attributes:
        stages: optimizers, by the stage's number.
    """

    def __init__(self, states: Mapping[int, StageStates]) -> None:
        self.stages = {stage: state.optimizer for stage, state in states.items() if state.optimizer is not None}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all stages, in order: options may be read and set between training steps."""
        return [group for _, one in sorted(self.stages.items()) for group in one.param_groups]

    step = _refused("step", STEPPED)
    zero_grad = _refused("zero_grad", "train_step(batch, optimizer) of the model begins each stage's gradient anew.")
    state_dict = _refused("state_dict", KEPT)
    load_state_dict = _refused("load_state_dict", KEPT)


class CyclicModel(Observable, nn.Module):
    """A model whose micro-batches follow one another through its stages, two time steps apart.

    It changes the training rule: gradients are partly those of parameters one step old (``rules``). Every rank makes
    one, alike, and gives it the same global batches. Passes of a training step go on in the next call of
    ``train_step``; ``drain`` and ``flush`` end them. What a pass draws (dropout) depends on rank 0's
    ``torch.initial_seed()``, the stage and the micro-batch alone: it is the same in every setting.

    Args:
        plan: of cyclic data parallelism.
        batch: an example batch; needed where layers of different stages read more than what the layer before them made.
        loss_weight, loss_reduction: batches whose micro-batches weigh unlike are refused.
        precision: ``fp32`` or ``bf16`` compute; the plan's if not given.
        max_grad_norm: refused: no process ever has the whole gradient.
        timeout: seconds after which a message that does not come is an error.
        early_release: backward passes of a time step come before its forward passes (``single``): at most N*N/2 + 1
            stages' activations are kept instead of N(N+1)/2.

    All other arguments are those of ``ParallelModel``.

    Attributes:
        step: training steps begun.
        runtime: what this process is made of.

    Raises:
        LaunchError: the world's size is not the plan's.
        InputError: the plan does not fit the model, stages share parameters, or clipping is asked for.
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
        alone, staged = (plan.cyclic.setting is one for one in (CyclicSetting.SINGLE, CyclicSetting.STAGES))
        kinds = () if alone else tuple(MessageContent) if staged else (MessageContent.PARTIAL, MessageContent.UPDATE)
        mailbox = ProcessMailbox(kinds, self.device, timeout)
        self.runtime = set_up(model, plan, layers, batch, dist.get_rank(), mailbox, options)
        self._keeper = CyclicCheckpointer(self.runtime, Peers(timeout))
        self._optimizer: CyclicOptimizer | None = None

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        """There is no pass through the whole model at one version of its parameters.

        Raises:
            InputError: always.
        """
        remedy = (
            "Train it with train_step(batch, optimizer). To use the model, load full_state_dict() into one that is not "
            "split."
        )
        raise InputError("call of the model", "cyclic data parallelism", remedy)

    def __getattr__(self, name: str) -> Any:
        """As of any module.

        Raises:
            InputError: only models that train in another way have it; says what to do here.
        """
        if name in ELSEWHERE:
            raise InputError(f"{name} of the model", "cyclic data parallelism", ELSEWHERE[name])
        return super().__getattr__(name)

    def train(self, mode: bool = True) -> CyclicModel:
        """As of any module; the stages follow."""
        super().train(mode)
        for part in self.runtime.parts.values():
            part.model.train(mode)
        return self

    def optimizer(
        self, factory: OptimizerFactory, scheduler: SchedulerFactory | None = None, **options: Any
    ) -> CyclicOptimizer:
        """Optimizers of the stages: ``cyclic.optimizer(torch.optim.AdamW, lr=1e-3)``.

        Args:
            factory: ``factory(parameters, **options)`` of a stage's parameters.
            scheduler: ``scheduler(optimizer)`` of a stage's learning rate; it steps after every update.
            options: for the factory.
        """
        for states in self.runtime.executor.states.values():
            states.make_optimizer(factory, scheduler, **options)
        self._optimizer = CyclicOptimizer(self.runtime.executor.states)
        return self._optimizer

    @observed
    def train_step(self, batch: Any, optimizer: CyclicOptimizer, max_grad_norm: float | None = None) -> Tensor:
        """Begin a training step: run this process's passes up to the first that needs the next batch.

        Behind the last one call ``flush`` (``full_state_dict`` does): others still wait for messages of this process.

        Args:
            batch: the same global batch on every rank; it may not be changed in place while it is used.
            optimizer: what ``optimizer`` returned.
            max_grad_norm: refused.

        Returns:
            The mean loss of the micro-batches whose loss this process learned meanwhile, each with the parameters that
            it used: its own one under ``data``, those that it worked on under ``stages``.

        Raises:
            InputError: the batch cannot be shared evenly, or the optimizer is not this model's.
            LaunchError: another process is gone, or silent for too long.
            NonFiniteLossError: the loss is NaN or infinite; updates may have used it, so go back to a checkpoint.
        """
        _refuse_clipping(max_grad_norm)
        if optimizer is not self._optimizer:
            remedy = "Give what optimizer(factory, ...) of this model returned: each stage has one of its own."
            raise InputError("optimizer", type(optimizer).__name__, remedy)
        executor = self.runtime.executor
        executor.feed(self.step, self._parts(batch))
        executor.run(executor.programme.passes(self.runtime.process, self.step))
        self.step += 1
        return self._learned()

    def drain(self) -> Tensor | None:
        """End the passes that are under way; the delay is kept.

        Every process then has, of each of its stages, the newest parameters, and beside them those of the version
        before, where its next passes use them. Training goes on as if there had been no break. All ranks call it.

        Returns:
            The mean loss of the micro-batches whose loss this process learned meanwhile; None: there was none.
        """
        self.runtime.executor.drain(self.step)
        return self._learned() if self.runtime.executor.desk.losses else None

    def flush(self) -> Tensor | None:
        """End the passes that are under way, and the delay: the same newest parameters everywhere, and nothing else.

        Running statistics become the mean of the processes'. All ranks call it.

        Returns:
            See ``drain``.
        """
        loss = self.drain()
        self.runtime.executor.flush(self.step)
        even_out(self.runtime)
        return loss

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's ``state_dict()`` on the CPU of every rank, after ``flush``; all ranks call it."""
        self.flush()
        return full_state(self.runtime)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers from a whole ``state_dict``, after ``flush``; every rank gives all of it.

        Raises:
            InputError: an entry is missing, or has another shape.
        """
        self.flush()
        put(local_shards(self.runtime), self.runtime.entries, state)

    def save(self, folder: Path | str) -> Tensor | None:
        """Write a checkpoint, after ``drain``: resuming from it gives the same run. All ranks call it.

        The folder is there whole or not at all; one of that name is replaced. All processes must see it.

        Args:
            folder: of this checkpoint alone, beside others: ``checkpoints/step-100``.

        Returns:
            See ``drain``.

        Raises:
            InputError: it cannot be written (the disk is full); earlier ones are as they were, and training can go on.
            LaunchError: another process is gone.
        """
        loss = self.drain()
        self._keeper.write(Path(folder), self.step)
        return loss

    def load(self, folder: Path | str) -> None:
        """Go on from a checkpoint, of any setting with as many workers and the same rule. All ranks call it.

        Make the optimizer before. In the setting that wrote it every bit is that of the run that was not stopped; in
        another one running statistics are the mean of those processes', and random generators stay as they are.

        Raises:
            InputError: it is damaged, or of another model, rule, number of workers or optimizer.
            LaunchError: another process is gone.
        """
        self.drain()
        self.step = self._keeper.read(Path(folder))

    def load_latest(self, folder: Path | str) -> Path | None:
        """Go on from the newest whole checkpoint of a folder of checkpoints; None: there is none. All ranks call it.

        Raises:
            InputError: see ``load``.
            LaunchError: another process is gone.
        """
        folder_found = at_first(self._keeper.peers, lambda: latest(folder), FIELD)
        if folder_found is not None:
            self.load(folder_found)
        return folder_found

    def _parts(self, batch: Any) -> list[Any]:
        samples, count = batch_size(batch), len(self.plan.stages)
        check_samples(samples, self.plan, count)
        rows = samples // count
        check_even(share_scales(self._loss_weight, self._loss_reduction, batch, count), "cyclic data parallelism")
        return [slice_batch(batch, start, start + rows) for start in range(0, samples, rows)]

    def _learned(self) -> Tensor:
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
