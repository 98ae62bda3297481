"""``cat``, ``stack`` and their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from galvatron_lite.parallelism.cuts.alignment import at, brought, first_cuts, moved
from galvatron_lite.parallelism.cuts.calls import handled_by
from galvatron_lite.parallelism.cuts.fallback import on_whole
from galvatron_lite.parallelism.cuts.tensor import (
    Call,
    Cuts,
    CutTensor,
    Handler,
    cut_like,
    cuts_of,
    shares_only,
    whole_shape,
)


def _operands(call: Call) -> tuple[list[Tensor], int]:
    """Tensors and dim."""
    ordered = [*call.args, *(call.kwargs[name] for name in ("tensors", "dim") if name in call.kwargs)]
    return list(ordered[0]), ordered[1] if len(ordered) > 1 else 0


def joined(call: Call) -> Any:
    """``cat``: on shares along a dim that is not cut; plain tensors give their share. Otherwise of whole ones."""
    tensors, dim = _operands(call)
    alike = _alike(tensors)
    if alike is not None and not any(cut.dim == dim % alike.ndim for cut in alike.cuts):
        with shares_only():
            result = call.function(tensors, dim)
        return cut_like(result, alike.cuts, call.rules)
    # empty lists of numbers join with everything
    tensors = [one for one in tensors if whole_shape(one) != (0,)]
    dims = len(whole_shape(tensors[0]))
    cuts = first_cuts(map(cuts_of, tensors))
    if at(cuts, dim % dims) is not None or not _match(tensors, cuts):
        return on_whole(call)
    with shares_only():
        result = call.function([brought(one, cuts, dims) for one in tensors], dim)
    return cut_like(result, cuts, call.rules)


def stacked(call: Call) -> Any:
    """``stack``: a new dim."""
    tensors, dim = _operands(call)
    dims = len(whole_shape(tensors[0]))
    cuts = first_cuts(map(cuts_of, tensors))
    if not _match(tensors, cuts):
        return on_whole(call)
    with shares_only():
        result = call.function([brought(one, cuts, dims) for one in tensors], dim)
    home = dim % (dims + 1)
    return cut_like(result, tuple(moved(cut, cut.dim + (cut.dim >= home)) for cut in cuts), call.rules)


def _alike(tensors: Sequence[Tensor]) -> CutTensor | None:
    """The first, if all are cut as it is; None otherwise."""
    first = tensors[0]
    if not isinstance(first, CutTensor):
        return None
    return first if all(isinstance(one, CutTensor) and one.cuts == first.cuts for one in tensors) else None


def _match(tensors: Sequence[Tensor], cuts: Cuts) -> bool:
    """Whether all have the extents of the cuts."""
    return all(whole_shape(one)[cut.dim : cut.dim + 1] == (cut.extent,) for one in tensors for cut in cuts)


HANDLERS: Mapping[str, Handler] = {**handled_by(joined, "cat concat concatenate"), "stack": stacked}
