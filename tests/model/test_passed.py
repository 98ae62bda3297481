"""Tensors that go further than to the next layer: bytes by hand, in shapes and in traced models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph, Passed, Recompute
from galvatron_lite.model.shapes import build_graph, load_model
from galvatron_lite.model.shapes.fields import UNetShape
from galvatron_lite.model.shapes.images.layout import partitioned
from galvatron_lite.model.shapes.images.names import graph_of_name
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed, Space
from tests.factories import make_graph, make_kind
from tests.model.models import LAYERS, TOKENS, hugging_face

HALF, SINGLE = 2, 4


def place(graph: ModelGraph, name: str) -> int:
    return [layer.name for layer in graph.layers].index(name)


def built(name: str, side: int) -> ModelGraph:
    graph = graph_of_name(name, side, "fp32")
    assert graph is not None
    return graph


def test_a_chain_hands_each_output_to_the_next_layer() -> None:
    graph = make_graph([make_kind("a", 1, boundary=70), make_kind("b", 1, boundary=30)], ["a", "b", "a"])
    assert graph.tensors == ()
    assert graph.edges == (("l0", "l1"), ("l1", "l2"))
    assert [graph.crossing(cut) for cut in range(4)] == [0, 70, 30, 0]
    assert graph.borrowed(range(1, 3)) == 0


def test_tensors_cross_the_boundaries_between_producer_and_last_reader() -> None:
    graph = make_graph([make_kind("a", 1)], ["a"] * 5)
    tensors = (
        Passed("l0", ("l1", "l3"), 5, borrowed=True), Passed("l1", ("l2",), 20), Passed("l2", ("l4",), 100),
        Passed("l3", ("l4",), 1000),
    )  # fmt: skip
    graph = replace(graph, tensors=tensors)
    assert [graph.crossing(cut) for cut in range(6)] == [0, 5, 25, 105, 1100, 0]
    assert graph.edges == (("l0", "l1"), ("l0", "l3"), ("l1", "l2"), ("l2", "l4"), ("l3", "l4"))
    assert [graph.borrowed(range(*ends)) for ends in ((0, 2), (1, 3), (2, 3), (2, 5), (3, 4), (4, 5))] == [
        0, 5, 0, 5, 5, 0
    ]  # fmt: skip
    assert set(graph.to_networkx().edges) == set(graph.edges)


def test_an_encoders_output_travels_to_every_decoder_block() -> None:
    graph = load_model("t5-3b", precision="bf16")
    hidden = 512 * 1024 * HALF
    bridge, last = place(graph, "bridge"), len(graph.layers) - 1
    assert len(graph.layers) == 2 * 24 + 3
    expected = [0, *[hidden] * bridge, *[2 * hidden] * (last - bridge - 1), hidden, 0]
    assert [graph.crossing(cut) for cut in range(last + 2)] == expected
    readers = [reader for producer, reader in graph.edges if producer == "bridge"]
    assert readers == [f"decoder.layers.{number}" for number in range(24)]
    assert graph.borrowed(range(bridge + 1, last)) == hidden
    assert graph.borrowed(range(bridge, last)) == graph.borrowed(range(last, last + 1)) == 0


def test_exchanges_of_a_stage_are_between_its_own_layers() -> None:
    graph = load_model("t5-3b", precision="bf16")
    hidden, bridge = 512 * 1024 * HALF, place(graph, "bridge")
    assert graph.exchanges(range(3, 6)) == ((3, 4, hidden), (4, 5, hidden))
    # The encoder's output leaves a stage that makes it, or has it from before, as its last layer has it.
    first = ((bridge, bridge + 1, 2 * hidden), (bridge, bridge + 2, hidden), (bridge + 1, bridge + 2, hidden))
    assert graph.exchanges(range(bridge, bridge + 3)) == first
    later = range(bridge + 2, bridge + 5)
    a, b, c = later
    assert graph.exchanges(later) == ((a, b, 2 * hidden), (a, c, hidden), (b, c, hidden))
    assert graph.exchanges(range(bridge, bridge + 1)) == ()
    chain = load_model("gpt2")
    assert chain.exchanges(range(2, 5)) == ((2, 3, chain.crossing(3)), (3, 4, chain.crossing(4)))


def u_net() -> ModelGraph:
    return build_graph(UNetShape(base=8, levels=4, image_size=64, channels=3), precision="fp32")


def test_pictures_of_the_way_down_are_read_on_the_way_up() -> None:
    graph, side, base = u_net(), 64, 8
    pairs = [pair for pair in graph.edges if place(graph, pair[1]) > place(graph, pair[0]) + 1]
    assert pairs == [("before", "ups.3"), ("downs.0", "ups.2"), ("downs.1", "ups.1"), ("downs.2", "ups.0")]
    # Level l leaves base * 2^l channels of (side / 2^l)^2 pixels.
    kept = [base * 2**level * (side // 2**level) ** 2 * SINGLE for level in range(5)]
    assert graph.crossing(place(graph, "ups.0")) == sum(kept)
    assert graph.crossing(1) == kept[0]
    assert graph.crossing(len(graph.layers) - 1) == graph.kind_of(graph.layers[-2]).output_bytes


def test_cells_read_the_two_outputs_before_them() -> None:
    graph = built("amoebanet_d_l18_d256", 224)
    names = [layer.name for layer in graph.layers]
    assert [b for a, b in graph.edges if a == "cells.3"] == ["cells.4", "cells.5"]
    for cut in range(2, len(names) - 1):
        assert graph.crossing(cut) == graph.kind_of(graph.layers[cut - 1]).output_bytes
    assert graph.crossing(len(names) - 1) < graph.kind_of(graph.layers[-2]).output_bytes


def test_partitions_hand_on_what_crosses_their_boundaries() -> None:
    graph, balance = u_net(), (2, 3, 5)
    whole = partitioned(graph, balance)
    assert [whole.crossing(place) for place in (2, 3)] == [graph.crossing(place) for place in (2, 5)]
    assert whole.edges == (
        ("partitions.0", "partitions.1"), ("partitions.0", "partitions.2"), ("partitions.1", "partitions.2"),
        ("partitions.2", "after"),
    )  # fmt: skip


class Twin(nn.Module):
    """Two towers whose ends meet in a third stack, and a picture from the start added at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.joined = nn.ModuleList([Join(), Join()])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.left:
            x = layer(x)
        for layer in self.right:
            y = layer(y)
        first = x
        for join in self.joined:
            x = join(x, y, first)
        return self.head(x).mean()


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 8)

    def forward(self, x: Tensor, y: Tensor, first: Tensor) -> Tensor:
        return x + self.other(y) + first


