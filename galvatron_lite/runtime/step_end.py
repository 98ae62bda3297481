"""Around backward: the loss of a batch whose backward is done already, sums over all ranks, clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError, NonFiniteLossError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.parallelism.pipeline.runner import PipelineRunner
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass
from galvatron_lite.parallelism.sharded.tensor import locals_only
from galvatron_lite.parallelism.zero.apply import set_all_reduce
from galvatron_lite.plans.io import pipeline_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.monitor.notes import StepPhase
from galvatron_lite.runtime.parameters.guard import guard_gradients
from galvatron_lite.runtime.parameters.managed import local_tensor, squared_norm_share
from galvatron_lite.runtime.peers import everyone
from galvatron_lite.runtime.stages import StageRuntime

if TYPE_CHECKING:
    from galvatron_lite.runtime.engine import ParallelModel

_NAMED = 3
_TINY = 1e-6


def clip_factor(norm: Tensor, largest: float) -> Tensor:
    """The factor that makes a gradient's norm ``largest`` at most (as ``torch.nn.utils.clip_grad_norm_``)."""
    return torch.clamp(largest / (norm + _TINY), max=1.0)


def reduced(parallel: ParallelModel, values: list[Tensor], with_norm: bool = True) -> Tensor:
    """Sums over the world of values, and of the gradient's squared norm, in one message."""
    if with_norm:
        shares = [
            squared_norm_share(runtime.owned, runtime.counted_elsewhere, parallel.device)
            for runtime in parallel.runtimes
        ]
        values = [*values, torch.stack(shares).sum()]
    stacked = torch.stack([value.float() for value in values])
    if parallel.runtime.meshes.world > 1:
        dist.all_reduce(stacked, group=parallel.watch.group)
    return stacked


def finish_step(parallel: ParallelModel, loss: Tensor, largest: float | None) -> tuple[Tensor, bool]:
    """The global loss, and whether the step may be taken, after checking gradients, scaling them back, clipping.

    Raises:
        NonFiniteLossError: the loss or the gradient is not; on all ranks. Not where fp16 overflows.
    """
    parallel.watch.at(StepPhase.CHECK)
    lifted = None if parallel.scaler is None else parallel.scaler.get_scale()
    sums = reduced(parallel, [loss])
    is_finite = bool(sums.isfinite().all())
    if not is_finite and (lifted is None or not bool(sums[0].isfinite())):  # else scaled gradients overflow
        _refuse(parallel, loss, sums[0])
    if is_finite and (lifted is not None or largest is not None):
        back = torch.full_like(sums[-1], 1.0 / (lifted or 1.0))
        parallel._multiply(back if largest is None else back * clip_factor(sums[-1].sqrt() * back, largest))
    if parallel.scaler is not None:
        parallel.scaler.settle(is_finite)
    return sums[0], is_finite


def _refuse(parallel: ParallelModel, local_loss: Tensor, loss: Tensor) -> None:
    """Raise NonFiniteLossError, which says what is not finite, and on which ranks it began, as far as it is known."""
    owned = [one for runtime in parallel.runtimes for one in runtime.owned]
    bad = [one for one in owned if one.gradient is not None and not _is_finite(one.gradient)]
    computed = any(one.is_final and not one.is_zero for one in bad)
    computed = computed or not all(runtime.reducer.gave_finite for runtime in parallel.runtimes)
    # whether this rank's part of the loss is, and the gradients that it computed; parameters of which the sums are
    every = everyone((not _is_finite(local_loss), computed, [one.names[0] for one in bad]), parallel.watch.group)
    losses, sources, holders = (tuple(rank for rank, one in enumerate(every) if one[part]) for part in range(3))
    if losses:
        ranks, what = losses, f"The loss is not finite (loss {float(loss)}): that of {_ranks(losses)}."
    else:
        names = list(dict.fromkeys(name for _, _, named in every for name in named))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        where = f" ({', '.join(names[:_NAMED])}{more})" if names else ""
        ranks = sources or holders
        found = f"found on {_ranks(holders)} once" if holders else "finite on every rank until"
        source = f"{_ranks(sources)} made it so" if sources else f"{found} ranks had summed it"
        what = f"The gradient norm is not finite (loss {float(loss)}){where}: {source}."
    samples = "the samples of that rank" if 0 < len(ranks) < len(every) else "the batch"
    raise NonFiniteLossError(
        f"{what} The step was not taken, parameters are unchanged, and training can go on. Look at {samples}, lower "
        "the learning rate, or clip the gradient (max_grad_norm).",
        ranks,
    )


def _is_finite(tensor: Tensor) -> bool:
    return bool(local_tensor(tensor).isfinite().all())


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


