"""Ring attention: keys and values go round the ranks that share a sequence, each with its own queries.

Liu et al. 2023, arXiv:2310.01889, section 3. Forward: the block of keys and values makes c - 1 hops while attention of
the block before runs; outputs are joined by the sums of their softmaxes (online softmax, Milakov and Gimelshein 2018,
arXiv:1805.02867). Backward: the block goes round again, and behind it its gradients, to which each rank adds its own;
they make c - 1 hops too, the last one home. At no time does a rank hold more than two blocks of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from galvatron_lite.parallelism.context.kernels import AttentionBlock, attend, attend_backward
from galvatron_lite.parallelism.context.tasks import AttentionTask, Pieces, VisibleKeys, tasks
from galvatron_lite.parallelism.sharded.groups import Arrival, AxisGroup, length_of, take_pieces
from galvatron_lite.parallelism.shares import part_of

TOKENS = 2
"""Dim of the tokens in queries, keys and values (samples, heads, tokens, items)."""


@dataclass(frozen=True)
class Ring:
    """One attention of a ring."""

    line: AxisGroup  # the ranks
    queries: tuple[Pieces, ...]  # what each rank holds of the queries
    keys: tuple[Pieces, ...]  # what each holds of the keys and values
    scale: float  # of the scores
    causal: bool = False  # whether a query sees only keys up to its own place
    mask: Tensor | None = None  # of the whole queries and keys; see ``kernels.Block``
    drop: float = 0.0  # probability that an item of the softmax is dropped
    seed: int = 0  # the same on all ranks

    @cached_property
    def next(self) -> int:
        """The rank that this one sends to."""
        return (self.line.rank + 1) % self.line.size

    @cached_property
    def previous(self) -> int:
        """The rank that sends to this one."""
        return (self.line.rank - 1) % self.line.size

    def source(self, step: int) -> int:
        """Whose keys are here at a step."""
        return (self.line.rank - step) % self.line.size

    def tasks(self, step: int) -> tuple[AttentionTask, ...]:
        """What is computed at a step."""
        return tasks(self.queries[self.line.rank], self.keys[self.source(step)], self.causal)

    def block(self, step: int, number: int, task: AttentionTask, device: torch.device) -> AttentionBlock:
        """How one of its tasks is computed."""
        rows = part_of(self.queries[self.line.rank], *task.rows)
        columns = part_of(self.keys[self.source(step)], *task.columns)
        mask = self.mask
        if mask is not None:
            mask = take_pieces(mask, -2, rows) if mask.shape[-2] > 1 else mask
            mask = take_pieces(mask, -1, columns) if mask.shape[-1] > 1 else mask
        if task.seen is VisibleKeys.PLACES:
            mask = _and(mask, _places(rows, device)[:, None] >= _places(columns, device))
        size = self.line.size
        seed = (self.seed * size + self.line.rank) * size + step
        return AttentionBlock(
            self.scale, task.seen is VisibleKeys.BEFORE, mask, self.drop, (seed * size * 2 + number) % 2**62
        )


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
    """This rank's rows of attention; all ranks call it together.

    Args:
        query: its queries (samples, heads, tokens, items).
        key: its keys (samples, key heads, tokens, items).
        value: its values (samples, key heads, tokens, value items).
        ring: of the ranks.

    Returns:
        (samples, heads, tokens, value items).
    """
    output: Tensor = _Ring.apply(query, key, value, ring)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True)
class _Load:
    """Keys and values of a rank as one message, and the way back."""

    key: torch.Size
    value: torch.Size

    @staticmethod
    def pack(key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([key.flatten(), value.flatten()])

    def empty(self, like: Tensor, ring: Ring, rank: int) -> Tensor:
        """Room for those of a rank."""
        sizes = self._shapes(ring, rank)
        return like.new_empty(sizes[0].numel() + sizes[1].numel())

    def unpack(self, packed: Tensor, ring: Ring, rank: int) -> tuple[Tensor, Tensor]:
        key, value = self._shapes(ring, rank)
        return packed[: key.numel()].view(key), packed[key.numel() :].view(value)

    def _shapes(self, ring: Ring, rank: int) -> tuple[torch.Size, torch.Size]:
        tokens = length_of(ring.keys[rank])
        key, value = (torch.Size((*one[:TOKENS], tokens, *one[TOKENS + 1 :])) for one in (self.key, self.value))
        return key, value


def _visits(key: Tensor, value: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Step by step the keys and values that are here; the next ones come while these are worked on."""
    load, packed = _Load(key.shape, value.shape), _Load.pack(key, value)
    for step in range(ring.line.size):
        last, coming, arrival = step == ring.line.size - 1, packed, None
        if not last:
            coming = load.empty(packed, ring, ring.source(step + 1))
            arrival = ring.line.exchange([(ring.next, packed)], [(ring.previous, coming)])
        yield step, *load.unpack(packed, ring, ring.source(step))
        if arrival is not None:
            arrival.wait()
        packed = coming


