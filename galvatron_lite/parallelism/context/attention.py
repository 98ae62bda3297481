"""``scaled_dot_product_attention`` of queries, keys and values that are sharded by tokens.

Ranks pass keys and values around a ring (``ring``), or exchange tokens for heads around attention (Ulysses; Jacobs et
al. 2023, arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.context.ring import Ring, ring_attention
from galvatron_lite.parallelism.precision import autocast_dtype
from galvatron_lite.parallelism.sharded.calls import ATTENTION, named_arguments, on_full, same_group
from galvatron_lite.parallelism.sharded.collectives import full_tensor, linear_map, local_part
from galvatron_lite.parallelism.sharded.groups import AxisGroup, Pieces, length_of, take_pieces
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

HEADS, TOKENS = 1, 2
"""Dims of queries, keys and values (samples, heads, tokens, items)."""
_OPERANDS = ("query", "key", "value")
_SEEDS = 2**31

AttentionExchange = Callable[[dict[str, Any], ShardSpec, ShardSpec], Tensor]
"""Computes attention of local queries, from the arguments and the specs of queries and keys."""


def attention(exchange: AttentionExchange) -> Handler:
    """Return a handler of attention that uses an exchange.

    If the keys are replicated, or the mask takes a gradient (learnt biases), each rank uses its queries with all keys.
    If only the keys are sharded, or any tensor along another dim than tokens, all tensors are gathered.
    """

    def handler(call: Call) -> Any:
        arguments = named_arguments(call, ATTENTION)
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
                output = exchange({**arguments, **{n: _cast(to_local(arguments[n])) for n in _OPERANDS}}, cuts[0], keys)
        return wrap_locals(output, cuts, call.rules)

    return handler


def by_ring(arguments: dict[str, Any], queries: ShardSpec, keys: ShardSpec) -> Tensor:
    """Compute attention by a ring."""
    query, drop, scale = arguments["query"], arguments["dropout_p"], arguments["scale"]
    ring = Ring(
        queries.group,
        queries.shards,
        keys.shards,
        float(query.shape[-1] ** -0.5 if scale is None else scale),
        arguments["is_causal"],
        arguments["attn_mask"],
        drop,
        _seed() if drop else 0,
    )
    return ring_attention(query, arguments["key"], arguments["value"], ring)


def by_ulysses(arguments: dict[str, Any], queries: ShardSpec, keys: ShardSpec) -> Tensor:
    """Compute attention of this rank's heads, with exchanges of tokens for heads before and after (Ulysses).

    Raises:
        InputError: the heads cannot be spread evenly.
    """
    line = queries.group
    query, key, value = (arguments[name] for name in _OPERANDS)
    query_heads, key_heads = (heads_by_rank(tensor.shape[HEADS], line.size) for tensor in (query, key))
    query_swap, key_swap = Swap(line, queries.shards, query_heads), Swap(line, keys.shards, key_heads)
    mask = arguments["attn_mask"]
    if mask is not None and mask.dim() > TOKENS and mask.shape[-3] > 1:
        mask = mask[..., slice(*query_heads[line.rank]), :, :]
    query = _swap(query, query_swap, to_heads=True)
    key, value = (_swap(tensor, key_swap, to_heads=True) for tensor in (key, value))
    options = {name: arguments[name] for name in ("dropout_p", "is_causal", "scale", "enable_gqa")}
    with _randomness_of_rank(line.rank, query.device, bool(arguments["dropout_p"])):
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    return _swap(output, query_swap, to_heads=False)


def _with_all_keys(arguments: dict[str, Any], cut: ShardSpec) -> Tensor:
    """Attention of this rank's queries with all keys and values."""
    query, key, value = to_local(arguments["query"]), full_tensor(arguments["key"]), full_tensor(arguments["value"])
    mask = arguments["attn_mask"]
    if mask is not None and mask.shape[-2] > 1:
        mask = local_part(mask, cut, mask.dim() - 2)
    if arguments["is_causal"]:
        places = torch.cat([torch.arange(start, stop, device=query.device) for start, stop in cut.pieces])
        mask = places[:, None] >= torch.arange(key.shape[-2], device=query.device)
    options = {name: arguments[name] for name in ("dropout_p", "scale", "enable_gqa")}
    with _randomness_of_rank(cut.group.rank, query.device, bool(arguments["dropout_p"])):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


