"""Passes of a batch in micro-batches, with and without a pipeline, and what follows them.

After backward, the loss and the gradient's norm are summed over all ranks, gradients are checked and clipped. If the
passes have run inside the call of the model, gradients wait for ``loss.backward()``.
"""

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
    from galvatron_lite.runtime.sharded_model import ShardedModel

_PLAIN = (bool, int, float, str, NoneType)
_LISTED = 3
"""Parameters that an error lists at most."""
_EPSILON = 1e-6


def accumulated_step(parallel: ParallelModel, parts: Sequence[Sequence[Any]], loss_scale: float) -> Tensor:
    """Run forward and backward of all micro-batches without a pipeline; arguments and result as of
    ``pipelined_step``."""
    (microbatches,), glue = parts, parallel.runtime.traffic.glue
    total = torch.zeros((), dtype=parallel.sum_dtype, device=parallel.device)
    for number, part in enumerate(microbatches):
        parallel.watch.at(StepPhase.FORWARD, number)
        loss = parallel.local_loss(part)
        loss = (loss.float() if parallel.scaler is not None else loss) * (loss_scale / (glue.batch * len(microbatches)))
        parallel.watch.at(StepPhase.BACKWARD, number)
        is_last = number == len(microbatches) - 1
        for runtime in parallel.runtimes:
            set_all_reduce(runtime.sharded.replicated, is_last)
        _begin_backward(parallel.runtimes, synchronise=is_last)
        with locals_only():  # recomputation compares what is computed again with the shards that were saved
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total / (parallel.runtime.meshes.stage_devices // glue.batch)


def pipelined_step(parallel: ParallelModel, parts: Sequence[Sequence[Any]], loss_scale: float) -> Tensor:
    """Run all passes of a step.

    Args:
        parallel: the model.
        parts: this rank's samples, by stage of this rank and micro-batch.
        loss_scale: multiplies the loss.

    Returns:
        This rank's part of the scaled loss: the sum over all ranks is the batch's mean loss.
    """
    runtimes, watch, runner = parallel.runtimes, parallel.watch, _runner_of(parallel)
    glue, last_weight_pass = runtimes[-1].traffic.glue, len(parts) * len(parts[0]) - 1
    scale = loss_scale / (glue.batch * len(parts[0]))
    weight_passes = iter(range(last_weight_pass + 1))

    def call(chunk: int, part: Any) -> Tensor:
        loss = parallel.calls.loss(runtimes[chunk], part)
        return (loss.float() if loss.dtype is torch.float16 else loss) * scale

    def before(action: Action, last: bool) -> None:
        watch.at(StepPhase(action.what.value), action.microbatch)
        if action.what is not Pass.WEIGHT:
            watch.waits()
        if action.what is Pass.BACKWARD:
            runtime = runtimes[action.chunk]
            set_all_reduce(runtime.sharded.replicated, last)
            _begin_backward([runtime], synchronise=last and not runner.pipeline.splits_backward)
        elif action.what is Pass.WEIGHT:
            # stages of a rank may share parameters, and their gradients of weights come in any order
            _begin_backward(runtimes, synchronise=next(weight_passes) == last_weight_pass)

    # the gradient of a parameter that stages share may come from another stage than the one whose reducer has it
    _begin_backward(runtimes, synchronise=False)
    total = runner.step(parts, call, before, watch.goes_on, parallel.global_batches.trained_by_rank)
    # other ranks have zero, of this dtype too
    return total.to(parallel.sum_dtype) / (runtimes[-1].meshes.stage_devices // glue.batch)


def _begin_backward(runtimes: Sequence[StageRuntime], *, synchronise: bool) -> None:
    for runtime in runtimes:
        runtime.reducer.synchronise = synchronise
        runtime.reducer.begin()


def pipelined_loss(parallel: ParallelModel, parts: Sequence[Sequence[Any]]) -> Tensor:
    """Run forward passes only; arguments and result as of ``pipelined_step``."""
    calls, runtimes, last = parallel.calls, parallel.runtimes, parallel.runtimes[-1]
    ranks = last.meshes.stage_devices // last.traffic.glue.batch  # that have the same samples
    losses = _runner_of(parallel).outputs(parts, lambda chunk, part: calls.loss(runtimes[chunk], part))
    total = sum(losses, torch.zeros((), dtype=parallel.sum_dtype, device=calls.device)).to(parallel.sum_dtype)
    return total / (last.traffic.glue.batch * len(parts[0]) * ranks)


def pipelined_outputs(parallel: ParallelModel, parts: Sequence[Sequence[Any]]) -> Any:
    """The model's outputs for a batch, complete on every rank; arguments as of ``pipelined_step``.

    What is neither a tensor in a nest of mappings, tuples and lists nor a plain value (a cache) is None.
    """
    holds_samples: list[tuple[bool, ...]] = []

    def call(chunk: int, part: Any) -> Any:
        output, flags = parallel.calls.outputs(parallel.runtimes[chunk], part)
        holds_samples.append(flags)
        return output

    outputs = _runner_of(parallel).outputs(parts, call)
    value = _joined(outputs, holds_samples[-1]) if outputs else None
    group, last = parallel.runtime.meshes.pipeline, len(parallel.plan.stages) - 1
    assert group is not None
    source = dist.get_global_rank(group, pipeline_of(parallel.plan).group_of(last))
    return _broadcast(value, source, group, parallel.device)


def output_count(samples: int, plan: Plan) -> int:
    """The number of micro-batches in which the outputs of ``samples`` samples are computed."""
    unit = plan.microbatches * math.lcm(*(run.strategy.batch_degree for stage in plan.stages for run in stage.runs))
    return 1 if samples % unit else plan.microbatches


def _runner_of(parallel: ParallelModel) -> PipelineRunner:
    runner = parallel.runtime.pipeline
    assert runner is not None
    return runner


def _joined(outputs: Sequence[Any], holds_samples: Sequence[bool]) -> Any:
    """Join the outputs of micro-batches to that of the batch: concatenate tensors with samples, average others."""
    others = [tensors_of(output) for output in outputs[1:]]
    flags = iter(holds_samples)

    def join(first: Tensor) -> Tensor:
        tensors = [first, *(next(other) for other in others)]
        if next(flags):
            return torch.cat(tensors)
        return torch.stack(tensors).mean(0) if first.is_floating_point() else first

    return map_tensors(outputs[0], join)


def _broadcast(value: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    shapes = [map_tensors(_plain(value), lambda tensor: torch.empty_like(tensor, device="meta"))]
    dist.broadcast_object_list(shapes, src=source, group=group, device=device)
    tensors = tensors_of(value)

    def receive(like: Tensor) -> Tensor:
        is_source = dist.get_rank() == source
        tensor = next(tensors).detach().contiguous() if is_source else torch.empty_like(like, device=device)
        dist.broadcast(tensor, src=source, group=group)
        return tensor

    return map_tensors(shapes[0], receive)


def _plain(value: Any) -> Any:
    """The value with None in place of all that is neither a tensor nor a plain value."""
    if isinstance(value, Mapping):
        items = {key: _plain(item) for key, item in value.items()}
        return type(value)(**items) if hasattr(type(value), "__dataclass_fields__") else items
    if isinstance(value, (tuple, list)):
        elements = [_plain(item) for item in value]
        return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)
    return value if isinstance(value, (Tensor, *_PLAIN)) else None


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that makes a gradient's norm ``max_norm`` at most (as ``torch.nn.utils.clip_grad_norm_``)."""
    return torch.clamp(max_norm / (norm + _EPSILON), max=1.0)


def sum_over_world(parallel: ShardedModel, values: list[Tensor], with_norm: bool = True) -> Tensor:
    """Sum values over all ranks in one message, followed by the gradient's squared norm; all ranks call it."""
    if with_norm:
        shares = [
            squared_norm_share(runtime.owned, runtime.counted_elsewhere, parallel.device)
            for runtime in parallel.runtimes
        ]
        values = [*values, torch.stack(shares).sum()]
    sums = torch.stack([value.to(parallel.sum_dtype) for value in values])
    if parallel.runtime.meshes.world > 1:
        dist.all_reduce(sums, group=parallel.watch.group)
    return sums


def finish_step(parallel: ParallelModel, loss: Tensor, max_norm: float | None) -> tuple[Tensor, bool]:
    """Check gradients, unscale and clip them; return the global loss, and whether the optimizer may step.

    Raises:
        NonFiniteLossError: the loss or the gradient is not finite; on all ranks. Not where fp16 overflows.
    """
    parallel.watch.at(StepPhase.CHECK)
    loss_scale = None if parallel.scaler is None else parallel.scaler.get_scale()
    sums = sum_over_world(parallel, [loss])
    is_finite = bool(sums.isfinite().all())
    if not is_finite and (loss_scale is None or not bool(sums[0].isfinite())):  # else scaled gradients overflow
        raise _non_finite_error(parallel, loss, sums[0])
    if is_finite and (loss_scale is not None or max_norm is not None):
        factor = torch.full_like(sums[-1], 1.0 / (loss_scale or 1.0))
        if max_norm is not None:
            factor = factor * clip_factor(sums[-1].sqrt() * factor, max_norm)
        parallel.scale_gradients(factor)
    if parallel.scaler is not None:
        parallel.scaler.settle(is_finite)
    return sums[0], is_finite


def _non_finite_error(parallel: ParallelModel, local_loss: Tensor, loss: Tensor) -> NonFiniteLossError:
    """An error that says what is not finite, and on which ranks it began, as far as can be told; all ranks call it."""
    infinite = [one for one in parallel.managed if one.gradient is not None and not _is_finite(one.gradient)]
    computed_here = any(managed.is_final and not managed.is_zero for managed in infinite)
    computed_here = computed_here or not all(runtime.reducer.gave_finite for runtime in parallel.runtimes)
    names = [managed.names[0] for managed in infinite]
    # by rank: whether its loss is not finite, whether gradients that it computed are not, parameters whose sums are not
    reports = everyone((not _is_finite(local_loss), computed_here, names), parallel.watch.group)
    with_loss, sources, holders = (
        tuple(rank for rank, report in enumerate(reports) if report[part]) for part in range(3)
    )
    if with_loss:
        ranks, what = with_loss, f"The loss is not finite (loss {float(loss)}): that of {_ranks(with_loss)}."
    else:
        names = list(dict.fromkeys(name for _, _, listed in reports for name in listed))
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        where = f" ({', '.join(names[:_LISTED])}{more})" if names else ""
        ranks = sources or holders
        summed = f"found on {_ranks(holders)} once" if holders else "finite on every rank until"
        source = f"{_ranks(sources)} made it so" if sources else f"{summed} ranks had summed it"
        what = f"The gradient norm is not finite (loss {float(loss)}){where}: {source}."
    samples = "the samples of that rank" if 0 < len(ranks) < len(reports) else "the batch"
    return NonFiniteLossError(
        f"{what} The step was not taken, parameters are unchanged, and training can go on. Look at {samples}, lower "
        "the learning rate, or clip the gradient (max_grad_norm).",
        ranks,
    )


def _is_finite(tensor: Tensor) -> bool:
    return bool(local_tensor(tensor).isfinite().all())


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


class PendingGradients:
    """Gradients of a batch that are computed when the model is called, for loops that call ``loss.backward()``.

    Under a pipeline, or with several micro-batches, forward and backward passes alternate, so the model runs both when
    it is called. The gradients are kept apart until ``loss.backward()``, so that the loop may zero gradients between
    the two, as it may in one process; then they are multiplied by the gradient that the loss receives (1 if the loop
    does not change the loss).

    Args:
        parallel: the model.
        previous: those of the batch before, if ``backward`` of its loss may still be called.

    Raises:
        InputError: there are gradients in host memory.
    """

    def __init__(self, parallel: ParallelModel, previous: PendingGradients | None) -> None:
        if previous is not None:
            previous._copy()
        for runtime in parallel.runtimes:
            runtime.reducer.follow()
        self._parallel = parallel
        managed = parallel.managed
        with_gradient = [parameter for parameter in managed if parameter.gradient is not None]
        if any(parameter.host is not None for parameter in with_gradient):
            remedy = (
                "Those of the last batch are still there. Under this plan the model works a batch through in "
                "micro-batches by itself: call optimizer.zero_grad() before the next batch; with offload plan a larger "
                "--batch to accumulate more."
            )
            raise InputError("gradients", "of two batches", remedy)
        guard_gradients(with_gradient, guarded=False)
        self._gradients: dict[nn.Parameter, Tensor | None] = {
            parameter.reduced: None for parameter in managed if parameter.host is None
        }
        self._swap()
        self._copy()

    def loss_of(self, batch: Any) -> Tensor:
        """Compute the loss and the gradients of a batch; ``backward`` of the result sets the gradients.

        ``backward`` raises InputError if gradients in host memory, which are not kept apart, were zeroed.
        """
        try:
            value = sum_over_world(self._parallel, [self._parallel.backward_step(batch)], with_norm=False)[0]
        finally:
            self._swap()
        anchor = torch.zeros((), device=value.device, requires_grad=True)
        loss: Tensor = _LossWithGradients.apply(anchor, value, self._settle)  # type: ignore[no-untyped-call]
        return loss

    def _settle(self, factor: Tensor) -> None:
        self._swap()
        offloads = any(runtime.updates.hosts for runtime in self._parallel.runtimes)
        if offloads and not self._parallel.has_gradients():
            remedy = "With offload they are made when the model is called: call optimizer.zero_grad() before that."
            raise InputError("gradients", "none", remedy)
        self._parallel.scale_gradients(factor)
        self._add()

    def _swap(self) -> None:
        """Exchange the gradients that are kept apart and those that the loop sees."""
        for parameter, gradient in self._gradients.items():
            self._gradients[parameter], parameter.grad = parameter.grad, gradient

    def _add(self) -> None:
        """Add those that are kept apart to those that the loop sees, and release them."""
        for parameter, gradient in self._gradients.items():
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._gradients.clear()
        for runtime in self._parallel.runtimes:
            guard_gradients(runtime.owned, hides_norm=runtime.updates.guarded)

    def _copy(self) -> None:
        """Copy the gradients, which are views of buffers that the next backward pass overwrites."""
        for parameter, gradient in self._gradients.items():
            self._gradients[parameter] = None if gradient is None else gradient.clone()


class _LossWithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, settle: Callable[[Tensor], None]) -> Tensor:  # noqa: ARG004
        ctx.settle, ctx.is_done = settle, False
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.is_done:
            raise InputError("loss.backward", "a second time", "Gradients were made when the model was called, once.")
        ctx.is_done = True
        ctx.settle(gradient)
        return torch.zeros_like(gradient), None, None
