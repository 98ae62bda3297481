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
from enum import Enum
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from galvatron_lite.parallelism.context.attention import AttentionBlock, attend, attend_backward
from galvatron_lite.parallelism.sharded.groups import Arrival, AxisGroup, Pieces, length_of, take_pieces
from galvatron_lite.parallelism.shares import Range, part_of

TOKENS = 2
"""Dim of the tokens in queries, keys and values (samples, heads, tokens, items)."""


class VisibleKeys(Enum):
    """Which keys the queries of a block see."""

    ALL = "all"
    BEFORE = "before"
    """As many queries as keys, at the same places: each sees those up to its own."""
    PLACES = "places"
    """Each sees those whose places are not behind its own."""


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """A block of scores: some of a rank's queries with some keys of one rank."""

    rows: Range  # of the rank's own queries, as it holds them
    columns: Range  # of the keys, as their rank holds them
    seen: VisibleKeys  # which of these the queries see


def tasks(queries: Pieces, keys: Pieces, causal: bool) -> tuple[AttentionTask, ...]:
    """The blocks of queries and keys that lie in these pieces of their sequences; those nobody sees are left out.

    Where both sides hold an early and a late piece (``shares.mirrored``), the block of other ranks is always one, of
    half the scores: all queries with the early keys of a rank before, the late queries with all keys of a rank behind.
    """
    rows, columns = length_of(queries), length_of(keys)
    if not rows or not columns:
        return ()
    if not causal or queries == keys:
        seen = VisibleKeys.BEFORE if causal else VisibleKeys.ALL
        return (AttentionTask((0, rows), (0, columns), seen),)
    blocks = list(_by_piece(queries, keys))
    partial = [task for task in blocks if task.seen is VisibleKeys.PLACES]
    full = (task for task in blocks if task.seen is VisibleKeys.ALL)
    # neighbouring queries with the same keys are one block
    runs = [list(run) for _, run in groupby(full, key=lambda task: task.columns)]
    joined = [AttentionTask((run[0].rows[0], run[-1].rows[1]), run[0].columns, VisibleKeys.ALL) for run in runs]
    return (*partial, *joined)


def _by_piece(queries: Pieces, keys: Pieces) -> Iterator[AttentionTask]:
    """Block by block of pieces; keys that are seen wholly come first, as keys are in order."""
    for query, rows in _with_places(queries):
        full = 0
        for key, columns in _with_places(keys):
            if key[1] <= query[0] + 1:
                full = columns[1]
            elif key[0] < query[1]:
                yield AttentionTask(rows, columns, VisibleKeys.PLACES)
        if full:
            yield AttentionTask(rows, (0, full), VisibleKeys.ALL)


def _with_places(pieces: Pieces) -> Iterator[tuple[Range, Range]]:
    """Pieces, and where they lie in what a rank holds."""
    before = 0
    for start, stop in pieces:
        if stop > start:
            yield (start, stop), (before, before + stop - start)
        before += stop - start


@dataclass(frozen=True)
class Ring:
    """One attention of a ring."""

    line: AxisGroup  # the ranks
    queries: tuple[Pieces, ...]  # what each rank holds of the queries
    keys: tuple[Pieces, ...]  # what each holds of the keys and values
    scale: float  # of the scores
    causal: bool = False  # whether a query sees only keys up to its own place
    mask: Tensor | None = None  # of all queries and keys; see ``AttentionBlock``
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

    def blocks(self, step: int, device: torch.device) -> Iterator[tuple[slice, slice, AttentionBlock]]:
        """The blocks of a step: rows of queries, columns of keys, and how they are computed."""
        queries, keys = self.queries[self.line.rank], self.keys[self.source(step)]
        size = self.line.size
        seed = ((self.seed * size + self.line.rank) * size + step) * size * 2
        for number, task in enumerate(tasks(queries, keys, self.causal)):
            mask = self._mask_of(part_of(queries, *task.rows), part_of(keys, *task.columns), task.seen, device)
            before = task.seen is VisibleKeys.BEFORE
            block = AttentionBlock(self.scale, before, mask, self.drop, (seed + number) % 2**62)
            yield slice(*task.rows), slice(*task.columns), block

    def _mask_of(self, rows: Pieces, columns: Pieces, seen: VisibleKeys, device: torch.device) -> Tensor | None:
        mask = self.mask
        if mask is not None:
            mask = take_pieces(mask, -2, rows) if mask.shape[-2] > 1 else mask
            mask = take_pieces(mask, -1, columns) if mask.shape[-1] > 1 else mask
        if seen is not VisibleKeys.PLACES:
            return mask
        visible = _places(rows, device)[:, None] >= _places(columns, device)
        if mask is None:
            return visible
        return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)


