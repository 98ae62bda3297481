"""The loss of a global batch from those of its shares, with a gradient for each share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def global_mean(loss: Tensor, group: dist.ProcessGroup, shares: int) -> Tensor:
    """The mean of equal shares' losses; backward gives each rank its own share's part.

    Args:
        loss: of this rank's share.
        group: ranks with one share each, or several with the same.
        shares: how many there are.
    """
    mean: Tensor = _GlobalMean.apply(loss, group, shares)  # type: ignore[no-untyped-call]
    return mean


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: dist.ProcessGroup, shares: int) -> Tensor:
        ctx.shares = shares
        total = loss.clone()
        dist.all_reduce(total, group=group)
        return total / shares

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient / ctx.shares, None, None
