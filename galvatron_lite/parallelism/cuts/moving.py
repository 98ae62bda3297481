"""Moving rows of a cut dim between the ranks of its line, as one exchange whose backward is the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from galvatron_lite.parallelism.cuts.line import Line, Parcel
from galvatron_lite.parallelism.shares import share

Range = tuple[int, int]
"""Rows [start, stop)."""


def shares_of(extent: int, line: Line) -> tuple[Range, ...]:
    """The rows of every rank of a line by the rule of shares."""
    return tuple((start, start + length) for start, length in (share(extent, line.size, r) for r in range(line.size)))


def recut(local: Tensor, dim: int, held: Sequence[Range], wanted: Sequence[Range], line: Line) -> Tensor:
    """The rows that a rank wants, from those that the ranks hold.

    Args:
        local: the rows that this rank holds, a plain tensor.
        dim: of the rows.
        held: rows of every rank of the line: each row that is wanted is held by one.
        wanted: rows of every rank, likewise: each row that is held is wanted by one.
        line: the ranks.

    Returns:
        A plain tensor; ``local`` itself where no rank wants other rows than it holds.
    """
    if tuple(held) == tuple(wanted):
        return local
    result: Tensor = _Recut.apply(local, dim, tuple(held), tuple(wanted), line)  # type: ignore[no-untyped-call]
    return result


def _overlap(one: Range, other: Range) -> Range:
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))


def _rows(tensor: Tensor, dim: int, first: int, rows: Range) -> Tensor:
    """Rows of a tensor whose first row has the number ``first``."""
    return tensor.narrow(dim, rows[0] - first, rows[1] - rows[0])


def move(local: Tensor, dim: int, held: Sequence[Range], wanted: Sequence[Range], line: Line) -> Tensor:
    """See ``recut``. No autograd."""
    mine, asked = held[line.rank], wanted[line.rank]
    peers = [rank for rank in range(line.size) if rank != line.rank]
    to = {rank: _overlap(mine, wanted[rank]) for rank in peers}
    of = {rank: _overlap(asked, held[rank]) for rank in peers}
    shape = list(local.shape)
    shape[dim] = asked[1] - asked[0]
    result = local.new_empty(shape)
    sent = [(rank, _rows(local, dim, mine[0], rows).contiguous()) for rank, rows in to.items() if rows[0] < rows[1]]
    buffers: list[tuple[Parcel, Tensor]] = []
    for rank, rows in of.items():
        if rows[0] < rows[1]:
            place = _rows(result, dim, asked[0], rows)
            buffers.append(((rank, place if place.is_contiguous() else place.new_empty(place.shape)), place))
    arrival = line.exchange(sent, [parcel for parcel, _ in buffers])
    kept = _overlap(mine, asked)
    if kept[0] < kept[1]:
        _rows(result, dim, asked[0], kept).copy_(_rows(local, dim, mine[0], kept))
    arrival.wait()
    for (_, buffer), place in buffers:
        if buffer is not place:
            place.copy_(buffer)
    return result


class _Recut(Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, dim: int, held: Sequence[Range], wanted: Sequence[Range], line: Line
    ) -> Tensor:
        ctx.move = (dim, wanted, held, line)
        return move(local, dim, held, wanted, line)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return move(gradient, *ctx.move), None, None, None, None
