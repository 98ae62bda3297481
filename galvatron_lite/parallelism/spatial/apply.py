"""Makes a module work on its share of pictures: its forward runs on cut tensors, its hooks see plain ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from galvatron_lite.model.batch import map_places, places
from galvatron_lite.parallelism.cuts.functions import enter, gathered_along, leave
from galvatron_lite.parallelism.cuts.line import Line
from galvatron_lite.parallelism.cuts.tensor import (
    Cuts,
    Rules,
    cut_like,
    cut_tensor,
    cuts_of,
    local_of,
    shares_only,
    uncut,
)

CUTS = "galvatron_cuts"
"""Name of the argument that tells a split module how its other arguments are cut."""


class CutsAt:
    """How tensors of a nest are cut, by place (see ``map_places``); those that are whole are left out.

    No dataclass or mapping: ZeRO's hooks rebuild those with tensors in another precision; lines are known by identity.
    """

    def __init__(self, places: Mapping[str, Cuts]) -> None:
        self.places = places


def split_pixels(module: nn.Module, lines: Sequence[Line], rules: Rules) -> None:
    """Make a module work on shares of pictures, in place.

    Its forward then takes plain tensors, this rank's shares, and by the name ``CUTS`` how they are cut; it returns what
    it returned before as plain tensors, and how those are cut: (output, ``CutsAt``). So hooks, ZeRO and recomputation
    see plain tensors, and what recomputation runs again is told the same.

    What is whole has a complete gradient outside, on every rank, and a part of it inside (see ``cuts.tensor``).

    Args:
        module: any; its parameters stay whole.
        lines: ranks that share pictures in it.
        rules: what functions do inside.
    """
    module.forward = _on_shares(module.forward, tuple(lines), rules)


def _on_shares(forward: Callable[..., Any], lines: Sequence[Line], rules: Rules) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, CutsAt]:
        given: Mapping[str, Cuts] = kwargs.pop(CUTS).places if CUTS in kwargs else {}

        def inside(place: str, tensor: Tensor) -> Tensor:
            return entering(tensor, given.get(place, ()), lines, rules)

        args, kwargs = map_places((args, kwargs), inside)
        return _plain(forward(*args, **kwargs), lines)

    return run


def _plain(output: Any, lines: Sequence[Line]) -> tuple[Any, CutsAt]:
    """What a module returned, as plain tensors, and how they are cut.

    The tensors themselves are made plain again, with no view between: code behind the module may change what it is
    given in place, and autograd would then forget hooks on a view, those of ZeRO among them.
    """
    output = map_places(output, lambda _, tensor: settled(tensor, lines))
    cuts = {place: known for place, tensor in places(output) if (known := cuts_of(tensor))}

    def outside(place: str, tensor: Tensor) -> Tensor:
        plain = uncut(tensor) if place in cuts else tensor
        return leave(plain, _across(cuts.get(place, ()), lines)) if plain.requires_grad else plain

    return map_places(output, outside), CutsAt(cuts)


def entering(tensor: Tensor, cuts: Cuts, lines: Iterable[Line], rules: Rules) -> Tensor:
    """A plain tensor as code sees it whose gradients are parts on the ranks of lines along which it is not cut."""
    if tensor.requires_grad:
        tensor = enter(tensor, _across(cuts, lines))
    # an alias: whoever holds the tensor keeps a plain one
    return cut_tensor(tensor.view_as(tensor), cuts, rules) if cuts else tensor


def settled(tensor: Tensor, lines: Sequence[Line]) -> Tensor:
    """A tensor of such code, whole along dims that are cut in a way of their own (see ``cuts.laying``)."""
    strange = [cut for cut in cuts_of(tensor) if not any(cut.line is line for line in lines)]
    if not strange:
        return tensor
    kept = tuple(cut for cut in cuts_of(tensor) if cut not in strange)
    with shares_only():
        return cut_like(gathered_along(tensor, strange), kept, tensor.rules)  # type: ignore[attr-defined, no-any-return]


def leaving(tensor: Tensor, lines: Sequence[Line]) -> Tensor:
    """A tensor of such code as a plain one whose gradient is complete on every rank that holds the same."""
    tensor = settled(tensor, lines)
    plain = local_of(tensor)
    return leave(plain, _across(cuts_of(tensor), lines)) if plain.requires_grad else plain


def _across(cuts: Cuts, lines: Iterable[Line]) -> list[Line]:
    along = {id(cut.line) for cut in cuts}
    return [line for line in lines if id(line) not in along]