BLOCKS = ["left.0", "left.1", "right.0", "right.1", "joined.0", "joined.1"]


def test_towers_of_a_traced_model_meet() -> None:
    batch = {"x": torch.zeros(4, 8), "y": torch.zeros(4, 4)}
    graph = trace(Twin(), batch, loss_fn=lambda loss, _: loss, blocks=BLOCKS)
    assert graph.tensors == (
        Passed("left.0", ("left.1",), 8 * SINGLE),
        Passed("left.1", ("joined.0", "joined.1"), 8 * SINGLE),
        Passed("right.0", ("right.1",), 4 * SINGLE),
        Passed("right.1", ("joined.0", "joined.1"), 4 * SINGLE),
        Passed("joined.0", ("joined.1",), 8 * SINGLE),
        Passed("joined.1", ("after",), 8 * SINGLE),
    )
    assert graph.crossing(place(graph, "right.1")) == (8 + 4) * SINGLE
    assert graph.crossing(place(graph, "joined.1")) == (8 + 4 + 8) * SINGLE


def t5(layers: int = 2, decoder_layers: int = 3) -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_decoder_layers=decoder_layers, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    ids = torch.zeros(2, 16, dtype=torch.long)
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids[:, :12]}


def test_a_traced_t5_lends_the_encoders_output() -> None:
    graph = trace(*t5())
    encoder, decoder = 16 * 32 * SINGLE, 12 * 32 * SINGLE
    names = [layer.name for layer in graph.layers]
    assert names[4] == "decoder.embed_tokens"
    assert [graph.crossing(cut) for cut in range(len(names) + 1)] == [
        0, encoder, encoder, encoder, encoder, encoder + decoder, encoder + decoder, encoder + decoder, decoder, 0
    ]  # fmt: skip
    assert ("encoder.final_layer_norm", "decoder.embed_tokens") not in graph.edges
    readers = tuple(f"decoder.block.{number}" for number in range(3))
    assert Passed("encoder.final_layer_norm", readers, encoder, borrowed=True) in graph.tensors
    assert graph.borrowed(range(5, 9)) == encoder
    # The layer that makes it counts it, and what stands before the blocks no more.
    norm = graph.kind_of(graph.layers[3])
    assert norm.kept[Recompute.FULL].total == 2 * encoder
    # Before: token indices and the output of dropout's mask (a byte an item), which a table of embeddings needs.
    assert graph.kinds["before"].kept[Recompute.NONE].total < encoder + 16 * (8 + 32)


