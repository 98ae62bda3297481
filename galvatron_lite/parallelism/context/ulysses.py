"""Ulysses: ranks that share tokens swap them for heads around attention (Jacobs et al. 2023, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.groups import AxisGroup, Pieces, length_of, take_pieces
from galvatron_lite.parallelism.shares import Range

HEADS, TOKENS = 1, 2
"""Dims of queries, keys and values (samples, heads, tokens, items)."""


@dataclass(frozen=True, slots=True)
class Swap:
    """How tokens are swapped for heads."""

    line: AxisGroup  # the ranks
    tokens: tuple[Pieces, ...]  # what each holds of the tokens outside attention
    heads: tuple[Range, ...]  # what each has of the heads in attention; several may have the same


def heads_by_rank(heads: int, ranks: int) -> tuple[Range, ...]:
    """Heads of each rank; where they are fewer than ranks, the one that its queries ask.

    Raises:
        InputError: they are not even.
    """
    if heads % ranks == 0:
        each = heads // ranks
        return tuple((rank * each, (rank + 1) * each) for rank in range(ranks))
    if ranks % heads:
        remedy = f"Ulysses spreads whole heads over {ranks} ranks: plan another degree, or the ring (ulysses: false)."
        raise InputError("heads of attention", heads, remedy)
    return tuple((rank * heads // ranks, rank * heads // ranks + 1) for rank in range(ranks))


def heads_of_all_tokens(local: Tensor, swap: Swap) -> Tensor:
    """This rank's heads with all tokens, in their order, from its tokens with all heads."""
    found: Tensor = _Swap.apply(local, swap)  # type: ignore[no-untyped-call]
    return found


def tokens_of_all_heads(local: Tensor, swap: Swap) -> Tensor:
    """The way back: this rank's tokens with all heads, each of which one rank has, from its heads with all tokens."""
    found: Tensor = _SwapBack.apply(local, swap)  # type: ignore[no-untyped-call]
    return found


class _Swap(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, swap: Swap) -> Tensor:
        ctx.swap, ctx.heads = swap, local.shape[HEADS]
        return _to_heads(local, swap)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(gradient, ctx.swap, ctx.heads), None


class _SwapBack(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, swap: Swap) -> Tensor:
        ctx.swap = swap
        return _to_tokens(local, swap, swap.heads[-1][1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _to_heads(gradient, ctx.swap), None


def _to_heads(local: Tensor, swap: Swap) -> Tensor:
    line, (first, last) = swap.line, swap.heads[swap.line.rank]
    sends = [local[:, start:stop] for start, stop in swap.heads]
    lengths = [length_of(pieces) for pieces in swap.tokens]
    shapes = [(local.shape[0], last - first, length, *local.shape[TOKENS + 1 :]) for length in lengths]
    arrived = _all_to_all(sends, shapes, line)
    result = local.new_empty((local.shape[0], last - first, sum(lengths), *local.shape[TOKENS + 1 :]))
    for pieces, part in zip(swap.tokens, arrived, strict=True):
        before = 0
        for start, stop in pieces:
            result[:, :, start:stop] = part[:, :, before : before + stop - start]
            before += stop - start
    return result


def _to_tokens(local: Tensor, swap: Swap, heads: int) -> Tensor:
    """Where several ranks have the same head, the sum of theirs."""
    line = swap.line
    sends = [take_pieces(local, TOKENS, pieces) for pieces in swap.tokens]
    tokens = length_of(swap.tokens[line.rank])
    shapes = [(local.shape[0], stop - start, tokens, *local.shape[TOKENS + 1 :]) for start, stop in swap.heads]
    result = local.new_zeros((local.shape[0], heads, tokens, *local.shape[TOKENS + 1 :]))
    for (start, stop), part in zip(swap.heads, _all_to_all(sends, shapes, line), strict=True):
        result[:, start:stop] += part
    return result


def _all_to_all(sends: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], line: AxisGroup) -> list[Tensor]:
    """What every rank sent to this one; its own stays here."""
    peers = [rank for rank in range(line.size) if rank != line.rank]
    buffers = [sends[rank] if rank == line.rank else sends[0].new_empty(shape) for rank, shape in enumerate(shapes)]
    given = [(rank, sends[rank].contiguous()) for rank in peers if sends[rank].numel()]
    wanted = [(rank, buffers[rank]) for rank in peers if buffers[rank].numel()]
    with torch.no_grad():
        line.exchange(given, wanted).wait()
    return buffers
