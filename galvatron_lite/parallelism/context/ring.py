"""Ring attention: ranks that share a sequence keep their queries and pass keys and values around (Liu et al. 2023).

arXiv:2310.01889, section 3. Forward: a block of keys and values makes c - 1 hops during attention on the block before;
outputs of blocks are joined by the sums of their softmaxes (online softmax, Milakov and Gimelshein 2018,
arXiv:1805.02867). Backward: the block goes round again, followed by its gradients, to which each rank adds; they make
c - 1 hops too, the last one back to the block's rank. A rank never holds more than two blocks of keys.

Attention of a block returns the logarithm of its softmax's sum, which public functions do not. Fused kernels return it:
the operators below are those that ``scaled_dot_product_attention`` dispatches to, which
``torch.distributed.tensor.experimental`` uses too. All other cases (a mask, dropout, other dtypes) are computed as in
Dao et al. 2022 (FlashAttention, arXiv:2205.14135, algorithms 2 and 4), some rows of queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Generator, Tensor
from torch.autograd import Function

from galvatron_lite.parallelism.sharded.groups import Arrival, AxisGroup, Pieces, length_of, take_pieces
from galvatron_lite.parallelism.shares import Range, part_of

SCORES = 2**24
"""Most scores in memory at a time without a fused kernel (64 MiB of float32)."""
WIDEST = 256
"""Most items of a head for fused kernels of GPUs."""

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Options of attention on a block of queries and keys."""

    scale: float  # of the scores
    before: bool = False  # causal: each query sees the keys up to its position, of as many keys as queries
    # added to the scores, or (boolean) the scores that count; broadcast to (samples, heads, queries, keys); no gradient
    mask: Tensor | None = None
    drop: float = 0.0  # probability that an item of the softmax is dropped
    seed: int = 0  # of dropout


def attend(query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Compute attention of a block.

    Args:
        query: (samples, heads, queries, items).
        key: (samples, key heads, keys, items); key heads divide heads, which share them in order.
        value: (samples, key heads, keys, value items).
        block: options.

    Returns:
        The output (samples, heads, queries, value items), and the logarithm of the sum of exponentials of each query's
        scores (samples, heads, queries), minus infinity for a query that sees no key.
    """
    if not _is_fused(query, value, block):
        return _plain(query, key, value, block)
    wide = query, _widened(key, query), _widened(value, query)
    if query.is_cuda:
        results = _aten._scaled_dot_product_flash_attention(*wide, 0.0, block.before, False, scale=block.scale)
    else:
        results = _aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, block.before, scale=block.scale)
    return results[0], results[1]


def attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor, block: AttentionBlock
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of a block's queries, keys and values; ``gradient``, ``output`` and ``sums`` are of all
    blocks."""
    if not _is_fused(query, value, block):
        return _plain_backward(gradient, query, key, value, output, sums, block)
    wide = query, _widened(key, query), _widened(value, query)
    arguments = gradient.contiguous(), *wide, output, sums
    if query.is_cuda:
        none = torch.empty(0, dtype=torch.int64, device=query.device)
        lengths = query.shape[-2], key.shape[-2]
        results = _aten._scaled_dot_product_flash_attention_backward(
            *arguments, None, None, *lengths, 0.0, block.before, none, none, scale=block.scale
        )
    else:
        results = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *arguments, 0.0, block.before, scale=block.scale
        )
    return results[0], _narrowed(results[1], key), _narrowed(results[2], value)


def _is_fused(query: Tensor, value: Tensor, block: AttentionBlock) -> bool:
    if block.mask is not None or block.drop or query.shape[-1] != value.shape[-1] or query.is_meta:
        return False
    if query.is_cuda:
        half = query.dtype in (torch.float16, torch.bfloat16)
        return half and query.shape[-1] % 8 == 0 and query.shape[-1] <= WIDEST
    return query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64, torch.bfloat16)