class Glued(nn.Module):
    """Code of the model itself puts an early output beside a late one, and adds another to what the loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(inner, 6) for inner in (6, 6, 6, 12))
        self.head = nn.Linear(6, 6)

    def forward(self, value: Tensor) -> Tensor:
        first = self.blocks[0](value)
        second = self.blocks[1](torch.relu(first))
        third = self.blocks[2](second)
        last = self.blocks[3](torch.cat([torch.tanh(first), third], 1))
        return (self.head(last) + second).mean()


def test_what_code_between_layers_is_made_of_is_read() -> None:
    graph = trace(Glued(), (torch.randn(4, 6),), blocks=[f"blocks.{number}" for number in range(4)])
    size = 6 * 4
    assert graph.tensors == (
        Passed("blocks.0", ("blocks.1", "blocks.3"), size),
        Passed("blocks.1", ("blocks.2", "after"), size),
        Passed("blocks.2", ("blocks.3",), size),
        Passed("blocks.3", ("after",), size),
    )
    assert graph.crossings() == (0, 0, size, 2 * size, 3 * size, 2 * size, 0)


class Scaled(Glued):
    """Its loss has a parameter of its own; its first block runs again; or code behind that changes what it gave."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.again, self.kind = kind == "again", kind
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, value: Tensor) -> Tensor:
        hidden = value
        for block in (*self.blocks[:3], *self.blocks[:1]) if self.again else self.blocks[:3]:
            hidden = block(hidden)
            if self.kind == "written to":
                hidden += 1
        loss: Tensor = self.head(self.blocks[3](torch.cat([hidden, hidden], 1))).mean()
        return loss * self.scale if self.kind == "scaled" else loss


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("again", "blocks.0 runs before blocks.2 and again after it"),
        ("scaled", "reads the parameter scale"),
        ("written to", "code behind blocks.0 changes in place what it gives"),
    ],
)
def test_models_that_cannot_be_cut_are_offered_one_stage(kind: str, said: str) -> None:
    blocks, batch = [f"blocks.{number}" for number in range(4)], (torch.randn(4, 6),)
    whole = trace(Scaled(kind), batch, blocks=blocks[kind == "again" :])
    cut = trace(Glued(), batch, blocks=blocks)
    assert said in whole.whole
    assert cut.whole == ""
    assert request_of(cut, Fixed()).pipelines == (1, 2, 4)
    assert request_of(whole, Fixed()).pipelines == (1,)
    with pytest.raises(InputError, match="no pipeline stages"):
        _ = request_of(whole, Fixed(pipeline=2)).pipelines