@contextmanager
def _randomness_of_rank(rank: int, device: torch.device, needed: bool) -> Iterator[None]:
    """Draw random numbers of this rank inside; outside, ranks keep equal random states."""
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
    """Cast a tensor as autocast casts the inputs of attention."""
    dtype = autocast_dtype(tensor)
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _key_cut(arguments: dict[str, Any]) -> ShardSpec | None:
    """The spec of keys and values, if both are sharded alike over the ranks of the queries; else None."""
    query, key, value = (specs_of(arguments[name]) for name in _OPERANDS)
    if len(key) != 1 or key != value or not same_group(query[0].group, key[0].group):
        return None
    return key[0]


def _plain_heads(arguments: dict[str, Any]) -> bool:
    """Whether all tensors have as many samples, and all heads of keys serve equally many heads of queries."""
    query, key, value = (arguments[name].shape for name in _OPERANDS)
    heads = query[HEADS] == key[HEADS] or (arguments["enable_gqa"] and query[HEADS] % key[HEADS] == 0)
    return bool(heads and key[HEADS] == value[HEADS] and query[0] == key[0] == value[0])


@dataclass(frozen=True, slots=True)
class Swap:
    """An exchange of tokens for heads."""

    line: AxisGroup  # the ranks
    tokens: tuple[Pieces, ...]  # of each rank, outside attention
    heads: tuple[Range, ...]  # of each rank, inside attention; several ranks may have the same head


def heads_by_rank(heads: int, ranks: int) -> tuple[Range, ...]:
    """Return the heads of each rank; of fewer heads than ranks, the head that its queries use.

    Raises:
        InputError: the heads cannot be spread evenly.
    """
    if heads % ranks == 0:
        count = heads // ranks
        return tuple((rank * count, (rank + 1) * count) for rank in range(ranks))
    if ranks % heads:
        remedy = f"Ulysses spreads whole heads over {ranks} ranks: plan another degree, or the ring (ulysses: false)."
        raise InputError("heads of attention", heads, remedy)
    return tuple((rank * heads // ranks, rank * heads // ranks + 1) for rank in range(ranks))


def _swap(local: Tensor, swap: Swap, *, to_heads: bool) -> Tensor:
    """From this rank's tokens of all heads to all tokens of its heads (``to_heads``), or back, with gradients."""
    heads = local.shape[HEADS] if to_heads else swap.heads[-1][1]
    forward, inverse = partial(_to_heads, swap=swap), partial(_to_tokens, swap=swap, heads=heads)
    return linear_map(local, forward, inverse) if to_heads else linear_map(local, inverse, forward)


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
    """The inverse of ``_to_heads``; of a head that several ranks have, the sum."""
    sends = [take_pieces(local, TOKENS, pieces) for pieces in swap.tokens]
    tokens = length_of(swap.tokens[swap.line.rank])
    shapes = [(local.shape[0], stop - start, tokens, *local.shape[TOKENS + 1 :]) for start, stop in swap.heads]
    result = local.new_zeros((local.shape[0], heads, tokens, *local.shape[TOKENS + 1 :]))
    for (start, stop), part in zip(swap.heads, _all_to_all(sends, shapes, swap.line), strict=True):
        result[:, start:stop] += part
    return result


def _all_to_all(sends: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], line: AxisGroup) -> list[Tensor]:
    """Exchange a tensor with each rank; this rank's stays here."""
    peers = [rank for rank in range(line.size) if rank != line.rank]
    buffers = [sends[rank] if rank == line.rank else sends[0].new_empty(shape) for rank, shape in enumerate(shapes)]
    outgoing = [(rank, sends[rank].contiguous()) for rank in peers if sends[rank].numel()]
    incoming = [(rank, buffers[rank]) for rank in peers if buffers[rank].numel()]
    with torch.no_grad():
        line.exchange(outgoing, incoming).wait()
    return buffers
