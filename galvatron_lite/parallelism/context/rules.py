"""What functions do with tensors whose tokens are shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.parallelism.context.attention import attention, by_ring, by_ulysses
from galvatron_lite.parallelism.cuts.calls import argument, fronted
from galvatron_lite.parallelism.cuts.fallback import on_whole
from galvatron_lite.parallelism.cuts.shared import SHARED
from galvatron_lite.parallelism.cuts.tensor import Call, CutTensor, Handler, Rules, cut_like, cuts_of, shares_only
from galvatron_lite.parallelism.spatial import norms


def _embedding(call: Call) -> Any:
    """``embedding``: each id by itself."""
    ids, table = argument(call, 0, "input"), argument(call, 1, "weight")
    if not isinstance(ids, CutTensor) or cuts_of(table):
        return on_whole(call)
    with shares_only():
        return cut_like(call.function(*call.args, **call.kwargs), ids.cuts, call.rules)


def _addmm(call: Call) -> Any:
    """``addmm(bias, rows, weight)``: each row by itself."""
    call = fronted(call)
    bias, rows, weight = call.args[0], argument(call, 1, "mat1"), argument(call, 2, "mat2")
    whole = not cuts_of(bias) and not cuts_of(weight) and bias.dim() == 1
    if not whole or not isinstance(rows, CutTensor) or any(cut.dim for cut in rows.cuts):
        return on_whole(call)
    with shares_only():
        return cut_like(call.function(*call.args, **call.kwargs), rows.cuts, call.rules)


HANDLERS: Mapping[str, Handler] = {
    **SHARED,
    "layer_norm": norms.HANDLERS["layer_norm"],
    "rms_norm": norms.HANDLERS["rms_norm"],
    "embedding": _embedding,
    "addmm": _addmm,
}
RING_RULES = Rules({**HANDLERS, "scaled_dot_product_attention": attention(by_ring)}, on_whole, ("context",))
ULYSSES_RULES = Rules({**HANDLERS, "scaled_dot_product_attention": attention(by_ulysses)}, on_whole, ("context",))


def rules_of(strategy: Strategy) -> Rules:
    """Of a layer that shares tokens."""
    return ULYSSES_RULES if strategy.ulysses else RING_RULES
