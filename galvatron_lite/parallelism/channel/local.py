"""Pooling, resizing, reshaping and joining of pictures whose channels are shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.parallelism.cuts import joining, views
from galvatron_lite.parallelism.cuts.calls import fronted
from galvatron_lite.parallelism.cuts.moving import Range, recut, shares_of
from galvatron_lite.parallelism.cuts.tensor import Call, Cut, Handler, cut_like, cuts_of, shares_only, whole_shape


def by_channel(call: Call, sides: int | None) -> Any:
    """A function over the sides of a picture (samples, channels, ...) alone, on the share that it is given first.

    Args:
        call: of the function.
        sides: of the picture; None: all dims but samples and channels.
    """
    call = fronted(call)
    cuts = cuts_of(call.args[0])
    with shares_only():
        dims = call.args[0].dim()
        pixels = dims - (dims - 2 if sides is None else sides)
        if cuts and all(cut.dim < pixels for cut in cuts):
            return cut_like(call.function(*call.args, **call.kwargs), cuts, call.rules)
    return call.rules.otherwise(call)


def reshaped(call: Call) -> Any:
    """``view``, ``reshape``, ``flatten``: shares of channels stay shares where they begin a dim that is split evenly.

    So (samples, channels, pixels) may become (samples, features), and groups of channels a dim of their own.
    """
    call = fronted(call)
    cuts = cuts_of(call.args[0])
    made = _home(call, cuts[0]) if len(cuts) == 1 else None
    if made is None:
        return views.reshaped(call)
    after, cut = made
    with shares_only():
        local = call.args[0].reshape((*after[: cut.dim], cut.length, *after[cut.dim + 1 :]))
    return cut_like(local, (cut,), call.rules)


def _home(call: Call, cut: Cut) -> tuple[tuple[int, ...], Cut] | None:
    """The shape of what is made, and how it is cut: the same items before the cut dim, equal shares of what follows."""
    if cut.extent % cut.line.size or any(isinstance(one, (torch.dtype, Tensor)) for one in call.args[1:]):
        return None
    before = whole_shape(call.args[0])
    probe = torch.empty(before, device="meta")
    after = tuple(call.function(probe, *call.args[1:], **call.kwargs).shape)
    outer = prod(before[: cut.dim])
    for dim, extent in enumerate(after):
        if prod(after[:dim]) == outer and extent > 1:
            return None if extent % cut.line.size else (after, Cut(dim, extent, cut.line))
    return None


def cat_dim(call: Call) -> int | None:
    """The dim along which ``cat`` joins shares of that very dim, each of its tensors being cut so; else None."""
    tensors: Sequence[Tensor] = call.args[0] if call.args else call.kwargs["tensors"]
    dims = len(whole_shape(tensors[0]))
    dim: int = (call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)) % dims
    return dim if all([cut.dim for cut in cuts_of(one)] == [dim] for one in tensors) else None


def joined(call: Call) -> Any:
    """``cat``: along the channels, ranks swap what they hold so that each has its share of all of them."""
    dim = cat_dim(call)
    if dim is None:
        return joining.joined(call)
    tensors: Sequence[Tensor] = call.args[0] if call.args else call.kwargs["tensors"]
    cuts = [cuts_of(one)[0] for one in tensors]
    line, whole = cuts[0].line, sum(cut.extent for cut in cuts)
    pieces, start = list[Tensor](), 0
    for tensor, cut in zip(tensors, cuts, strict=True):
        wanted = [_within(rows, start, cut.extent) for rows in shares_of(whole, line)]
        with shares_only():
            pieces.append(recut(tensor, dim, shares_of(cut.extent, line), wanted, line))
        start += cut.extent
    with shares_only():
        return cut_like(torch.cat(pieces, dim), (Cut(dim, whole, line),), call.rules)


def _within(rows: Range, start: int, extent: int) -> Range:
    """Rows of all, as rows of a tensor that begins at ``start`` and has ``extent``; none are (0, 0)."""
    first, last = max(rows[0] - start, 0), min(rows[1] - start, extent)
    return (first, last) if first < last else (0, 0)


_POOLS = ("max_pool", "avg_pool", "lp_pool", "adaptive_max_pool", "adaptive_avg_pool")
_INDICES = ("max_pool", "adaptive_max_pool")

CATS = ("cat", "concat", "concatenate")
"""Names of ``cat``."""

HANDLERS: Mapping[str, Handler] = {
    **{f"{pool}{n}d": partial(by_channel, sides=n) for pool in _POOLS for n in (1, 2, 3)},
    **{f"{pool}{n}d_with_indices": partial(by_channel, sides=n) for pool in _INDICES for n in (1, 2, 3)},
    **{name: partial(by_channel, sides=None) for name in ("interpolate", "upsample")},
    **dict.fromkeys(("view", "reshape", "flatten"), reshaped),
    **dict.fromkeys(CATS, joined),
}
