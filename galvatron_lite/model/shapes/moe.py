"""A mixture of experts: router, top-k, dispatch, gated experts, weighted sum.

Follows Mixtral (Jiang et al. 2024) with grouped matmuls: every token is copied to its k experts, so the experts keep k
times what one MLP of their width would. FLOPs count the k experts a token visits, parameters count all.
"""

from __future__ import annotations

from galvatron_lite.model.graph import Operator, OperatorClass
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.calls import Call, Part, Value
from galvatron_lite.model.shapes.fields import MoeShape
from galvatron_lite.model.shapes.tape import Tape, memory_operator, narrow, sharding_of, widen


def experts(tape: Tape, shape: MoeShape, x: Value) -> Value:
    """The mixture's output for ``x`` (tokens, hidden).

    Router logits are split neither by columns nor by rows. Keeps the router's input, the fp32 probabilities, the chosen
    indices and weights, and what each expert keeps.
    """
    logits = ops.linear(tape, "router", x, shape.hidden, shape.n_experts, Part.WHOLE, bias=False)
    weights = _choose(tape, shape, logits)
    tokens = x.items // shape.hidden
    copies = ops.reshape(tape, "dispatch", widen(x), tokens * shape.moe_topk * shape.hidden)
    gate = _grouped(tape, shape, "mlp.gate", copies, shape.hidden, shape.moe_ffn, Part.TENSOR)
    gate = ops.activation(tape, "mlp.act", gate, keeps_output=shape.activation == "relu")
    up = _grouped(tape, shape, "mlp.up", copies, shape.hidden, shape.moe_ffn, Part.TENSOR)
    inner = ops.multiply(tape, "mlp.product", gate, up)
    down = _grouped(tape, shape, "mlp.down", inner, shape.moe_ffn, shape.hidden, Part.SEQUENCE)
    weighted = tape.value(down.items, down.part)
    tape.record(
        Call((down, weights), weighted, saved=(down, weights)),
        memory_operator("mlp.weight", weighted, 2 * down.bytes + weights.bytes, 3 * down.bytes),
    )
    combined = narrow(ops.reshape(tape, "combine", weighted, x.items))
    return ops.dropout(tape, "mlp.dropout", combined, shape.dropout)


def _choose(tape: Tape, shape: MoeShape, logits: Value) -> Value:
    """Softmax in fp32 (keeps its output), top-k (keeps indices), weights that add up to one (keeps them)."""
    tokens = logits.items // shape.n_experts
    probabilities = tape.value(logits.items, logits.part, ops.FP32)
    operator = memory_operator("router.softmax", probabilities, 2 * probabilities.bytes, 3 * probabilities.bytes)
    tape.record(Call((logits,), probabilities, saved=(probabilities,)), operator)
    chosen = tape.value(tokens * shape.moe_topk, logits.part, ops.FP32)
    indices = tape.value(chosen.items, logits.part, ops.INDEX, grad=False)
    moved = probabilities.bytes + chosen.bytes + indices.bytes
    operator = memory_operator("router.topk", chosen, moved, moved)
    return tape.record(Call((probabilities,), chosen, saved=(chosen, indices)), operator)


def _grouped(tape: Tape, shape: MoeShape, name: str, x: Value, inner: int, columns: int, part: Part) -> Value:
    """One matmul an expert over its share of the rows of ``x`` (rows, inner); tokens spread evenly."""
    rows, many = x.items // inner, shape.n_experts
    out = tape.value(rows * columns, Part.TENSOR if part is Part.TENSOR else Part.WHOLE)
    flops, weight = 2 * rows * inner * columns, many * inner * columns
    tape.own(weight, Part.TENSOR)
    moved = x.bytes + out.bytes
    operator = Operator(
        name, OperatorClass.MATMUL, (max(1, rows // many), inner, columns), many, flops, 2 * flops, moved, 2 * moved,
        weight * tape.item_bytes, sharding_of(out if part is Part.TENSOR else x),
    )  # fmt: skip
    return tape.record(Call((x,), out, saved=(x,), anchor=(out,)), operator)
