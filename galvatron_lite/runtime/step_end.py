"""Around backward: the loss of a batch whose backward is done already, sums over all ranks, clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError, NonFiniteLossError
from galvatron_lite.runtime.monitor.notes import StepPhase
from galvatron_lite.runtime.parallelize import StageRuntime
from galvatron_lite.runtime.parameters.managed import guard_gradients, local_tensor, squared_norm_share

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
        shares = [squared_norm_share(one.owned, one.counted_elsewhere, parallel.device) for one in parallel.runtimes]
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


@dataclass(frozen=True, slots=True)
class _NotFinite:
    loss: bool  # its part of the loss
    made: bool  # gradients that it made itself
    names: tuple[str, ...]  # parameters whose gradient, summed over ranks


def _refuse(parallel: ParallelModel, local_loss: Tensor, loss: Tensor) -> None:
    owned = [one for runtime in parallel.runtimes for one in runtime.owned]
    bad = [one for one in owned if one.gradient is not None and not _is_finite(one.gradient)]
    made = any(one.is_final and not one.is_zero for one in bad)
    made = made or not all(runtime.reducer.gave_finite for runtime in parallel.runtimes)
    here = _NotFinite(not _is_finite(local_loss), made, tuple(one.names[0] for one in bad))
    every: list[Any] = [here]
    if parallel.runtime.meshes.world > 1:
        every *= dist.get_world_size()
        dist.all_gather_object(every, here, group=parallel.watch.group)
    what, ranks = _report(every, float(loss))
    raise NonFiniteLossError(
        f"{what} The step was not taken, parameters are unchanged, and training can go on. Look at "
        f"{'the batch' if len(ranks) == len(every) else 'the samples of that rank'}, lower the learning rate, or clip "
        "the gradient (max_grad_norm).",
        ranks,
    )


def _is_finite(tensor: Tensor) -> bool:
    return bool(local_tensor(tensor).isfinite().all())


def _report(every: list[_NotFinite], loss: float) -> tuple[str, tuple[int, ...]]:
    """What is not finite, and on which ranks it began, as far as it is known."""
    if ranks := tuple(rank for rank, one in enumerate(every) if one.loss):
        return f"The loss is not finite (loss {loss}): that of {_ranks(ranks)}.", ranks
    names = list(dict.fromkeys(name for one in every for name in one.names))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    where = f" ({', '.join(names[:_NAMED])}{more})" if names else ""
    head = f"The gradient norm is not finite (loss {loss}){where}"
    if ranks := tuple(rank for rank, one in enumerate(every) if one.made):
        return f"{head}: {_ranks(ranks)} made it so.", ranks
    ranks = tuple(rank for rank, one in enumerate(every) if one.names)
    return f"{head}: found on {_ranks(ranks)} once ranks had summed it.", ranks


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


class GradientsAside:
    """Keeps the gradients of earlier batches apart while the model makes those of the next one.

    The model makes gradients when it is called, but the loop sees them only after ``loss.backward()``: until then they
    are kept here, so that the loop may zero gradients between the two, as it may in one process.

    Args:
        runtimes: the stages of this rank.
        last: of the batch before, where ``backward`` of its loss may still come.

    Raises:
        InputError: there are gradients in host memory.
    """

    def __init__(self, runtimes: Sequence[StageRuntime], last: GradientsAside | None) -> None:
        if last is not None:
            last._copy()
        self._runtimes = runtimes
        owned = [one for runtime in runtimes for one in runtime.owned]
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
        self.swap()
        self._copy()

    def swap(self) -> None:
        """Exchange the gradients that are kept apart and those that the loop sees."""
        for parameter, gradient in self._aside.items():
            self._aside[parameter], parameter.grad = parameter.grad, gradient

    def add(self) -> None:
        """Add those that are kept apart to those that the loop sees, and let go of them."""
        for parameter, gradient in self._aside.items():
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._aside.clear()
        for runtime in self._runtimes:
            if runtime.updates.guarded:
                guard_gradients(runtime.owned)

    def _copy(self) -> None:
        """Gradients are views of buffers that the next backward pass fills again."""
        for parameter, gradient in self._aside.items():
            self._aside[parameter] = None if gradient is None else gradient.clone()


def stepped_loss(loss: Tensor, multiply: Callable[[Tensor], None]) -> Tensor:
    """A loss whose backward multiplies gradients that are there, for loops that call ``loss.backward()`` themselves.

    Under a pipeline, or with several micro-batches, forward and backward passes take turns: there is no moment between
    them for the loop. So the model does both when it is called, and ``loss.backward()`` only multiplies the gradients
    by what the loop made of the loss (1 where it is left as it is).

    Args:
        loss: of the batch.
        multiply: multiplies all gradients; raises where there are none.
    """
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    stepped: Tensor = _Stepped.apply(anchor, loss, multiply)  # type: ignore[no-untyped-call]
    return stepped


def check_gradients(present: bool) -> None:
    """Raise InputError for a backward pass whose gradients were zeroed: those in host memory are not kept apart."""
    if not present:
        remedy = "With offload they are made when the model is called: call optimizer.zero_grad() before that."
        raise InputError("gradients", "none", remedy)


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