def _widened(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat heads of keys or values, one for each head of the queries."""
    times = query.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def _narrowed(gradient: Tensor, tensor: Tensor) -> Tensor:
    """Sum the gradients of repeated heads."""
    if gradient.shape[1] == tensor.shape[1]:
        return gradient
    samples, heads = tensor.shape[:2]
    return gradient.reshape(samples, heads, -1, *gradient.shape[2:]).sum(2)


def _plain(query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    outputs, sums = [], []
    for rows, chances in _rows(query, key, block):
        scores = _scores(query, key, rows, block)
        total = scores.logsumexp(-1)
        weights = _softmax(scores, total)
        kept = weights if chances is None else weights * chances
        outputs.append(_by_heads(kept.to(value.dtype), value))
        sums.append(total)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def _plain_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor, block: AttentionBlock
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = []
    keys, values = torch.zeros_like(key, dtype=sums.dtype), torch.zeros_like(value, dtype=sums.dtype)
    shared = (gradient.to(sums.dtype) * output.to(sums.dtype)).sum(-1, keepdim=True)
    for rows, chances in _rows(query, key, block):
        weights = _softmax(_scores(query, key, rows, block), sums[:, :, rows])
        upstream = gradient[:, :, rows].to(sums.dtype)
        inner = _by_heads(upstream, value.to(sums.dtype).mT)
        kept = weights
        if chances is not None:
            kept, inner = weights * chances, inner * chances
        scores = weights * (inner - shared[:, :, rows]) * block.scale
        values += _over_queries(kept, upstream, value)
        keys += _over_queries(scores, query[:, :, rows].to(sums.dtype), key)
        gradients.append(_by_heads(scores, key.to(sums.dtype)))
    return torch.cat(gradients, 2), keys, values


def _rows(query: Tensor, key: Tensor, block: AttentionBlock) -> Iterator[tuple[slice, Tensor | None]]:
    """Rows of queries, a few at a time, and the factors of dropout for their softmax; None without dropout."""
    samples, heads, queries, _ = query.shape
    count = max(1, SCORES // max(1, samples * heads * key.shape[2]))
    generator = Generator(query.device).manual_seed(block.seed) if block.drop else None
    for start in range(0, max(queries, 1), count):
        rows = slice(start, min(start + count, queries))
        shape = samples, heads, rows.stop - rows.start, key.shape[2]
        yield rows, None if generator is None else _chances(shape, query, block.drop, generator)


def _chances(shape: tuple[int, ...], query: Tensor, drop: float, generator: Generator) -> Tensor:
    kept = torch.empty(shape, dtype=torch.bool, device=query.device).bernoulli_(1 - drop, generator=generator)
    return kept / (1 - drop) if drop < 1 else kept.float()


def _scores(query: Tensor, key: Tensor, rows: slice, block: AttentionBlock) -> Tensor:
    """Scores in float32 or wider."""
    scores = _by_heads(query[:, :, rows], key.mT) * block.scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    mask = block.mask
    if mask is not None:
        mask = mask[..., rows, :] if mask.shape[-2] > 1 else mask
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if block.before:
        places = torch.arange(key.shape[2], device=key.device)
        scores = scores.masked_fill(places > places[rows, None], -torch.inf)
    return scores


def _softmax(scores: Tensor, sums: Tensor) -> Tensor:
    """The softmax from scores and logarithms of sums; zero for a query that sees no key."""
    return (scores - sums.masked_fill(sums == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _by_heads(left: Tensor, right: Tensor) -> Tensor:
    """Matmul of (samples, heads, rows, inner) and (samples, key heads, inner, columns)."""
    samples, heads, rows, inner = left.shape
    several = left.reshape(samples, right.shape[1], -1, inner) @ right
    return several.view(samples, heads, rows, right.shape[-1])


def _over_queries(weights: Tensor, tensor: Tensor, like: Tensor) -> Tensor:
    """Matmul that sums over queries, and over heads that share a key head: (samples, key heads, keys, items)."""
    samples, heads = like.shape[:2]
    rows = weights.reshape(samples, heads, -1, weights.shape[-1])
    return rows.mT @ tensor.reshape(samples, heads, -1, tensor.shape[-1])


TOKENS = 2
"""Dim of the tokens in queries, keys and values (samples, heads, tokens, items)."""


class VisibleKeys(Enum):
    """Which keys the queries of a block see."""

    ALL = "all"
    BEFORE = "before"
    """As many queries as keys, at the same positions: each sees the keys up to its position."""
    PLACES = "places"
    """Each sees the keys up to its position, by positions in the sequence."""


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """A block of scores: some queries of this rank with some keys of a rank."""

    rows: Range  # of this rank's local queries
    columns: Range  # of the other rank's local keys
    seen: VisibleKeys


def tasks(queries: Pieces, keys: Pieces, causal: bool) -> tuple[AttentionTask, ...]:
    """Return the blocks of queries and keys in these ranges of their sequences, without invisible blocks.

    If both ranks hold an early and a late range (``shares.mirrored``), there is one block with half of the scores: all
    queries with the early keys of a rank before this one, or the late queries with all keys of a rank after it.
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
    # join blocks of adjacent queries with the same keys
    runs = [list(run) for _, run in groupby(full, key=lambda task: task.columns)]
    joined = [AttentionTask((run[0].rows[0], run[-1].rows[1]), run[0].columns, VisibleKeys.ALL) for run in runs]
    return (*partial, *joined)


def _by_piece(queries: Pieces, keys: Pieces) -> Iterator[AttentionTask]:
    """A block for each pair of ranges; keys are sorted, so completely visible ones come first."""
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
    """Ranges, and their local ranges on the rank that holds them one after another."""
    before = 0
    for start, stop in pieces:
        if stop > start:
            yield (start, stop), (before, before + stop - start)
        before += stop - start


@dataclass(frozen=True)
class Ring:
    """A call of attention on a ring."""

    line: AxisGroup  # the ranks
    queries: tuple[Pieces, ...]  # ranges of each rank
    keys: tuple[Pieces, ...]  # ranges of keys and values of each rank
    scale: float  # of the scores
    causal: bool = False  # whether a query sees only keys up to its position
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
        """The rank whose keys are here at a step."""
        return (self.line.rank - step) % self.line.size

    def blocks(self, step: int, device: torch.device) -> Iterator[tuple[slice, slice, AttentionBlock]]:
        """The blocks of a step: rows of queries, columns of keys, and options."""
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
    """Compute attention of this rank's queries. All ranks must call it together.

    Args:
        query: this rank's queries (samples, heads, tokens, items).
        key: this rank's keys (samples, key heads, tokens, items).
        value: this rank's values (samples, key heads, tokens, value items).
        ring: the ranks, and options.

    Returns:
        (samples, heads, tokens, value items).
    """
    output: Tensor = _Ring.apply(query, key, value, ring)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True)
