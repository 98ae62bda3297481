"""A parameter that code between layers hands to blocks, of a module that itself never runs: no pipeline stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.pipeline.flow import flow_of


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
