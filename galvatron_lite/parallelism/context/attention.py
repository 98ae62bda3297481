"""``scaled_dot_product_attention`` of queries, keys and values whose tokens are shared.

By a ring (``ring``), or by swapping tokens for heads around attention (Ulysses; Jacobs et al. 2023, arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.autograd import Function
from torch.nn.functional import scaled_dot_product_attention

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.context.ring import Ring, ring_attention
from galvatron_lite.parallelism.sharded.calls import input_first, on_full, same_group
from galvatron_lite.parallelism.sharded.collectives import full_tensor, local_part
from galvatron_lite.parallelism.sharded.groups import AxisGroup, Pieces, length_of, pieces_of, take_pieces
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    ShardSpec,
    global_shape,
    locals_only,
    specs_of,
    to_local,
    wrap_locals,
)
from galvatron_lite.parallelism.shares import Range

# Attention of one block of queries and keys, with what joins it to others: the logarithm of its softmax's sum.
#
# Fused kernels give it where no public function does: the operators below are those that
# ``scaled_dot_product_attention`` itself dispatches to, which torch's own ``torch.distributed.tensor.experimental``
# uses for the same purpose. Everything else (a mask, dropout, other dtypes) is computed as written in Dao et al. 2022
# (FlashAttention, arXiv:2205.14135, algorithms 2 and 4), some rows of queries at a time.


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


HEADS, TOKENS = 1, 2
"""Dims of queries, keys and values (samples, heads, tokens, items)."""
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
_SEEDS = 2**31

Way = Callable[[dict[str, Any], ShardSpec, ShardSpec], Tensor]
"""Attention of shares, from the arguments and the cuts of queries and keys."""


def attention(exchange: Way) -> Handler:
    """A handler of attention that brings queries, keys and values together in some way.

    Where the keys are whole, or the mask takes a gradient (learnt biases), every rank works on its own queries with all
    keys. Where the queries are whole and the keys are not, or anything else than tokens is shared, all is gathered.
    """

    def handler(call: Call) -> Any:
        arguments = {**_DEFAULTS, **dict(zip(_NAMES, input_first(call).args, strict=False)), **call.kwargs}
        dims, cuts = len(global_shape(arguments["query"])), specs_of(arguments["query"])
        others = [*specs_of(arguments["key"]), *specs_of(arguments["value"])]
        if len(cuts) != 1 or any(cut.dim != dims - 2 for cut in (*cuts, *others)):
            return on_full(call)
        mask = None if arguments["attn_mask"] is None else full_tensor(arguments["attn_mask"])
        arguments["attn_mask"] = mask
        keys = _key_cut(arguments)
        learnt = mask is not None and mask.requires_grad
        with locals_only():
            if keys is None or dims != TOKENS + 2 or learnt or not _plain_heads(arguments):
                output = _with_all_keys(arguments, cuts[0])
            else:
                output = exchange(
                    {**arguments, **{n: _cast(to_local(arguments[n])) for n in _NAMES[:3]}}, cuts[0], keys
                )
        return wrap_locals(output, cuts, call.rules)

    return handler


def by_ring(arguments: dict[str, Any], queries: ShardSpec, keys: ShardSpec) -> Tensor:
    """Keys and values go round."""
    query, drop, scale = arguments["query"], arguments["dropout_p"], arguments["scale"]
    ring = Ring(
        queries.group,
        _by_rank(queries),
        _by_rank(keys),
        float(query.shape[-1] ** -0.5 if scale is None else scale),
        arguments["is_causal"],
        arguments["attn_mask"],
        drop,
        _seed() if drop else 0,
    )
    return ring_attention(query, arguments["key"], arguments["value"], ring)


def by_ulysses(arguments: dict[str, Any], queries: ShardSpec, keys: ShardSpec) -> Tensor:
    """Tokens are swapped for heads, and back.

    Raises:
        InputError: the heads cannot be spread evenly.
    """
    line = queries.group
    query, key, value = (arguments[name] for name in _NAMES[:3])
    query_heads, key_heads = (heads_by_rank(one.shape[HEADS], line.size) for one in (query, key))
    swap, other = Swap(line, _by_rank(queries), query_heads), Swap(line, _by_rank(keys), key_heads)
    mask = arguments["attn_mask"]
    if mask is not None and mask.dim() > TOKENS and mask.shape[-3] > 1:
        mask = mask[..., slice(*query_heads[line.rank]), :, :]
    query, key, value = (_swap(one, how, to_heads=True) for one, how in ((query, swap), (key, other), (value, other)))
    options = {name: arguments[name] for name in ("dropout_p", "is_causal", "scale", "enable_gqa")}
    with _own_randomness(line.rank, query.device, bool(arguments["dropout_p"])):
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    return _swap(mixed, swap, to_heads=False)


def _with_all_keys(arguments: dict[str, Any], cut: ShardSpec) -> Tensor:
    """This rank's queries with the keys and values of all."""
    query, key, value = to_local(arguments["query"]), full_tensor(arguments["key"]), full_tensor(arguments["value"])
    mask = arguments["attn_mask"]
    if mask is not None and mask.shape[-2] > 1:
        mask = local_part(mask, cut, mask.dim() - 2)
    if arguments["is_causal"]:
        places = torch.cat([torch.arange(start, stop, device=query.device) for start, stop in cut.pieces])
        mask = places[:, None] >= torch.arange(key.shape[-2], device=query.device)
    options = {name: arguments[name] for name in ("dropout_p", "scale", "enable_gqa")}
    with _own_randomness(cut.group.rank, query.device, bool(arguments["dropout_p"])):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