class _Load:
    """Packs keys and values of a rank into a message, and unpacks them."""

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
    """Yield each step with its keys and values; those of the next step arrive meanwhile."""
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
"""Rings of running calls by ``id``, since operators do not accept Python objects."""


@torch.library.custom_op("galvatron::ring_attention", mutates_args=())
def ring_forward(query: Tensor, key: Tensor, value: Tensor, ring: int) -> tuple[Tensor, Tensor]:
    """Run forward as an operator whose outputs selective recomputation keeps, like those of attention in one process.

    Returns the output, and the logarithms of the sums of exponentials of each query's scores.
    """
    return _forward(query, key, value, _RINGS[ring])


def _forward(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    samples, heads, tokens, _ = query.shape
    # heads are next to items in memory, as in the output of attention in one process: joining heads copies nothing
    output = query.new_zeros((samples, tokens, heads, value.shape[-1]), dtype=wide).transpose(1, 2)
    sums = query.new_full(query.shape[:-1], -torch.inf, dtype=wide)
    for step, keys, values in _visits(key, value, ring):
        for rows, columns, block in ring.blocks(step, query.device):
            part = attend(query[:, :, rows], keys[:, :, columns], values[:, :, columns], block)
            _join(output[:, :, rows], sums[:, :, rows], *part)
    return output.to(query.dtype), sums


@ring_forward.register_fake
def _forward_without_data(query: Tensor, key: Tensor, value: Tensor, ring: int) -> tuple[Tensor, Tensor]:
    return _forward(query, key, value, _RINGS[ring])  # dry runs record its messages


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        output: Tensor
        _RINGS[id(ring)] = ring
        try:
            output, sums = ring_forward(query, key, value, id(ring))
        finally:
            del _RINGS[id(ring)]
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
            """Add the gradients that arrived from the ranks before."""
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
    """Join a block's output and sums with those of the blocks before, in place."""
    total = torch.logaddexp(sums, more)
    base = total.masked_fill(total == -torch.inf, 0.0)
    before, after = (sums - base).exp(), (more - base).exp()
    output.mul_(before.unsqueeze(-1)).add_(block_output * after.unsqueeze(-1))
    sums.copy_(total)
