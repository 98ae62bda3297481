"""Closed forms against the captured graphs of the reference models."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from galvatron_lite import plan
from galvatron_lite.capture.adapters import make_trainable
from galvatron_lite.capture.named import graph_named
from galvatron_lite.capture.trace import trace
from galvatron_lite.cost.step import device_memory
from galvatron_lite.errors import InputError
from galvatron_lite.model import zoo
from galvatron_lite.model.graph import LayerKind, ModelGraph, OperatorClass, Recompute, Role
from galvatron_lite.model.shapes import DecoderShape, build_graph, load_model
from galvatron_lite.model.trainable import Trainable
from galvatron_lite.parallelism.tensor.cost import boundaries
from galvatron_lite.profiler.store import check_trainable

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
    boundaries = [(graph.kinds["block"].input_bytes, graph.kinds["block"].output_bytes) for graph in graphs]
    assert boundaries[0] == boundaries[1]
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


def test_working_bytes_are_equal_in_blocks_and_close_in_heads(graphs: tuple[ModelGraph, ModelGraph]) -> None:
    """Apart from the labels, which belong to the batch."""
    for (key, apart), figure in product((("block", 0), ("after", 8 * TOKENS)), ("working", "forward_working")):
        traced, built = (getattr(graph.kinds[key], figure).total for graph in graphs)
        assert built == pytest.approx(traced, abs=apart), (key, figure)


def test_moved_bytes_are_close(graphs: tuple[ModelGraph, ModelGraph]) -> None:
    for key, figure in product(("block", "after"), ("moved", "backward_moved")):
        traced, built = (sum(getattr(part, figure) for part in graph.kinds[key].operators) for graph in graphs)
        assert built == pytest.approx(traced, rel=0.02), (key, figure)


WAYS = {
    "all linear": ("lora:r=4", (), ()),
    "some linear": ("lora:r=4,targets=q+v", (), ()),
    "lower layers": (None, ("before", "layers.[01]"), ("embed", "blocks.[01]")),
}
"""An option, and frozen names in the closed form and in the module."""


def trained_graphs(name: str, way: str) -> tuple[ModelGraph, ModelGraph]:
    """Captured, and in closed form."""
    option, frozen, modules = WAYS[way]
    with torch.device("meta"):
        fields: dict[str, Any] = SIZES | ({"kv_heads": 2, "ffn_hidden": 88} if name == "llama-tiny" else {})
        model = zoo.build(name, **fields)
    wanted = Trainable.parse(option and option.replace("q+v", "q_proj+v_proj"), modules)
    traced = trace(
        make_trainable(model, wanted), {one: torch.zeros(2, TOKENS, dtype=torch.long) for one in ("tokens", "labels")}
    )
    return traced, build_graph(SHAPES[name], precision="fp32", trainable=Trainable.parse(option, frozen))


def matmuls(kind: LayerKind) -> int:
    return sum(one.flops + one.backward_flops for one in kind.operators if one.kind is OperatorClass.MATMUL)


@pytest.mark.parametrize(("name", "way"), [one for one in product(SHAPES, WAYS) if one != ("gpt-tiny", "lower layers")])
def test_closed_forms_are_what_is_captured(name: str, way: str) -> None:
    traced, built = trained_graphs(name, way)
    assert (built.parameters, built.trainable) == (traced.parameters, traced.trainable)
    for layer, other in zip(traced.layers, built.layers, strict=True):
        own, kind = traced.kind_of(layer), built.kind_of(other)
        assert (kind.parameters.total, kind.frozen.total) == (own.parameters.total, own.frozen.total), layer.name
        assert matmuls(kind) == matmuls(own), layer.name
        assert kind.kept[Recompute.NONE].total == own.kept[Recompute.NONE].total, layer.name
        assert layer.role is not Role.BLOCK or set(boundaries(kind)) == set(boundaries(own)), layer.name


@pytest.mark.parametrize(
    ("option", "trained"),
    [
        # printed by PEFT's print_trainable_parameters for Llama 3 8B: query and value; and all linear layers of blocks
        ("lora:r=16,targets=q+v", 6_815_744),
        ("lora:r=16", 41_943_040),
    ],
)
def test_adapters_are_as_large_as_published(option: str, trained: int) -> None:
    graph = load_model("llama3-8b", trainable=Trainable.parse(option))
    assert (graph.trainable, graph.parameters - trained) == (trained, load_model("llama3-8b").parameters)


def test_adapters_make_plans_quicker_and_smaller() -> None:
    given: Any = {"model": "llama2-7b", "cluster": "a100-80gb", "gpus": 8, "sequence": 2048, "batch": 32, "fix": "pp=1"}
    whole, adapters = plan(**given, forbid="zero"), plan(**given, trainable="lora:r=16", forbid="zero")
    upper = plan(**given, freeze=("before", "layers.[0-9]", "layers.1[0-9]"), forbid="zero")
    (before, memory), *others = ((one.prediction, device_memory(one)[0]) for one in (whole, adapters, upper))
    for after, less in others:
        assert after.step_seconds < 0.85 * before.step_seconds
        assert less.optimizer + less.gradients < memory.optimizer


def test_named_modules_get_the_same_adapters() -> None:
    graph = graph_named("llama-tiny", trainable=Trainable.parse("lora:r=4"))
    assert graph.trainable == 4 * sum(
        4 * (m + n) for m, n in ((64, 64), (64, 32), (64, 32), (64, 64), (64, 176), (64, 176), (176, 64))
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"trainable": "lora:r=0"}, "whole number from 1"),
        ({"trainable": "adapters"}, "Give all, lora:r=16"),
        ({"freeze": "layers.99"}, "nothing of that name"),
        ({"trainable": "lora:r=8,targets=nothing"}, "No linear layer"),
        ({"freeze": "before", "model": "resnet50"}, "train whole"),
    ],
)
def test_adapters_that_cannot_be_built_are_refused(given: dict[str, str], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        plan(**{"model": "llama2-7b", "cluster": "a100-80gb", **given})


def test_a_profile_is_of_what_trained_when_it_was_made() -> None:
    from galvatron_lite.api import find_profile

    known = find_profile(model="llama2-7b", cluster="a100-80gb")
    with pytest.raises(InputError, match="freeze parameters and add adapters in the module"):
        plan(known, trainable="lora:r=16")
    model = zoo.build("llama-tiny")
    check_trainable(model, known)
    with pytest.raises(InputError, match="Profile the model as it trains"):
        check_trainable(make_trainable(model, Trainable.parse("lora:r=4")), known)
