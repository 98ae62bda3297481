"""A mixture of experts: router, top-k, dispatch, experts, weighted sum; shared experts beside them.

Follows Mixtral (Jiang et al. 2024) with grouped matmuls: every token is copied to its k experts, so the experts keep k
times what one MLP of their width would. FLOPs count the k experts a token visits, parameters count all. Shared experts
(DeepSeekMoE, Dai et al. 2024) are one MLP that every token visits.
"""

from __future__ import annotations

from dataclasses import replace

from galvatron_lite.model.graph import Operator, OperatorClass
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.attention import view
from galvatron_lite.model.shapes.calls import Division, ShapeCall, Value
from galvatron_lite.model.shapes.fields import MoeShape
from galvatron_lite.model.shapes.tape import Tape, memory_operator, narrow, sharding_of, widen

_TOP_K = 4
"""Kernels of top-k, its normalisation and the counting of rows an expert."""
_PERMUTE = 3
"""Kernels of sorting rows by expert and copying them."""


def experts(tape: Tape, shape: MoeShape, x: Value) -> Value:
    """The mixture's output for ``x`` (tokens, hidden).

    Router logits are split neither by columns nor by rows. Keeps the router's input, the fp32 probabilities, the chosen
    indices and weights, and what each expert keeps.
    """
    logits = ops.linear(tape, "router", x, shape.hidden, shape.n_experts, Division.WHOLE, bias=False)
    weights = _choose(tape, shape, logits)
    copies = _dispatch(tape, shape, x)
    inner = _activated(tape, shape, copies)
    down = _grouped(tape, shape, "mlp.experts.down", inner, (shape.moe_ffn, shape.hidden), Division.SEQUENCE)
    weighted = tape.value(down.items, down.part)
    tape.record(
        ShapeCall((down, weights), weighted, saved=(down, weights), fusible=True),
        memory_operator("mlp.weight", weighted, 2 * down.bytes + weights.bytes, 3 * down.bytes),
    )
    combined = tape.value(x.items, weighted.part)
    moved = weighted.bytes + combined.bytes
    operator = memory_operator("combine", combined, moved, moved, count=_PERMUTE)
    return narrow(tape.record(ShapeCall((weighted,), combined), operator))


def _dispatch(tape: Tape, shape: MoeShape, x: Value) -> Value:
    """Tokens copied to the experts they visit, sorted by expert."""
    items = round(x.items * shape.moe_topk * shape.capacity)
    copies = tape.value(items, _part(tape))
    tape.dispatched_bytes += copies.bytes
    tape.unique_copies = shape.moe_topk if tape.kernels.unique_dispatch else 0
    moved = x.bytes + copies.bytes
    operator = memory_operator("dispatch", copies, moved, moved, count=_PERMUTE)
    return tape.record(ShapeCall((x if tape.kernels.folded_experts else widen(x),), copies), operator)


def _part(tape: Tape) -> Division:
    """How the tokens on their way through the experts lie on a tensor group."""
    return Division.TENSOR if tape.kernels.folded_experts else Division.WHOLE


def _activated(tape: Tape, shape: MoeShape, x: Value) -> Value:
    """What the down projections take: one activated projection, or a gated pair."""
    hidden, ffn = shape.hidden, shape.moe_ffn
    relu = shape.activation == "relu"
    if not shape.gated_mlp:
        up = _grouped(tape, shape, "mlp.experts.up", x, (hidden, ffn), Division.TENSOR)
        return ops.activation(tape, "mlp.act", up, keeps_output=relu)
    if tape.kernels.merged_projections:
        both = _grouped(tape, shape, "mlp.experts.gate_up", x, (hidden, 2 * ffn), Division.TENSOR)
        gate = up = view(both, both.items // 2)
    else:
        gate = _grouped(tape, shape, "mlp.experts.gate", x, (hidden, ffn), Division.TENSOR)
        up = _grouped(tape, shape, "mlp.experts.up", x, (hidden, ffn), Division.TENSOR)
    return ops.gated(tape, gate, up, keeps_output=relu)


def _choose(tape: Tape, shape: MoeShape, logits: Value) -> Value:
    """Softmax in fp32 (keeps its output), top-k (keeps indices), weights that add up to one (keeps them)."""
    tokens = logits.items // shape.n_experts
    probabilities = tape.value(logits.items, logits.part, ops.FP32)
    operator = memory_operator("router.softmax", probabilities, 2 * probabilities.bytes, 3 * probabilities.bytes)
    tape.record(ShapeCall((logits,), probabilities, saved=(probabilities,)), operator)
    chosen = tape.value(tokens * shape.moe_topk, logits.part, ops.FP32)
    indices = tape.value(chosen.items, logits.part, ops.INDEX, grad=False)
    moved = probabilities.bytes + chosen.bytes + indices.bytes
    operator = memory_operator("router.topk", chosen, moved, moved, count=_TOP_K)
    return tape.record(ShapeCall((probabilities,), chosen, saved=(chosen, indices)), operator)


def _grouped(tape: Tape, shape: MoeShape, name: str, x: Value, extents: tuple[int, int], part: Division) -> Value:
    """One matmul an expert over its share of the rows of ``x`` (rows, inner); tokens spread evenly."""
    inner, columns = extents
    rows, many = x.items // inner, shape.n_experts
    out = tape.value(rows * columns, Division.TENSOR if part is Division.TENSOR else _part(tape))
    flops, weight = 2 * rows * inner * columns, many * inner * columns
    tape.count(weight, Division.TENSOR)
    tape.expert_items += weight
    fp8 = tape.kernels.fp8
    kept = ops.cast_input(tape, name, x, out, weight) if fp8 else x
    moved = x.bytes + out.bytes
    operator = Operator(
        name, OperatorClass.MATMUL, (max(1, rows // many), inner, columns), many, flops, 2 * flops, moved, 2 * moved,
        weight * tape.item_bytes, sharding_of(out if part is Division.TENSOR else x),
        precision=ops.narrow_precision(tape) if fp8 else "",
    )  # fmt: skip
    return tape.record(ShapeCall((x,), out, saved=(replace(kept, part=x.part),), anchor=(out,)), operator)