def test_a_model_without_blocks_is_offered_one_stage() -> None:
    model = nn.Bilinear(6, 6, 1)
    graph = trace(model, (torch.randn(4, 6), torch.randn(4, 6)), loss_fn=lambda output, _: output.mean())
    assert "no repeated blocks" in graph.whole
    with pytest.raises(InputError, match="no repeated blocks"):
        _ = request_of(graph, Fixed(pipeline=2)).pipelines


def request_of(graph: ModelGraph, fixed: Fixed) -> Request:
    return Request(graph, 4, 8, 10**9, fixed, (Schedule.GPIPE,), Space(graph, 4))


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def mixtral(balanced: bool) -> ModelGraph:
    return trace(*hugging_face("Mixtral", output_router_logits=balanced, **EXPERTS))


@pytest.fixture(scope="module")
def balanced() -> ModelGraph:
    return mixtral(True)


def test_a_loss_that_balances_experts_is_captured(balanced: ModelGraph) -> None:
    plain = mixtral(False)
    assert balanced.kinds["block"] == plain.kinds["block"]
    assert balanced.tensors == ()
    kept, before = (graph.kinds["after"].kept[Recompute.NONE].total for graph in (balanced, plain))
    assert kept >= before + 2 * LAYERS * TOKENS * EXPERTS["num_local_experts"] * 4  # shares of experts, for backward
    assert "mlp.gate" in balanced.whole
    assert (plain.whole, plain.undivided) == ("", "")


def test_it_is_planned_with_one_stage_and_one_micro_batch_unless_more_are_asked_for(balanced: ModelGraph) -> None:
    profile = estimate_profile(balanced, load_cluster("v100"), precision="fp32", name="balanced")
    asked = partial(find_plan, profile, devices=4, global_batch=8, budget=10**9)
    plan = asked()
    assert (len(plan.stages), plan.microbatches) == (1, 1)
    assert asked(fixed=Fixed(microbatches=2)).microbatches == 2
    with pytest.raises(InputError, match=r"mlp\.gate"):
        asked(fixed=Fixed(pipeline=2))


class Listening(nn.Module):
    """Adds to its loss what a hook of its own hears of each block's inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(4, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        heard: list[Tensor] = []
        hooks = [block[0].register_forward_hook(lambda *call: heard.append(call[-1])) for block in self.blocks]
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        for hook in hooks:
            hook.remove()
        return self.end(x).mean() + torch.stack(heard).square().mean()


def test_any_hook_of_the_model_hears_of_blocks_that_are_left_out() -> None:
    graph = trace(Listening(), torch.zeros(2, 4), loss_fn=lambda output, _: output)
    assert [layer.name for layer in graph.layers][1:-1] == [f"blocks.{place}" for place in range(LAYERS)]
    assert "blocks." in graph.whole


class Halves(nn.Module):
    """Two blocks of unlike widths with a pool between them, which keeps what it is given and where its maxima lie."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Conv2d(a, b, 3, 1, 1), nn.GELU()) for a, b in ((3, 8), (8, 16)))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.parts
        return second(nn.functional.max_pool2d(first(x), 2)).square().mean()


@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU])
def test_what_code_between_blocks_keeps_counts_with_the_next_one(activation: type[nn.Module]) -> None:
    model = Halves()
    model.parts[0][1] = activation()
    graph = trace(model, {"x": torch.zeros(2, 3, 8, 8)}, blocks="parts")
    pictures, index = SINGLE * 8 * 8 * 8, 8 * 8 * 4 * 4
    pooled, made = SINGLE * 8 * 4 * 4, SINGLE * 16 * 4 * 4  # a convolution keeps its input, GELU its own
    kept = graph.kind_of(graph.layers[2]).kept
    assert kept[Recompute.NONE].total == pictures + index + pooled + made
    between = index if activation is nn.ReLU else pictures + index  # ReLU holds its output, which the pool reads
    assert kept[Recompute.FULL].total == between + pooled
