"""Stages of one model that share its parameters and buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.cyclic.stages import cut_stages, stage_of, structure_of
from galvatron_lite.parallelism.pipeline.flow import flow_of
from tests.parallelism.cyclic.models import Mixed, blocks_case, make_batches, mixed_case


def test_a_structure_shares_tensors_alone() -> None:
    model = Mixed()
    copied = structure_of(model)
    assert all(one is other for one, other in zip(model.parameters(), copied.parameters(), strict=True))
    assert all(one is other for one, other in zip(model.buffers(), copied.buffers(), strict=True))
    assert not {id(one) for one in model.modules()} & {id(one) for one in copied.modules()}


def test_each_parameter_and_buffer_is_in_one_stage() -> None:
    model, layers, names = mixed_case()
    parts = cut_stages(model, layers, names, flow_of(model, layers, make_batches(1, 2)[0]))
    found = [name for part in parts for name in part.parameters()]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    assert "scale" in parts[0].parameters()
    assert [name for part in parts for name, _ in part.buffers()] == [name for name, _ in model.named_buffers()]


def test_bound_parameters_are_used() -> None:
    model, layers, names = blocks_case(2)
    first, _ = cut_stages(model, layers, names, None)
    zeros = {name: nn.Parameter(torch.zeros_like(one)) for name, one in first.parameters().items()}
    first.bind(zeros)
    batch = make_batches(1, 1)[0]
    assert not first.cut.run(lambda: first.model(**batch), None).any()
    assert model.blocks[0].weight.any()


def test_a_recurrent_layer_uses_what_is_bound() -> None:
    """It keeps a list of its parameters beside their names."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.LSTM(3, 3), nn.Linear(3, 3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x)[0])

    layers = [Layer(f"blocks.{place}", f"kind{place}", Role.BLOCK, (f"blocks.{place}",)) for place in range(2)]
    part = stage_of(Reads(), layers, [["blocks.0"], ["blocks.1"]], 0, None)
    part.bind({name: nn.Parameter(torch.zeros_like(one)) for name, one in part.parameters().items()})
    output, _ = part.cut.run(lambda: part.model(torch.randn(2, 4, 3)), None)
    assert not output.any()


def test_parameters_tied_within_a_stage_are_bound_everywhere() -> None:
    model, layers, names = blocks_case(3)
    model.blocks[1].weight = model.blocks[0].weight
    part, _ = cut_stages(model, layers, [names[0] + names[1], names[2]], None)
    assert sorted(part.parameters()) == ["blocks.0.bias", "blocks.0.weight", "blocks.1.bias"]
    new = nn.Parameter(torch.zeros(3, 3))
    part.bind({"blocks.0.weight": new})
    assert part.model.blocks[0].weight is part.model.blocks[1].weight is new
    with pytest.raises(InputError, match="Untie"):
        cut_stages(model, layers, names, None)
