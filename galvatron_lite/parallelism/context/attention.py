"""``scaled_dot_product_attention`` of queries, keys and values whose tokens are shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from galvatron_lite.parallelism.context.ring import Ring, ring_attention
from galvatron_lite.parallelism.context.ulysses import Swap, heads_by_rank, heads_of_all_tokens, tokens_of_all_heads
from galvatron_lite.parallelism.sharded.calls import input_first, on_full, same_group
from galvatron_lite.parallelism.sharded.collectives import full_tensor, local_part
from galvatron_lite.parallelism.sharded.groups import Pieces, pieces_of
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

HEADS, TOKENS = 1, 2
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
_SEEDS = 2**31

Way = Callable[[dict[str, Any], ShardSpec, ShardSpec], Tensor]
"""Attention of shares, from the arguments and the cuts of queries and keys."""


def attention(way: Way) -> Handler:
    """A handler of attention that brings queries, keys and values together in some way.

    Where the keys are whole, or the mask takes a gradient (learnt biases), every rank works on its own queries with all
    keys. Where the queries are whole and the keys are not, or anything else than tokens is shared, all is gathered.
    """

    def handler(call: Call) -> Any:
        given = {**_DEFAULTS, **dict(zip(_NAMES, input_first(call).args, strict=False)), **call.kwargs}
        query = given["query"]
        dims, cuts = len(global_shape(query)), specs_of(query)
        if (
            len(cuts) != 1
            or cuts[0].dim != dims - 2
            or not all(_tokens_only(given[name], dims) for name in _NAMES[1:3])
        ):
            return on_full(call)
        given["attn_mask"] = None if given["attn_mask"] is None else full_tensor(given["attn_mask"])
        apart = _key_cut(given)
        with locals_only():
            if apart is None or dims != TOKENS + 2 or _takes_gradient(given["attn_mask"]) or not _plain_heads(given):
                made = _with_all_keys(given, cuts[0])
            else:
                made = way({**given, **{name: _cast(to_local(given[name])) for name in _NAMES[:3]}}, cuts[0], apart)
        return wrap_locals(made, cuts, call.rules)

    return handler


def by_ring(arguments: dict[str, Any], queries: ShardSpec, keys: ShardSpec) -> Tensor:
    """Keys and values go round."""
    drop, scale = arguments["dropout_p"], _scale(arguments)
    ring = Ring(
        queries.group, _by_rank(queries), _by_rank(keys), scale, arguments["is_causal"], arguments["attn_mask"], drop,
        _seed() if drop else 0,
    )  # fmt: skip
    return ring_attention(arguments["query"], arguments["key"], arguments["value"], ring)


def by_ulysses(arguments: dict[str, Any], queries: ShardSpec, keys: ShardSpec) -> Tensor:
    """Tokens are swapped for heads, and back.

    Raises:
        InputError: the heads cannot be spread evenly.
    """
    line, size = queries.group, queries.group.size
    query, key, value = (arguments[name] for name in _NAMES[:3])
    asking, asked = (heads_by_rank(one.shape[HEADS], size) for one in (query, key))
    swap, other = Swap(line, _by_rank(queries), asking), Swap(line, _by_rank(keys), asked)
    first, last = asking[line.rank]
    mask = arguments["attn_mask"]
    if mask is not None and mask.dim() > TOKENS and mask.shape[-3] > 1:
        mask = mask[..., first:last, :, :]
    heads = heads_of_all_tokens(query, swap), heads_of_all_tokens(key, other), heads_of_all_tokens(value, other)
    options = {name: arguments[name] for name in ("dropout_p", "is_causal", "scale", "enable_gqa")}
    with own_chances(line.rank, query.device, bool(arguments["dropout_p"])):
        mixed = scaled_dot_product_attention(*heads, attn_mask=mask, **options)
    return tokens_of_all_heads(mixed, swap)


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
    with own_chances(cut.group.rank, query.device, bool(arguments["dropout_p"])):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


@contextmanager
def own_chances(rank: int, device: torch.device, needed: bool) -> Iterator[None]:
    """Inside, random numbers of this rank alone; outside all ranks go on alike. See ``cuts.randomness``."""
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


def _scale(arguments: dict[str, Any]) -> float:
    return float(arguments["query"].shape[-1] ** -0.5 if arguments["scale"] is None else arguments["scale"])


def _by_rank(cut: ShardSpec) -> tuple[Pieces, ...]:
    return tuple(pieces_of(cut.extent, cut.group, rank) for rank in range(cut.group.size))


def _tokens_only(tensor: Tensor, dims: int) -> bool:
    """Whether nothing but the tokens of keys or values is shared."""
    return all(cut.dim == dims - 2 for cut in specs_of(tensor))


def _key_cut(arguments: dict[str, Any]) -> ShardSpec | None:
    """How keys and values are both cut, along the line of the queries; None where they are not."""
    query, key, value = (specs_of(arguments[name]) for name in _NAMES[:3])
    if len(key) != 1 or key != value or not same_group(query[0].group, key[0].group):
        return None
    return key[0]


def _takes_gradient(mask: Tensor | None) -> bool:
    return mask is not None and mask.requires_grad


def _plain_heads(arguments: dict[str, Any]) -> bool:
    """Whether samples are as many everywhere, and each head of keys serves equally many of queries."""
    query, key, value = (arguments[name].shape for name in _NAMES[:3])
    heads = query[HEADS] == key[HEADS] or (arguments["enable_gqa"] and query[HEADS] % key[HEADS] == 0)
    return bool(heads and key[HEADS] == value[HEADS] and query[0] == key[0] == value[0])
