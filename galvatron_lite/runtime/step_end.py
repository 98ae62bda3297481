"""The end of a step before the update: sums over all ranks, whether they are finite, clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import NonFiniteLossError
from galvatron_lite.runtime.clip import local_tensor, squared_norm_share, step_factor
from galvatron_lite.runtime.monitor.notes import StepPhase
from galvatron_lite.runtime.monitor.watch import Watch
from galvatron_lite.runtime.scaling import LossScaler
from galvatron_lite.runtime.setup import StageRuntime

_NAMED = 3


class SteppedModel(Protocol):
    """What a step's end asks of a model in training: a ``ParallelModel``."""

    device: torch.device
    runtime: StageRuntime
    scaler: LossScaler | None
    watch: Watch

    @property
    def runtimes(self) -> Sequence[StageRuntime]:
        """What trains the parts of the model that are on this rank."""
        ...

    def _multiply(self, factor: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class _NotFinite:
    """What is not finite on a rank."""

    loss: bool  # whether its part of the loss
    made: bool  # whether gradients that it made itself
    names: tuple[str, ...]  # parameters whose gradient, summed over ranks


def reduced(parallel: SteppedModel, values: list[Tensor], with_norm: bool = True) -> Tensor:
    """Sums over the world of values, and of the gradient's squared norm, in one message."""
    if with_norm:
        shares = [squared_norm_share(one.owned, one.counted_elsewhere, parallel.device) for one in parallel.runtimes]
        values = [*values, torch.stack(shares).sum()]
    stacked = torch.stack([value.float() for value in values])
    if parallel.runtime.meshes.world > 1:
        dist.all_reduce(stacked, group=parallel.watch.group)
    return stacked


def finish_step(parallel: SteppedModel, loss: Tensor, largest: float | None) -> tuple[Tensor, bool]:
    """The global loss, and whether the step may be taken, after checking gradients, scaling them back, clipping.

    Args:
        parallel: holds the gradients.
        loss: this rank's part of it.
        largest: norm to clip the gradient to; None: it stays as it is.

    Raises:
        NonFiniteLossError: the loss or the gradient is not; on all ranks. Not where fp16 overflows.
    """
    parallel.watch.at(StepPhase.CHECK)
    lifted = None if parallel.scaler is None else parallel.scaler.get_scale()
    sums = reduced(parallel, [loss])
    is_finite = bool(sums.isfinite().all())
    if not is_finite:
        _refuse(parallel, loss, sums[0], overflows=lifted is not None)
    elif (factor := step_factor(sums[-1], lifted, largest)) is not None:
        parallel._multiply(factor)
    if parallel.scaler is not None:
        parallel.scaler.settle(is_finite)
    return sums[0], is_finite


def _refuse(parallel: SteppedModel, local_loss: Tensor, loss: Tensor, overflows: bool) -> None:
    """Raise, unless only the gradient is not finite, where that is an overflow of scaled ones."""
    if overflows and bool(loss.isfinite()):
        return
    every: list[Any] = [_not_finite(parallel, local_loss)]
    if parallel.runtime.meshes.world > 1:
        every *= dist.get_world_size()
        dist.all_gather_object(every, _not_finite(parallel, local_loss), group=parallel.watch.group)
    what, ranks = _report(every, float(loss))
    raise NonFiniteLossError(
        f"{what} The step was not taken, parameters are unchanged, and training can go on. Look at "
        f"{'the batch' if len(ranks) == len(every) else 'the samples of that rank'}, lower the learning rate, or clip "
        "the gradient (max_grad_norm).",
        ranks,
    )


def _not_finite(parallel: SteppedModel, loss: Tensor) -> _NotFinite:
    owned = [one for runtime in parallel.runtimes for one in runtime.owned]
    bad = [one for one in owned if one.gradient is not None and not _is_finite(one.gradient)]
    made = any(one.is_final and not one.is_zero for one in bad) or not all(
        runtime.reducer.gave_finite for runtime in parallel.runtimes
    )
    return _NotFinite(not _is_finite(loss), made, tuple(one.names[0] for one in bad))


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
