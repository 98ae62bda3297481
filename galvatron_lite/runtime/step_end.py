"""What follows the backward passes of a step: sums over all ranks, checks and clipping of gradients.

Gradients of a batch whose backward passes have run inside the call of the model wait here for ``loss.backward()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError, NonFiniteLossError
from galvatron_lite.runtime.monitor.notes import StepPhase
from galvatron_lite.runtime.parameters.guard import guard_gradients
from galvatron_lite.runtime.parameters.managed import local_tensor, squared_norm_share
from galvatron_lite.runtime.peers import everyone

if TYPE_CHECKING:
    from galvatron_lite.runtime.engine import ParallelModel
    from galvatron_lite.runtime.split_model import SplitModel

_LISTED = 3
"""Parameters that an error lists at most."""
_EPSILON = 1e-6


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that makes a gradient's norm ``max_norm`` at most (as ``torch.nn.utils.clip_grad_norm_``)."""
    return torch.clamp(max_norm / (norm + _EPSILON), max=1.0)


def sum_over_world(parallel: SplitModel, values: list[Tensor], with_norm: bool = True) -> Tensor:
    """Sum values over all ranks in one message, followed by the gradient's squared norm; all ranks call it."""
    if with_norm:
        shares = [
            squared_norm_share(runtime.owned, runtime.counted_elsewhere, parallel.device)
            for runtime in parallel.runtimes
        ]
        values = [*values, torch.stack(shares).sum()]
    sums = torch.stack([value.float() for value in values])
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
    infinite = [
        managed
        for managed in parallel.managed
        if managed.gradient is not None and not _is_finite(local_tensor(managed.gradient))
    ]
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
    return bool(tensor.isfinite().all())


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
            if runtime.updates.guarded:
                guard_gradients(runtime.owned)

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
