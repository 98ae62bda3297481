"""Functions that change the shape and keep the items: where cut dims go, and what gathers them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.parallelism.cuts.alignment import moved
from galvatron_lite.parallelism.cuts.calls import fronted, handled_by
from galvatron_lite.parallelism.cuts.fallback import on_whole, warn_gathered
from galvatron_lite.parallelism.cuts.functions import gathered_along
from galvatron_lite.parallelism.cuts.homes import Shape, cuts_after, home_of, reshaped_share
from galvatron_lite.parallelism.cuts.tensor import Call, Cuts, CutTensor, Handler, cut_like, shares_only, whole_shape


@functools.lru_cache(4096)
def _order(function: Callable[..., Tensor], dims: int, args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> Shape:
    """Which dim becomes each dim of what a function returns that permutes them."""
    probe = torch.empty_strided((1,) * dims, tuple(range(dims)), device="meta")
    return tuple(function(probe, *args, **dict(kwargs)).stride())


@functools.lru_cache(4096)
def _shape_after(
    function: Callable[..., Tensor], shape: Shape, args: tuple[Any, ...], kwargs: tuple[Any, ...]
) -> Shape:
    """The shape that a function makes of a tensor of some shape."""
    return tuple(function(torch.empty(shape, device="meta"), *args, **dict(kwargs)).shape)


def _key(call: Call) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments behind the tensor, as keys of a table."""
    args = tuple(tuple(one) if isinstance(one, list) else one for one in call.args[1:])
    return args, tuple((name, tuple(one) if isinstance(one, list) else one) for name, one in call.kwargs.items())


def permuted(call: Call) -> Any:
    """``permute``, ``transpose`` and their kind."""
    call = fronted(call)
    tensor = call.args[0]
    with shares_only():
        order = _order(call.function, tensor.dim(), *_key(call))
        result = call.function(*call.args, **call.kwargs)
    cuts = sorted((moved(cut, order.index(cut.dim)) for cut in tensor.cuts), key=lambda cut: cut.dim)
    return cut_like(result, tuple(cuts), call.rules)


def reshaped(call: Call) -> Any:
    """``view``, ``reshape``, ``flatten`` and their kind: cut dims stay cut where they can; others are gathered.

    That is told where more than rows of features remains: at the head of a classifier, nothing else can be meant.
    """
    call = fronted(call)
    tensor = call.args[0]
    if not isinstance(tensor, CutTensor) or any(isinstance(one, (torch.dtype, Tensor)) for one in call.args[1:]):
        return on_whole(call)
    before = whole_shape(tensor)
    with shares_only():
        after = _shape_after(call.function, before, *_key(call))
        homes = [home_of(before, after, cut) for cut in tensor.cuts]
        stays = [home for home in homes if home is not None]
        local = gathered_along(tensor, [cut for cut, home in zip(tensor.cuts, homes, strict=True) if home is None])
        result = reshaped_share(local, after, stays)
    if len(stays) < len(homes) and len(after) > 2:
        warn_gathered(call, tensor)
    return cut_like(result, cuts_after(stays), call.rules)


def _local(shape: Shape, cuts: Cuts) -> list[int]:
    """The shape of the share."""
    local = list(shape)
    for cut in cuts:
        local[cut.dim] = cut.length
    return local


def _as_other(name: str) -> Handler:
    """``view_as`` and ``reshape_as``: the other only tells its shape."""

    def reshape(call: Call) -> Any:
        tensor, other = call.args[:2]
        return getattr(tensor, name)(whole_shape(other))

    return reshape


def widened(call: Call) -> Any:
    """``expand`` and ``repeat``: dims that are cut stay so where they keep their extent."""
    call = fronted(call)
    tensor = call.args[0]
    before = whole_shape(tensor)
    with shares_only():
        after = _shape_after(call.function, before, *_key(call))
        more = len(after) - len(before)
        lost = [cut for cut in tensor.cuts if after[cut.dim + more] != cut.extent]
        cuts = tuple(moved(cut, cut.dim + more) for cut in tensor.cuts if cut not in lost)
        local = gathered_along(tensor, lost)
        if call.name in ("repeat", "tile"):
            result = call.function(local, *call.args[1:], **call.kwargs)
        else:
            result = local.expand(_local(after, cuts))
    return cut_like(result, cuts, call.rules)


HANDLERS: Mapping[str, Handler] = {
    **handled_by(permuted, "permute transpose movedim moveaxis swapaxes swapdims t T mT adjoint H mH"),
    **handled_by(reshaped, "view reshape flatten ravel unflatten squeeze unsqueeze"),
    **handled_by(widened, "expand broadcast_to repeat tile"),
    "view_as": _as_other("view"),
    "reshape_as": _as_other("reshape"),
}