_RINGS: dict[int, Ring] = {}
"""Rings of calls under way, by identity: an operator takes no objects."""


@contextmanager
def _passed(ring: Ring) -> Iterator[int]:
    """A ring by a number, for as long as a call takes."""
    _RINGS[id(ring)] = ring
    try:
        yield id(ring)
    finally:
        del _RINGS[id(ring)]


@torch.library.custom_op("galvatron::ring_attention", mutates_args=())
def ring_forward(query: Tensor, key: Tensor, value: Tensor, ring: int) -> tuple[Tensor, Tensor]:
    """The forward pass as one operator, whose outputs selective recomputation keeps as it keeps those of attention in
    one process: output, and the logarithms of the sums of exponentials of each query's scores.
    """
    return _forward(query, key, value, _RINGS[ring])


def _forward(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    samples, heads, tokens, _ = query.shape
    # Heads beside items in memory, as attention in one process returns them: joining the heads then copies nothing.
    output = query.new_zeros((samples, tokens, heads, value.shape[-1]), dtype=wide).transpose(1, 2)
    sums = query.new_full(query.shape[:-1], -torch.inf, dtype=wide)
    for step, keys, values in _visits(key, value, ring):
        for number, task in enumerate(ring.tasks(step)):
            rows, columns = slice(*task.rows), slice(*task.columns)
            block = ring.block(step, number, task, query.device)
            found = attend(query[:, :, rows], keys[:, :, columns], values[:, :, columns], block)
            _join(output[:, :, rows], sums[:, :, rows], *found)
    return output.to(query.dtype), sums


@ring_forward.register_fake
def _without_data(query: Tensor, key: Tensor, value: Tensor, ring: int) -> tuple[Tensor, Tensor]:
    """On tensors without data the same: its messages are what a dry run looks for."""
    return _forward(query, key, value, _RINGS[ring])


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        output: Tensor
        with _passed(ring) as number:
            output, sums = ring_forward(query, key, value, number)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.ring = ring
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        ring: Ring = ctx.ring
        queries = torch.zeros_like(query, dtype=sums.dtype, memory_format=torch.contiguous_format)
        own, travelling = None, _Travelling(ring, _Load(key.shape, value.shape))
        for step, keys, values in _visits(key, value, ring):
            found = [torch.zeros_like(one, dtype=sums.dtype) for one in (keys, values)]
            for number, task in enumerate(ring.tasks(step)):
                rows, columns = slice(*task.rows), slice(*task.columns)
                block = ring.block(step, number, task, query.device)
                given, asking, made, total = (one[:, :, rows] for one in (gradient, query, output, sums))
                mine = attend_backward(given, asking, keys[:, :, columns], values[:, :, columns], made, total, block)
                queries[:, :, rows] += mine[0]
                for there, part in zip(found, mine[1:], strict=True):
                    there[:, :, columns] += part
            if step == 0:
                own = found
            else:
                travelling.add(step, found, key)
        keys, values = travelling.home(own, key)
        return queries.to(query.dtype), keys, values, None


class _Travelling:
    """Gradients of keys and values on their way round: each rank adds its own and sends them on."""

    def __init__(self, ring: Ring, load: _Load) -> None:
        self._ring, self._load = ring, load
        self._coming: tuple[Arrival, Tensor] | None = None

    def add(self, step: int, gradients: list[Tensor], like: Tensor) -> None:
        """What this rank found for the keys that are here at a step."""
        ring, packed = self._ring, self._load.pack(*gradients)
        packed = self._added(packed).to(like.dtype)
        after = self._load.empty(packed, ring, ring.source(step + 1))
        self._coming = ring.line.exchange([(ring.next, packed)], [(ring.previous, after)]), after

    def home(self, gradients: list[Tensor] | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's keys and values."""
        assert gradients is not None
        packed = self._added(self._load.pack(*gradients)).to(like.dtype)
        return self._load.unpack(packed, self._ring, self._ring.line.rank)

    def _added(self, packed: Tensor) -> Tensor:
        if self._coming is None:
            return packed
        arrival, coming = self._coming
        arrival.wait()
        return packed + coming


def _join(output: Tensor, sums: Tensor, block_output: Tensor, more: Tensor) -> None:
    """Add a block's output to that of the blocks before, in place."""
    total = torch.logaddexp(sums, more)
    base = total.masked_fill(total == -torch.inf, 0.0)
    before, after = (sums - base).exp(), (more - base).exp()
    output.mul_(before.unsqueeze(-1)).add_(block_output * after.unsqueeze(-1))
    sums.copy_(total)


def _and(mask: Tensor | None, seen: Tensor) -> Tensor:
    """A mask, and what else is not seen."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def _places(pieces: Pieces, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in pieces])
