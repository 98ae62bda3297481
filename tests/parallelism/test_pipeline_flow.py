"""What layers read of one another, and what must travel between stages because of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.pipeline.flow import LayerFlow, Output, flow_of, sources_of, unknown
from tests.equivalence.families import FAMILIES, build_family
from tests.runtime.pictures import Pictures, make_net, make_pictures


def names_of(flow: LayerFlow, layers: tuple[Layer, ...]) -> list[set[str]]:
    """By cut: modules whose outputs cross it."""
    return [{one.path for one in flow.crossing(cut)} for cut in range(1, len(layers))]


def test_a_u_net_reads_what_the_way_down_made() -> None:
    model = build("unet-mini")
    batch = model.example_batch(2)  # type: ignore[operator]
    layers = discover_layers(model, batch)
    flow = flow_of(model, layers, batch)
    assert not flow.is_chain
    assert not flow.enters(1)
    assert names_of(flow, layers) == [
        {"inc"}, {"inc", "downs.0"}, {"inc", "downs.0", "downs.1"}, {"inc", "ups.0"}, {"ups.1"},
    ]  # fmt: skip


def test_code_between_layers_hands_on_what_it_read() -> None:
    case = Pictures([])
    model, batch = make_net(case), make_pictures(case)
    layers = discover_layers(model, batch, blocks=[f"blocks.{number}" for number in range(3)])
    flow = flow_of(model, layers, batch)
    assert flow.enters(1)
    crossing = [set(), {"blocks.0"}, {"blocks.0", "blocks.1"}, {"blocks.0", "blocks.2"}]
    assert names_of(flow, layers) == crossing


def test_models_without_skip_connections_are_chains() -> None:
    for family in FAMILIES:
        model, batch, layers = build_family(family, 2)
        assert flow_of(model, layers, batch).is_chain, family


class Branches(nn.Module):
    """Its output is more than its loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, value: Tensor) -> dict[str, Tensor]:
        first = self.blocks[0](value)
        return {"first": first, "last": self.blocks[2](self.blocks[1](first))}


def test_only_what_the_loss_is_made_of_is_read() -> None:
    model, batch = Branches(), (torch.randn(4, 3),)
    layers = discover_layers(model, batch, blocks=[f"blocks.{number}" for number in range(3)])

    def loss(output: Any, _: Any) -> Tensor:
        value: Tensor = output["last"].mean()
        return value

    assert flow_of(model, layers, batch, loss).is_chain
    assert not flow_of(model, layers, batch).is_chain


def test_unknown_tensors_tell_shapes_device_and_sources() -> None:
    home = torch.device("cpu")
    ones = [Output("a", 0, ""), Output("b", 1, ".0")]
    left, right = (unknown(torch.empty(2, 3, device="meta"), frozenset([one]), home) for one in ones)
    both = torch.cat([left.relu(), torch.zeros(2, 1), right * 2], 1)
    assert both.shape == (2, 7)
    assert sources_of(both) == set(ones)
    assert both.device == home
    assert both.new_ones(2).tolist() == [1, 1]
    assert torch.zeros_like(left).sum() == 0
    assert sources_of(left.to(home, torch.float64)) == {ones[0]}
    known = torch.zeros(2, 3)
    known[0] = left[1]
    assert sources_of(known) == {ones[0]}
    right += left
    assert sources_of(right) == set(ones)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.inner(x) + table.mean()


class Lending(nn.Module):
    """Every block is handed the table, or else the code behind the blocks reads it."""

    def __init__(self, to_all: bool) -> None:
        super().__init__()
        self.to_all = to_all
        self.start = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.table, self.end = nn.Embedding(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x, self.table.weight if self.to_all else torch.ones(1))
        x = self.end(x)
        return (x if self.to_all else x + self.table.weight.sum()).mean()


def test_a_lent_parameter_is_named_before_anything_is_cut() -> None:
    model, batch = Lending(to_all=True), torch.zeros(2, 4)
    graph = trace(model, batch, loss_fn=lambda output, _: output)
    assert "table.weight" in graph.whole
    flow = flow_of(model, graph.layers, batch)
    for cut in range(1, len(graph.layers)):
        with pytest.raises(InputError, match=r"table\.weight"):
            flow.check(cut, graph.layers)


def test_one_that_its_own_layer_alone_reads_may_be_cut_off() -> None:
    model, batch = Lending(to_all=False), torch.zeros(2, 4)
    graph = trace(model, batch, loss_fn=lambda output, _: output)
    flow = flow_of(model, graph.layers, batch)
    held = next(layer.name for layer in graph.layers if "table" in layer.modules)
    assert held == "after"
    assert graph.whole == ""
    assert flow.borrowed == ()
    flow.check(2, graph.layers)