def _places(pieces: Pieces, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in pieces])


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

    ring: Ring
    key: torch.Size
    value: torch.Size

    @staticmethod
    def pack(key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([key.flatten(), value.flatten()])

    def empty(self, like: Tensor, rank: int) -> Tensor:
        return like.new_empty(sum(size.numel() for size in self._sizes(rank)))

    def unpack(self, packed: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        key, value = self._sizes(rank)
        return packed[: key.numel()].view(key), packed[key.numel() :].view(value)

    def _sizes(self, rank: int) -> list[torch.Size]:
        tokens = length_of(self.ring.keys[rank])
        return [torch.Size((*size[:TOKENS], tokens, *size[TOKENS + 1 :])) for size in (self.key, self.value)]


def _visits(key: Tensor, value: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Step by step the keys and values that are here; the next ones come while these are worked on."""
    load, packed = _Load(ring, key.shape, value.shape), _Load.pack(key, value)
    for step in range(ring.line.size):
        last, coming, arrival = step == ring.line.size - 1, packed, None
        if not last:
            coming = load.empty(packed, ring.source(step + 1))
            arrival = ring.line.exchange([(ring.next, packed)], [(ring.previous, coming)])
        yield step, *load.unpack(packed, ring.source(step))
        if arrival is not None:
            arrival.wait()
        packed = coming


_RINGS: dict[int, Ring] = {}
"""Rings of calls under way, by identity: an operator takes no objects."""


@contextmanager
def _registered(ring: Ring) -> Iterator[int]:
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
        for rows, columns, block in ring.blocks(step, query.device):
            part = attend(query[:, :, rows], keys[:, :, columns], values[:, :, columns], block)
            _join(output[:, :, rows], sums[:, :, rows], *part)
    return output.to(query.dtype), sums


@ring_forward.register_fake
def _forward_without_data(query: Tensor, key: Tensor, value: Tensor, ring: int) -> tuple[Tensor, Tensor]:
    return _forward(query, key, value, _RINGS[ring])  # its messages are what a dry run looks for


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        output: Tensor
        with _registered(ring) as number:
            output, sums = ring_forward(query, key, value, number)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.ring = ring
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        ring: Ring = ctx.ring
        load = _Load(ring, key.shape, value.shape)
        queries = torch.zeros_like(query, dtype=sums.dtype, memory_format=torch.contiguous_format)
        home, coming = torch.empty(0), list[tuple[Arrival, Tensor]]()

        def with_arrived(packed: Tensor) -> Tensor:
            """Gradients of the ranks before and this one's."""
            while coming:
                arrival, tensor = coming.pop()
                arrival.wait()
                packed = packed + tensor
            return packed.to(key.dtype)

        for step, keys, values in _visits(key, value, ring):
            of_keys, of_values = (torch.zeros_like(tensor, dtype=sums.dtype) for tensor in (keys, values))
            for rows, columns, block in ring.blocks(step, query.device):
                asked, mixed, total = (tensor[:, :, rows] for tensor in (query, output, sums))
                operands = asked, keys[:, :, columns], values[:, :, columns]
                part = attend_backward(gradient[:, :, rows], *operands, mixed, total, block)
                queries[:, :, rows] += part[0]
                of_keys[:, :, columns] += part[1]
                of_values[:, :, columns] += part[2]
            packed = load.pack(of_keys, of_values)
            if step == 0:
                home = packed
                continue
            packed = with_arrived(packed)
            after = load.empty(packed, ring.source(step + 1))
            coming.append((ring.line.exchange([(ring.next, packed)], [(ring.previous, after)]), after))
        keys, values = load.unpack(with_arrived(home), ring.line.rank)
        return queries.to(query.dtype), keys, values, None


def _join(output: Tensor, sums: Tensor, block_output: Tensor, more: Tensor) -> None:
    """Add a block's output to that of the blocks before, in place."""
    total = torch.logaddexp(sums, more)
    base = total.masked_fill(total == -torch.inf, 0.0)
    before, after = (sums - base).exp(), (more - base).exp()
    output.mul_(before.unsqueeze(-1)).add_(block_output * after.unsqueeze(-1))
    sums.copy_(total)
