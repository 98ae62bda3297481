"""Bringing tensors that meet in one function to the same cuts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from galvatron_lite.parallelism.cuts.functions import gather
from galvatron_lite.parallelism.cuts.laying import own_part
from galvatron_lite.parallelism.cuts.line import Line
from galvatron_lite.parallelism.cuts.tensor import Cut, Cuts, cuts_of, whole_shape


def same_line(one: Line, other: Line) -> bool:
    """Whether two lines are the same ranks."""
    return one is other or one == other


def same_cut(one: Cut, other: Cut) -> bool:
    """Whether two dims are cut alike, wherever they stand in their tensors."""
    return one.extent == other.extent and same_line(one.line, other.line)


def at(cuts: Cuts, dim: int) -> Cut | None:
    """The cut of a dim."""
    return next((cut for cut in cuts if cut.dim == dim), None)


def moved(cut: Cut, dim: int) -> Cut:
    """The cut, of another dim."""
    return cut if cut.dim == dim else Cut(dim, cut.extent, cut.line)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that shapes are broadcast to.

    Raises:
        RuntimeError: they cannot be.
    """
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def common_cuts(tensors: Sequence[Tensor]) -> Cuts:
    """How the result of a pointwise function of tensors is cut, which are broadcast from the right.

    Raises:
        RuntimeError: the whole shapes cannot be broadcast.
    """
    shape = broadcast(*map(whole_shape, tensors))
    return first_cuts(
        [[cut for cut in _from_right(one, len(shape)) if cut.extent == shape[cut.dim]] for one in tensors]
    )


def _from_right(tensor: Tensor, dims: int) -> list[Cut]:
    """The cuts, by dims of a result with ``dims`` dims."""
    more = dims - tensor.dim()
    return [moved(cut, cut.dim + more) for cut in cuts_of(tensor)]


def first_cuts(several: Iterable[Iterable[Cut]]) -> Cuts:
    """Of each dim the first cut, unless its line already cuts another dim."""
    found = dict[int, Cut]()
    for cut in chain.from_iterable(several):
        if cut.dim not in found and not any(same_line(cut.line, other.line) for other in found.values()):
            found[cut.dim] = cut
    return tuple(found[dim] for dim in sorted(found))


def brought(tensor: Tensor, cuts: Cuts, dims: int) -> Tensor:
    """What a tensor is to a function whose result of ``dims`` dims is cut so: the share, as a plain tensor.

    Where it is cut otherwise it is gathered; where it is whole this rank takes its share. Extents of 1 are broadcast.
    Call it within ``shares_only``.
    """
    before = dims - tensor.dim()
    own = cuts_of(tensor)
    there = [at(cuts, cut.dim + before) for cut in own]
    for cut, wanted in zip(own, there, strict=True):
        if wanted is None or not same_cut(cut, wanted):
            tensor, own = gather(tensor, cut), tuple(one for one in own if one is not cut)
    for wanted in cuts:
        dim = wanted.dim - before
        if dim >= 0 and at(own, dim) is None and (tensor.shape[dim] != 1 or wanted.extent == 1):
            tensor = own_part(tensor, wanted, dim)
    return tensor
