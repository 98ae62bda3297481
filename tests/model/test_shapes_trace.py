"""Closed forms against the captured graphs of the reference models."""

from itertools import product

import pytest
import torch

from galvatron_lite.capture.trace import trace
from galvatron_lite.model import zoo
from galvatron_lite.model.graph import LayerKind, ModelGraph, OperatorClass, Recompute, Role
from galvatron_lite.model.shapes import DecoderShape, build_graph

TOKENS, VOCAB = 24, 97
SIZES = {"vocab": VOCAB, "layers": 3, "hidden": 32, "heads": 4, "sequence": TOKENS}
SHAPES = {
    "gpt-tiny": DecoderShape(layers=3, hidden=32, heads=4, vocab=VOCAB, seq_len=TOKENS),
    "llama-tiny": DecoderShape(
        layers=3, hidden=32, heads=4, kv_heads=2, ffn_hidden=88, gated_mlp=True, activation="silu", norm="rmsnorm",
        biases=False, positions="rotary", vocab=VOCAB, tied_embeddings=False, seq_len=TOKENS,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(product(SHAPES, ["fp32", "bf16"])), ids="-".join)
def graphs(request: pytest.FixtureRequest) -> tuple[ModelGraph, ModelGraph]:
    """The captured graph and the closed form of one reference model."""
    name, precision = request.param
    fields = SIZES | ({"kv_heads": 2, "ffn_hidden": 88} if name == "llama-tiny" else {})
    batch = {field: torch.zeros(2, TOKENS, dtype=torch.long) for field in ("tokens", "labels")}
    traced = trace(zoo.build(name, **fields), batch, precision=precision)
    return traced, build_graph(SHAPES[name], precision=precision)


def by_class(kind: LayerKind, backward: bool) -> dict[OperatorClass, int]:
    sums = dict.fromkeys(OperatorClass, 0)
    for operator in kind.operators:
        sums[operator.kind] += operator.backward_flops if backward else operator.flops
    return sums


def test_layers_and_parameters_are_equal(graphs: tuple[ModelGraph, ModelGraph]) -> None:
    traced, built = graphs
    assert [layer.kind for layer in traced.layers] == [layer.kind for layer in built.layers]
    assert traced.sequence == built.sequence
    assert traced.ties == built.ties
    for key, kind in traced.kinds.items():
        assert kind.parameters.total == built.kinds[key].parameters.total
        assert kind.dims == built.kinds[key].dims


def test_flops_are_equal_by_class(graphs: tuple[ModelGraph, ModelGraph]) -> None:
    traced, built = graphs
    for (key, kind), backward in product(traced.kinds.items(), (False, True)):
        assert by_class(kind, backward) == by_class(built.kinds[key], backward), key


def test_tensor_parallelism_divides_them_equally(graphs: tuple[ModelGraph, ModelGraph]) -> None:
    """The captured graph ran one device's share; the closed form says how each part is divided."""
    traced, built = graphs
    for key, kind in traced.kinds.items():
        other = built.kinds[key]
        assert other.parameters == kind.parameters, key
        assert {choice: other.kept[choice] for choice in kind.kept} == kind.kept, key
        assert key != "block" or set(other.kept) == set(Recompute)
        for figure in ("tensor_degrees", "tensor_collectives", "sequence_parallel", "gathered_output_bytes"):
            assert getattr(other, figure) == getattr(kind, figure), (key, figure)


def test_working_bytes_of_a_share_are_an_upper_bound(graphs: tuple[ModelGraph, ModelGraph]) -> None:
    block, built = (graph.kinds["block"] for graph in graphs)
    kept = block.kept[Recompute.NONE]
    for degree, shared in product((1, 2), (False, True)):
        for figure in ("working", "forward_working"):
            real, bound = (
                getattr(kind, figure).at(degree, shared) + kept.at(degree, shared) for kind in (block, built)
            )
            assert real <= bound <= 1.05 * real, (degree, shared, figure)


def test_working_bytes_of_a_block_are_equal(graphs: tuple[ModelGraph, ModelGraph]) -> None:
    block, built = (graph.kinds["block"] for graph in graphs)
    assert built.working.total == block.working.total
    assert built.forward_working.total == block.forward_working.total


def test_working_bytes_of_the_head_are_close(graphs: tuple[ModelGraph, ModelGraph]) -> None:
    """Apart from the labels, which belong to the batch."""
    head, built = (graph.kinds["after"] for graph in graphs)
    assert built.working.total == pytest.approx(head.working.total, abs=8 * TOKENS)
    assert built.forward_working.total == pytest.approx(head.forward_working.total, abs=8 * TOKENS)


def test_moved_bytes_are_close(graphs: tuple[ModelGraph, ModelGraph]) -> None:
    traced, built = graphs
    for key in ("block", "after"):
        for figure in ("moved", "backward_moved"):
            sums = [sum(getattr(part, figure) for part in graph.kinds[key].operators) for graph in (built, traced)]
            assert sums[0] == pytest.approx(sums[1], rel=0.02), (key, figure)


def test_boundaries_of_blocks_are_equal(graphs: tuple[ModelGraph, ModelGraph]) -> None:
    traced, built = graphs
    blocks = [layer for layer in traced.layers if layer.role is Role.BLOCK]
    assert len(blocks) == 3
    for figure in ("input_bytes", "output_bytes"):
        assert getattr(traced.kinds["block"], figure) == getattr(built.kinds["block"], figure)