@contextmanager
def _own_randomness(rank: int, device: torch.device, needed: bool) -> Iterator[None]:
    """Inside, random numbers of this rank alone; outside all ranks go on alike. See ``sharded.randomness``."""
    if not needed:
        yield
        return
    seed = _seed()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed * 1_000_003 + rank)
        yield


def _seed() -> int:
    return int(torch.randint(_SEEDS, (), device="cpu").item())


def _cast(tensor: Tensor) -> Tensor:
    """As autocast casts what attention is given."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind)) if tensor.is_floating_point() else tensor


def _by_rank(cut: ShardSpec) -> tuple[Pieces, ...]:
    return tuple(pieces_of(cut.extent, cut.group, rank) for rank in range(cut.group.size))


def _key_cut(arguments: dict[str, Any]) -> ShardSpec | None:
    """How keys and values are both cut, along the line of the queries; None where they are not."""
    query, key, value = (specs_of(arguments[name]) for name in _NAMES[:3])
    if len(key) != 1 or key != value or not same_group(query[0].group, key[0].group):
        return None
    return key[0]


def _plain_heads(arguments: dict[str, Any]) -> bool:
    """Whether samples are as many everywhere, and each head of keys serves equally many of queries."""
    query, key, value = (arguments[name].shape for name in _NAMES[:3])
    heads = query[HEADS] == key[HEADS] or (arguments["enable_gqa"] and query[HEADS] % key[HEADS] == 0)
    return bool(heads and key[HEADS] == value[HEADS] and query[0] == key[0] == value[0])


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


def _swap(local: Tensor, swap: Swap, *, to_heads: bool) -> Tensor:
    """This rank's heads with all tokens, in their order, from its tokens with all heads; or the way back."""
    swapped: Tensor = _Swap.apply(local, swap, to_heads)  # type: ignore[no-untyped-call]
    return swapped


class _Swap(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, swap: Swap, to_heads: bool) -> Tensor:
        ctx.swap, ctx.to_heads = swap, to_heads
        ctx.heads = local.shape[HEADS] if to_heads else swap.heads[-1][1]
        return _to_heads(local, swap) if to_heads else _to_tokens(local, swap, ctx.heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        back = _to_tokens(gradient, ctx.swap, ctx.heads) if ctx.to_heads else _to_heads(gradient, ctx.swap)
        return back, None, None


def _to_heads(local: Tensor, swap: Swap) -> Tensor:
    first, last = swap.heads[swap.line.rank]
    sends = [local[:, start:stop] for start, stop in swap.heads]
    lengths = [length_of(pieces) for pieces in swap.tokens]
    shapes = [(local.shape[0], last - first, length, *local.shape[TOKENS + 1 :]) for length in lengths]
    result = local.new_empty((local.shape[0], last - first, sum(lengths), *local.shape[TOKENS + 1 :]))
    for pieces, part in zip(swap.tokens, _all_to_all(sends, shapes, swap.line), strict=True):
        before = 0
        for start, stop in pieces:
            result[:, :, start:stop] = part[:, :, before : before + stop - start]
            before += stop - start
    return result


def _to_tokens(local: Tensor, swap: Swap, heads: int) -> Tensor:
    """Where several ranks have the same head, the sum of theirs."""
    sends = [take_pieces(local, TOKENS, pieces) for pieces in swap.tokens]
    tokens = length_of(swap.tokens[swap.line.rank])
    shapes = [(local.shape[0], stop - start, tokens, *local.shape[TOKENS + 1 :]) for start, stop in swap.heads]
    result = local.new_zeros((local.shape[0], heads, tokens, *local.shape[TOKENS + 1 :]))
    for (start, stop), part in zip(swap.heads, _all_to_all(sends, shapes, swap.line), strict=True):
        result[:, start:stop] += part
    return result


def _all_to_all(sends: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], line: AxisGroup) -> list[Tensor]:
    """What every rank sent to this one; its own stays here."""
    peers = [rank for rank in range(line.size) if rank != line.rank]
    buffers = [sends[rank] if rank == line.rank else sends[0].new_empty(shape) for rank, shape in enumerate(shapes)]
    outgoing = [(rank, sends[rank].contiguous()) for rank in peers if sends[rank].numel()]
    incoming = [(rank, buffers[rank]) for rank in peers if buffers[rank].numel()]
    with torch.no_grad():
        line.exchange(outgoing, incoming).wait()
    return buffers
