"""What functions do with tensors whose tokens are shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from galvatron_lite.parallelism.context.attention import Way, attention, by_ring, by_ulysses
from galvatron_lite.parallelism.cuts.alignment import at, brought, first_cuts
from galvatron_lite.parallelism.cuts.calls import argument, fronted
from galvatron_lite.parallelism.cuts.fallback import on_whole
from galvatron_lite.parallelism.cuts.shared import SHARED
from galvatron_lite.parallelism.cuts.tensor import (
    Call,
    CutTensor,
    Handler,
    Rules,
    cut_like,
    cuts_of,
    local_of,
    shares_only,
    whole_shape,
)
from galvatron_lite.parallelism.spatial import norms
from galvatron_lite.parallelism.strategy import Strategy


def _embedding(call: Call) -> Any:
    """``embedding``: each id by itself."""
    ids, table = argument(call, 0, "input"), argument(call, 1, "weight")
    if not isinstance(ids, CutTensor) or cuts_of(table):
        return on_whole(call)
    with shares_only():
        given = {name: one for name, one in call.kwargs.items() if name not in ("input", "weight")}
        return cut_like(call.function(local_of(ids), table, *call.args[2:], **given), ids.cuts, call.rules)


def _addmm(call: Call) -> Any:
    """``addmm(bias, rows, weight)``: each row by itself."""
    call = fronted(call)
    bias, rows, weight = call.args[0], argument(call, 1, "mat1"), argument(call, 2, "mat2")
    whole = not cuts_of(bias) and not cuts_of(weight) and bias.dim() == 1
    if not whole or not isinstance(rows, CutTensor) or any(cut.dim for cut in rows.cuts):
        return on_whole(call)
    with shares_only():
        return cut_like(call.function(*call.args, **call.kwargs), rows.cuts, call.rules)


def _gather(call: Call) -> Any:
    """``gather(x, dim, index)``: the result is cut as the index is, or else as the tensor."""
    call = fronted(call)
    tensor, dim, index = call.args[0], argument(call, 1, "dim"), argument(call, 2, "index")
    dims = len(whole_shape(tensor))
    place = dim % dims
    cuts = first_cuts([cuts_of(index), cuts_of(tensor)])
    unlike = any(whole_shape(tensor)[one.dim] != whole_shape(index)[one.dim] for one in cuts if one.dim != place)
    if unlike or at(cuts_of(tensor), place) is not None:
        return on_whole(call)
    with shares_only():
        own = brought(tensor, tuple(one for one in cuts if one.dim != place), dims)
        # what is saved for backward must be plain: recomputation compares its shape
        return cut_like(call.function(own, dim, local_of(brought(index, cuts, dims))), cuts, call.rules)


HANDLERS: Mapping[str, Handler] = {
    **SHARED,
    "layer_norm": norms.HANDLERS["layer_norm"],
    "rms_norm": norms.HANDLERS["rms_norm"],
    "embedding": _embedding,
    "addmm": _addmm,
    "gather": _gather,
}


def _rules(way: Way) -> Rules:
    handlers = {**HANDLERS, "scaled_dot_product_attention": attention(way)}
    return Rules(handlers, on_whole, ("context",), "sequence")


RING_RULES, ULYSSES_RULES = _rules(by_ring), _rules(by_ulysses)


def rules_of(strategy: Strategy) -> Rules:
    """Of a layer that shares tokens."""
    return ULYSSES_RULES if strategy.ulysses else RING_RULES
