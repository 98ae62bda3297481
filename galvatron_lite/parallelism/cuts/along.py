"""Functions that work along some dims and leave the others alone: softmax, sort, split, flip and their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from galvatron_lite.parallelism.cuts.alignment import at, brought, common_cuts, moved
from galvatron_lite.parallelism.cuts.calls import argument, fronted, handled_by
from galvatron_lite.parallelism.cuts.fallback import on_whole, refuse_writing, warn_gathered
from galvatron_lite.parallelism.cuts.functions import gathered_along
from galvatron_lite.parallelism.cuts.tensor import Call, Cuts, CutTensor, Handler, cut_like, shares_only


def listed(dims: Any, count: int) -> tuple[int, ...]:
    """Dims as they were given (one, several, None: all), counted from the front."""
    if dims is None:
        return tuple(range(count))
    several = dims if isinstance(dims, (tuple, list)) else (dims,)
    return tuple(dim % count for dim in several)


def without(cuts: Cuts, dims: Sequence[int]) -> Cuts:
    """The cuts of a tensor that has lost dims, which were not cut."""
    return tuple(moved(cut, cut.dim - sum(dim < cut.dim for dim in dims)) for cut in cuts)


def along(position: int, default: Any = None, name: str = "dim", drops: bool = False, keeps: bool = False) -> Handler:
    """A handler of functions of one tensor that work along dims; along cut ones the tensor is gathered first.

    Args:
        position: of the dims among the arguments.
        default: what they are where they are not given; None: all.
        name: of the argument.
        drops: whether the result lacks them.
        keeps: whether it has them nevertheless where ``keepdim``, the next argument, is given.
    """

    def handler(call: Call) -> Any:
        call = fronted(call)
        tensor = call.args[0]
        if not isinstance(tensor, CutTensor) or any(isinstance(one, CutTensor) for one in call.args[1:]):
            return on_whole(call)
        with shares_only():
            dims = listed(argument(call, position, name, default), tensor.dim())
        cuts = tuple(cut for cut in tensor.cuts if cut.dim not in dims)
        if len(cuts) < len(tensor.cuts):
            refuse_writing(call)
            warn_gathered(call, tensor)
        with shares_only():
            local = gathered_along(tensor, [cut for cut in tensor.cuts if cut.dim in dims])
            result = _apart(call.function(local, *call.args[1:], **call.kwargs))
        if drops and not (keeps and argument(call, position + 1, "keepdim", False)):
            cuts = without(cuts, dims)
        return cut_like(result, cuts, call.rules)

    return handler


def _apart(result: Any) -> Any:
    """The places among what ``topk`` and the like return as tensors of their own: autograd keeps the very tensors that
    it made, and recomputation compares their shapes."""
    if not isinstance(result, tuple):
        return result
    return tuple(one if one.is_floating_point() else one.view_as(one) for one in result)


_FLIP = along(1, name="dims")


def _flip(call: Call) -> Any:
    """``flip(x, dims)`` and ``x.flip(2, 3)``."""
    call = fronted(call)
    return _FLIP(call._replace(args=(call.args[0], call.args[1:])) if len(call.args) > 2 else call)


def _similar(call: Call) -> Any:
    """``cosine_similarity``: two tensors that are broadcast, along a dim that the result lacks."""
    call = fronted(call)
    both, dim = [call.args[0], argument(call, 1, "x2")], argument(call, 2, "dim", 1)
    with shares_only():
        dims, cuts = max(one.dim() for one in both), common_cuts(both)
        if at(cuts, dim % dims) is None:
            shares = [brought(one, cuts, dims) for one in both]
            result = call.function(*shares, dim, argument(call, 3, "eps", 1e-8))
            return cut_like(result, without(cuts, [dim % dims]), call.rules)
    return on_whole(call)


HANDLERS: Mapping[str, Handler] = {
    **handled_by(along(1), "softmax log_softmax softmin logcumsumexp cumsum cumprod cummax cummin cumsum_"),
    **handled_by(along(1, -1), "sort argsort glu"),
    **handled_by(along(1, drops=True, keeps=True), "argmax argmin prod nansum nanmean median nanmedian"),
    **handled_by(along(1, -1, drops=True, keeps=True), "mode logsumexp"),
    **handled_by(along(2, -1), "topk"),
    **handled_by(along(2, -1, drops=True, keeps=True), "kthvalue"),
    **handled_by(along(2, 0), "split chunk tensor_split split_with_sizes unsafe_chunk unsafe_split"),
    **handled_by(along(1, 0), "index_select"),
    **handled_by(along(2), "repeat_interleave"),
    **handled_by(along(2, name="dims"), "roll"),
    **handled_by(along(2, 1), "normalize"),
    **handled_by(along(2, -1), "renorm"),
    **handled_by(along(2, 1), "channel_shuffle native_channel_shuffle"),
    "flip": _flip,
    "cosine_similarity": _similar,
    "unbind": along(1, 0, drops=True),
}
