"""Rows that go from every rank of a group to every other: the all-to-all that brings tokens to experts and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.parallelism.collectives import Processes


class RowExchange(Protocol):
    """Ranks that exchange rows."""

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    @property
    def rank(self) -> int:
        """Place of this rank in the group."""
        ...

    def swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows from all ranks, those of the first rank first. No autograd.

        Args:
            rows: what goes to the first rank, then what goes to the second, and so on.
            sent: how many rows go to each rank.
            received: how many come from each.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProcessExchange(Processes):
    """Processes of ``torch.distributed``."""

    def swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """See ``RowExchange``. As bytes: gloo does not know every dtype."""
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        item = rows.element_size() * rows[:1].numel() if rows.shape[0] else result.element_size() * result[:1].numel()
        dist.all_to_all_single(
            result.view(-1).view(torch.uint8), rows.contiguous().view(-1).view(torch.uint8),
            [count * item for count in received], [count * item for count in sent], group=self.process_group,
        )  # fmt: skip
        return result


def exchanged(rows: Tensor, line: RowExchange, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """The same with autograd: gradients go the way back."""
    result: Tensor = _Swap.apply(rows, line, sent, received)  # type: ignore[no-untyped-call]
    return result


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, line: RowExchange, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.way = (line, sent, received)
        return line.swap(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        line, sent, received = ctx.way
        return line.swap(gradient, received, sent), None, None, None
