"""Tokens on their way to the experts that a router chose, wherever those are, and back.

Every copy of a token (one for each expert it visits) goes to the rank that holds the expert; what comes back is
weighted and summed (Lepikhin et al. 2020, arXiv:2006.16668, section 2.2). Drop-less: an expert takes what comes.

With a capacity an expert takes of each rank at most ceil(factor x copies of the rank / experts) of them; what is beyond
is dropped, and adds nothing to the output of its token. First choices go before second ones, and earlier tokens before
later ones (algorithm 1 there), so what is dropped depends on the tokens that a rank works on together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.parallelism.collectives import Processes

Run = Callable[[Tensor, Tensor], Tensor]
"""The experts of this rank: rows (rows, hidden) and the local number of each row's expert to outputs (rows, hidden)."""


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
        """Rows from all ranks, in order, for rows that go to them, in order; so many to and from each. No autograd."""
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


@dataclass(frozen=True, slots=True)
class ExpertSpread:
    """How the experts of a mixture lie on ranks."""

    experts: int  # of the whole mixture
    line: RowExchange | None = None  # ranks over which they are spread evenly, in order; None: this rank has all
    # ranks that have slices of the same experts and other tokens; None: what a rank takes is its own
    slices: RowExchange | None = None
    # times an even share of its copies that each expert takes of a rank; None: all of them
    capacity: float | None = None


def mixed(hidden: Tensor, index: Tensor, weights: Tensor, spread: ExpertSpread, run: Run) -> Tensor:
    """The outputs of the experts that the router chose for tokens, weighted and summed.

    Args:
        hidden: (tokens, hidden).
        index: (tokens, choices) numbers of experts, best first.
        weights: (tokens, choices), with gradients.
        spread: where the experts are.
        run: those of this rank.

    Returns:
        (tokens, hidden), in the dtype of ``hidden``.
    """
    choices = index.shape[-1]
    order = _sorted_copies(index, spread)
    rows = hidden[order // choices]
    back = _visit(rows, index.reshape(-1)[order], spread, run)
    # index_copy would keep what comes back until backward
    copies = back.new_zeros(index.numel(), back.shape[-1]).index_put((order,), back)
    weighted = copies.view(*index.shape, back.shape[-1]) * weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden.dtype)


def _sorted_copies(index: Tensor, spread: ExpertSpread) -> Tensor:
    """Copies of tokens (token x choices + choice) in the order of their experts, without those that are dropped."""
    if spread.capacity is None:
        return torch.argsort(index.reshape(-1), stable=True)
    tokens, choices = index.shape
    by_choice = torch.argsort(index.t().reshape(-1), stable=True)
    copies = by_choice % tokens * choices + by_choice // tokens
    numbers = index.reshape(-1)[copies]
    first = torch.searchsorted(numbers, numbers)
    most = ceil(spread.capacity * index.numel() / spread.experts)
    return copies[torch.arange(len(copies), device=index.device) - first < most]


def _visit(rows: Tensor, numbers: Tensor, spread: ExpertSpread, run: Run) -> Tensor:
    """Outputs of rows that lie in the order of their experts' numbers."""
    if spread.line is None:
        return _run_here(rows, numbers, spread, run)
    line, here = spread.line, spread.experts // spread.line.size
    bounds = torch.arange(spread.experts + 1, device=numbers.device)
    counts = torch.searchsorted(numbers.contiguous(), bounds).diff()
    even = [here] * line.size
    arriving = line.swap(counts, even, even)
    sent, received = torch.stack([counts, arriving]).view(2, line.size, here).sum(-1).tolist()
    local = torch.arange(here, device=numbers.device).repeat(line.size).repeat_interleave(arriving)
    outputs = _run_here(_exchanged(rows, line, sent, received), local, spread, run)
    return _exchanged(outputs, line, received, sent)


def _run_here(rows: Tensor, numbers: Tensor, spread: ExpertSpread, run: Run) -> Tensor:
    if spread.slices is None:
        return _linked(run(rows, numbers), rows)
    line, own = spread.slices, len(rows)
    counts = line.swap(torch.full((line.size,), own, device=rows.device), [1] * line.size, [1] * line.size).tolist()
    sent = [own] * line.size
    every = _exchanged(rows.repeat(line.size, 1), line, sent, counts)
    parts = _linked(run(every, line.swap(numbers.repeat(line.size), sent, counts)), every)
    return _exchanged(parts, line, counts, sent).view(line.size, own, parts.shape[-1]).sum(0)


def _linked(tensor: Tensor, rows: Tensor) -> Tensor:
    """The same with a way back for gradients: where no row came, nothing may have been computed, but every rank must
    take part in the exchange of gradients."""
    if tensor.requires_grad or not rows.requires_grad:
        return tensor
    return tensor + 0 * rows


def _exchanged(rows: Tensor, line: RowExchange, sent: Sequence[int], received: Sequence[int]) -> Tensor:
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
