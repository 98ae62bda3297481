"""Rules of functions on tensors that are sharded by tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from galvatron_lite.parallelism.context.attention import AttentionExchange, attention, by_ring, by_ulysses
from galvatron_lite.parallelism.sharded.calls import align, argument, first_specs, input_first, on_full, spec_at
from galvatron_lite.parallelism.sharded.rules import COMMON
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    Rules,
    ShardedTensor,
    global_shape,
    locals_only,
    specs_of,
    to_local,
    wrap_locals,
)
from galvatron_lite.parallelism.spatial import norms
from galvatron_lite.parallelism.strategy import Strategy


def _embedding(call: Call) -> Any:
    """``embedding``: local, unless gradients depend on how often an id occurs."""
    ids, table, counts = (
        argument(call, 0, "input"),
        argument(call, 1, "weight"),
        argument(call, 5, "scale_grad_by_freq"),
    )
    if not isinstance(ids, ShardedTensor) or specs_of(table) or counts:
        return on_full(call)
    with locals_only():
        options = {name: value for name, value in call.kwargs.items() if name not in ("input", "weight")}
        return wrap_locals(call.function(to_local(ids), table, *call.args[2:], **options), ids.specs, call.rules)


def _addmm(call: Call) -> Any:
    """``addmm(bias, rows, weight)``: local for each row."""
    call = input_first(call)
    bias, rows, weight = call.args[0], argument(call, 1, "mat1"), argument(call, 2, "mat2")
    replicated = not specs_of(bias) and not specs_of(weight) and bias.dim() == 1
    if not replicated or not isinstance(rows, ShardedTensor) or any(cut.dim for cut in rows.specs):
        return on_full(call)
    with locals_only():
        return wrap_locals(call.function(*call.args, **call.kwargs), rows.specs, call.rules)


def _gather(call: Call) -> Any:
    """``gather(x, dim, index)``: the result is sharded like the index, or else like the tensor."""
    call = input_first(call)
    tensor, dim, index = call.args[0], argument(call, 1, "dim"), argument(call, 2, "index")
    dims = len(global_shape(tensor))
    place = dim % dims
    cuts = first_specs([specs_of(index), specs_of(tensor)])
    unlike = any(global_shape(tensor)[cut.dim] != global_shape(index)[cut.dim] for cut in cuts if cut.dim != place)
    if unlike or spec_at(specs_of(tensor), place) is not None:
        return on_full(call)
    with locals_only():
        aligned = align(tensor, tuple(cut for cut in cuts if cut.dim != place), dims)
        # autograd must save plain tensors, as recomputation compares their shapes
        return wrap_locals(call.function(aligned, dim, to_local(align(index, cuts, dims))), cuts, call.rules)


HANDLERS: Mapping[str, Handler] = {
    **COMMON,
    "layer_norm": norms.HANDLERS["layer_norm"],
    "rms_norm": norms.HANDLERS["rms_norm"],
    "embedding": _embedding,
    "addmm": _addmm,
    "gather": _gather,
}


def _rules(exchange: AttentionExchange) -> Rules:
    handlers = {**HANDLERS, "scaled_dot_product_attention": attention(exchange)}
    return Rules(handlers, on_full, ("context",), "sequence")


RING_RULES, ULYSSES_RULES = _rules(by_ring), _rules(by_ulysses)


def rules_of(strategy: Strategy) -> Rules:
    """Return the rules of a layer whose ranks share tokens."""
    return ULYSSES_RULES if strategy.ulysses else RING_RULES
