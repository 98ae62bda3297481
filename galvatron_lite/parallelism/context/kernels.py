"""Attention of one block of queries and keys, with what joins it to others: the logarithm of its softmax's sum.

Fused kernels give it where no public function does: the operators below are those that
``scaled_dot_product_attention`` itself dispatches to, which torch's own ``torch.distributed.tensor.experimental`` uses
for the same purpose. Everything else (a mask, dropout, other dtypes) is computed as written in Dao et al. 2022
(FlashAttention, arXiv:2205.14135, algorithms 2 and 4), some rows of queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

SCORES = 2**24
"""Most scores that are held at a time where no fused kernel runs (64 MiB of float32)."""
WIDEST = 256
"""Most items of a head that the fused kernels of GPUs take."""

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """How a block is computed."""

    scale: float  # of the scores
    before: bool = False  # whether each query sees only keys up to its own place, of as many keys as queries
    # what is added to the scores, or (of booleans) which of them count; broadcast to (samples, heads, queries, keys).
    # Takes no gradient
    mask: Tensor | None = None
    drop: float = 0.0  # probability that an item of the softmax is dropped
    seed: int = 0  # of what is dropped


def attend(query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Attention of a block.

    Args:
        query: (samples, heads, queries, items).
        key: (samples, key heads, keys, items); key heads divide heads, which share them in order.
        value: (samples, key heads, keys, value items).
        block: how it is computed.

    Returns:
        The output (samples, heads, queries, value items), and the logarithm of the sum of exponentials of each query's
        scores (samples, heads, queries), minus infinity where it sees no key.
    """
    if not _is_fused(query, value, block):
        return _plain(query, key, value, block)
    wide = query, _widened(key, query), _widened(value, query)
    if query.is_cuda:
        found = _aten._scaled_dot_product_flash_attention(*wide, 0.0, block.before, False, scale=block.scale)
    else:
        found = _aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, block.before, scale=block.scale)
    return found[0], found[1]


def attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor, block: AttentionBlock
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block's queries, keys and values; ``output``, its gradient and ``sums`` are of all blocks."""
    if not _is_fused(query, value, block):
        return _plain_backward(gradient, query, key, value, output, sums, block)
    wide = query, _widened(key, query), _widened(value, query)
    given = gradient.contiguous(), *wide, output, sums
    if query.is_cuda:
        none = torch.empty(0, dtype=torch.int64, device=query.device)
        lengths = query.shape[-2], key.shape[-2]
        found = _aten._scaled_dot_product_flash_attention_backward(
            *given, None, None, *lengths, 0.0, block.before, none, none, scale=block.scale
        )
    else:
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, block.before, scale=block.scale)
    return found[0], _narrowed(found[1], key), _narrowed(found[2], value)


def _is_fused(query: Tensor, value: Tensor, block: AttentionBlock) -> bool:
    if block.mask is not None or block.drop or query.shape[-1] != value.shape[-1] or query.is_meta:
        return False
    if query.is_cuda:
        half = query.dtype in (torch.float16, torch.bfloat16)
        return half and query.shape[-1] % 8 == 0 and query.shape[-1] <= WIDEST
    return query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64, torch.bfloat16)


def _widened(tensor: Tensor, query: Tensor) -> Tensor:
    """Heads of keys or values, one for each head of the queries."""
    times = query.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def _narrowed(gradient: Tensor, tensor: Tensor) -> Tensor:
    """Gradients of keys or values from those of their copies."""
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
    found = []
    keys, values = torch.zeros_like(key, dtype=sums.dtype), torch.zeros_like(value, dtype=sums.dtype)
    shared = (gradient.to(sums.dtype) * output.to(sums.dtype)).sum(-1, keepdim=True)
    for rows, chances in _rows(query, key, block):
        weights = _softmax(_scores(query, key, rows, block), sums[:, :, rows])
        given = gradient[:, :, rows].to(sums.dtype)
        inner = _by_heads(given, value.to(sums.dtype).mT)
        kept = weights
        if chances is not None:
            kept, inner = weights * chances, inner * chances
        scores = weights * (inner - shared[:, :, rows]) * block.scale
        values += _over_queries(kept, given, value)
        keys += _over_queries(scores, query[:, :, rows].to(sums.dtype), key)
        found.append(_by_heads(scores, key.to(sums.dtype)))
    return torch.cat(found, 2), keys, values


def _rows(query: Tensor, key: Tensor, block: AttentionBlock) -> Iterator[tuple[slice, Tensor | None]]:
    """Rows of queries, a few at a time, and what each item of their softmax is multiplied with: 0 where dropped."""
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
    """In float32 at the least."""
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
    """Zero where a query sees no key."""
    return (scores - sums.masked_fill(sums == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _by_heads(left: Tensor, right: Tensor) -> Tensor:
    """Products (samples, heads, rows, inner) x (samples, key heads, inner, columns)."""
    samples, heads, rows, inner = left.shape
    several = left.reshape(samples, right.shape[1], -1, inner) @ right
    return several.view(samples, heads, rows, right.shape[-1])


def _over_queries(weights: Tensor, tensor: Tensor, like: Tensor) -> Tensor:
    """Sums over queries, and over the heads that share one of keys: (samples, key heads, keys, items)."""
    samples, heads = like.shape[:2]
    rows = weights.reshape(samples, heads, -1, weights.shape[-1])
    return rows.mT @ tensor.reshape(samples, heads, -1, tensor.shape[-1])