class GradientsAside:
    """A batch whose gradients are made when the model is called, for loops that call ``loss.backward()`` themselves.

    Under a pipeline, or with several micro-batches, forward and backward passes take turns: there is no moment between
    them for the loop. So the model does both when it is called. The gradients are kept apart until ``loss.backward()``,
    so that the loop may zero gradients between the two, as it may in one process; then they are multiplied by what the
    loop made of the loss (1 where it is left as it is).

    Args:
        parallel: the model.
        last: of the batch before, where ``backward`` of its loss may still come.

    Raises:
        InputError: there are gradients in host memory.
    """

    def __init__(self, parallel: ParallelModel, last: GradientsAside | None) -> None:
        if last is not None:
            last._copy()
        for runtime in parallel.runtimes:
            runtime.reducer.follow()
        self._parallel = parallel
        owned = [one for runtime in parallel.runtimes for one in runtime.owned]
        held = [one for one in owned if one.gradient is not None]
        if any(one.host is not None for one in held):
            remedy = (
                "Those of the last batch are still there. Under this plan the model works a batch through in "
                "micro-batches by itself: call optimizer.zero_grad() before the next batch; with offload plan a larger "
                "--batch to accumulate more."
            )
            raise InputError("gradients", "of two batches", remedy)
        guard_gradients(held, guarded=False)
        self._aside: dict[nn.Parameter, Tensor | None] = {one.reduced: None for one in owned if one.host is None}
        self._swap()
        self._copy()

    def loss_of(self, batch: Any) -> Tensor:
        """The batch's loss, whose gradients are made; ``backward`` hands them to the loop.

        ``backward`` raises InputError where gradients in host memory, which are not kept apart, were zeroed.
        """
        try:
            value = reduced(self._parallel, [self._parallel.backward_step(batch)], with_norm=False)[0]
        finally:
            self._swap()
        anchor = torch.zeros((), device=value.device, requires_grad=True)
        loss: Tensor = _Stepped.apply(anchor, value, self._settle)  # type: ignore[no-untyped-call]
        return loss

    def _settle(self, factor: Tensor) -> None:
        self._swap()
        offloads = any(runtime.updates.hosts for runtime in self._parallel.runtimes)
        if offloads and not self._parallel.has_gradients():
            remedy = "With offload they are made when the model is called: call optimizer.zero_grad() before that."
            raise InputError("gradients", "none", remedy)
        self._parallel._multiply(factor)
        self._add()

    def _swap(self) -> None:
        """Exchange the gradients that are kept apart and those that the loop sees."""
        for parameter, gradient in self._aside.items():
            self._aside[parameter], parameter.grad = parameter.grad, gradient

    def _add(self) -> None:
        """Add those that are kept apart to those that the loop sees, and let go of them."""
        for parameter, gradient in self._aside.items():
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._aside.clear()
        for runtime in self._parallel.runtimes:
            guard_gradients(runtime.owned, hidden=runtime.updates.guarded)

    def _copy(self) -> None:
        """Gradients are views of buffers that the next backward pass fills again."""
        for parameter, gradient in self._aside.items():
            self._aside[parameter] = None if gradient is None else gradient.clone()


class _Stepped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, multiply: Callable[[Tensor], None]) -> Tensor:  # noqa: ARG004
        ctx.multiply, ctx.is_done = multiply, False
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.is_done:
            raise InputError("loss.backward", "a second time", "Gradients were made when the model was called, once.")
        ctx.is_done = True
        ctx.multiply(gradient)
        return torch.zeros_like(gradient), None, None


_PLAIN = (bool, int, float, str, NoneType)


def accumulated_step(parallel: ParallelModel, parts: Sequence[Sequence[Any]], lifted: float) -> Tensor:
    """``pipelined_step`` without a pipeline."""
    (stage,), glue, devices = parts, parallel.runtime.traffic.glue, parallel.runtime.meshes.stage_devices
    total = torch.zeros((), device=parallel.device)
    for number, part in enumerate(stage):
        parallel.watch.at(StepPhase.FORWARD, number)
        loss = parallel.local_loss(part)
        loss = (loss.float() if parallel.scaler is not None else loss) * (lifted / (glue.batch * len(stage)))
        parallel.watch.at(StepPhase.BACKWARD, number)
        last = number == len(stage) - 1
        for runtime in parallel.runtimes:
            set_all_reduce(runtime.sharded.replicated, last)
        _begin(parallel.runtimes, synchronise=last)
        with locals_only():  # what recomputation checks against what was kept: shards as they are held
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total / (devices // glue.batch)


def pipelined_step(parallel: ParallelModel, parts: Sequence[Sequence[Any]], lifted: float) -> Tensor:
    """All passes of a step on the parts of a batch, by stage of this rank and micro-batch.

    Returns:
        This rank's part of the lifted loss: the sum over the ranks of the world is the batch's mean loss.
    """
    runtimes, watch, runner = parallel.runtimes, parallel.watch, _runner_of(parallel)
    traffic = runtimes[-1].traffic
    scale = lifted / (traffic.glue.batch * len(parts[0]))

    def call(chunk: int, part: Any) -> Tensor:
        loss = parallel.calls.loss(runtimes[chunk], part)
        return (loss.float() if loss.dtype is torch.float16 else loss) * scale

    weights = iter(range(len(parts) * len(parts[0])))

    def before(action: Action, last: bool) -> None:
        watch.at(StepPhase(action.what.value), action.microbatch)
        if action.what is not Pass.WEIGHT:
            watch.waits()
        if action.what is Pass.BACKWARD:
            runtime = runtimes[action.chunk]
            set_all_reduce(runtime.sharded.replicated, last)
            _begin([runtime], synchronise=last and not runner.pipeline.splits_backward)
        elif action.what is Pass.WEIGHT:
            # stages of a rank may share parameters, and their gradients of weights come in any order
            _begin(runtimes, synchronise=next(weights) == len(parts) * len(parts[0]) - 1)

    # a gradient of a parameter that stages share may come from another stage than the one whose reducer has it
    _begin(runtimes, synchronise=False)
    total = runner.step(parts, call, before, watch.goes_on)
    return total / (runtimes[-1].meshes.stage_devices // traffic.glue.batch)


def _begin(runtimes: Sequence[StageRuntime], *, synchronise: bool) -> None:
    for runtime in runtimes:
        runtime.reducer.synchronise = synchronise
        runtime.reducer.begin()


def pipelined_loss(parallel: ParallelModel, parts: Sequence[Sequence[Any]]) -> Tensor:
    """This rank's part of the loss of a batch, forward passes alone; parts and result as of ``pipelined_step``."""
    calls, runtimes, last = parallel.calls, parallel.runtimes, parallel.runtimes[-1]
    ranks = last.meshes.stage_devices // last.traffic.glue.batch  # that have the same samples
    losses = _runner_of(parallel).outputs(parts, lambda chunk, part: calls.loss(runtimes[chunk], part))
    total = torch.zeros((), device=calls.device) if not losses else torch.stack([loss.float() for loss in losses]).sum()
    return total / (last.traffic.glue.batch * len(parts[0]) * ranks)


def pipelined_outputs(parallel: ParallelModel, parts: Sequence[Sequence[Any]]) -> Any:
    """The model's outputs for a batch, whole on every rank; parts as for ``pipelined_step``.

    What is neither a tensor in a nest of mappings, tuples and lists nor a plain value (a cache) is None.
    """
    sampled: list[tuple[bool, ...]] = []

    def call(chunk: int, part: Any) -> Any:
        output, weight = parallel.calls.outputs(parallel.runtimes[chunk], part)
        sampled.append(weight)
        return output

    outputs = _runner_of(parallel).outputs(parts, call)
    value = _joined(outputs, sampled[-1]) if outputs else None
    group, last = parallel.runtime.meshes.pipeline, len(parallel.plan.stages) - 1
    assert group is not None
    source = dist.get_global_rank(group, pipeline_of(parallel.plan).group_of(last))
    return _broadcast(value, source, group, parallel.device)


def output_count(samples: int, plan: Plan) -> int:
    """Micro-batches in which the outputs for so many samples are made."""
    unit = plan.microbatches * math.lcm(*(run.strategy.batch_degree for stage in plan.stages for run in stage.runs))
    return 1 if samples % unit else plan.microbatches


def _runner_of(parallel: ParallelModel) -> PipelineRunner:
    runner = parallel.runtime.pipeline
    assert runner is not None
    return runner


def _joined(outputs: Sequence[Any], sampled: Sequence[bool]) -> Any:
    """The outputs of micro-batches as that of one batch: samples behind one another, means of all else."""
    rest = [tensors_of(value) for value in outputs[1:]]
    flags = iter(sampled)

    def join(first: Tensor) -> Tensor:
        every, holds = [first, *(next(tensors) for tensors in rest)], next(flags)
        if holds:
            return torch.cat(every)
        return torch.stack(every).mean(0) if first.is_floating_point() else first

    return map_tensors(outputs[0], join)


def _broadcast(value: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    box = [map_tensors(_plain(value), lambda tensor: torch.empty_like(tensor, device="meta"))]
    dist.broadcast_object_list(box, src=source, group=group, device=device)
    tensors = tensors_of(value)

    def receive(like: Tensor) -> Tensor:
        mine = dist.get_rank() == source
        tensor = next(tensors).detach().contiguous() if mine else torch.empty_like(like, device=device)
        dist.broadcast(tensor, src=source, group=group)
        return tensor

    return map_tensors(box[0], receive)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = {key: _plain(item) for key, item in value.items()}
        return type(value)(**items) if hasattr(type(value), "__dataclass_fields__") else items
    if isinstance(value, (tuple, list)):
        kept = [_plain(item) for item in value]
        return type(value)(*kept) if hasattr(value, "_fields") else type(value)(kept)
    return value if isinstance(value, (Tensor, *_PLAIN)) else None
