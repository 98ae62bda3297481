"""What layers read of one another, and what must travel between stages because of it."""

from __future__ import annotations

from itertools import pairwise

import torch

from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.zoo import build
from galvatron_lite.runtime.reads import carried, reads_of
from tests.runtime.pictures import Pictures, make_net, make_pictures


def names_of(layers: tuple, *cuts: int) -> list[list[str]]:  # type: ignore[type-arg]
    bounds = [0, *cuts, len(layers)]
    return [[layer.name for layer in layers[a:b]] for a, b in pairwise(bounds)]


def test_a_u_net_reads_what_the_way_down_made() -> None:
    model = build("unet-mini")
    batch = model.example_batch(2)  # type: ignore[operator]
    layers = discover_layers(model, batch)
    found = reads_of(model, layers, batch)
    assert {reader: set(made) for reader, made in found.items()} == {
        "inc": set(), "downs.0": {"inc"}, "downs.1": {"downs.0"}, "ups.0": {"downs.1", "downs.0"},
        "ups.1": {"ups.0", "inc"}, "outc": {"ups.1"}, "": {"outc"},
    }  # fmt: skip
    assert carried(layers, names_of(layers, 1, 2, 3, 4, 5), found) == [
        (), ("inc",), ("inc", "downs.0"), ("inc", "downs.0", "downs.1"), ("inc", "ups.0"), (),
    ]  # fmt: skip


def test_code_between_layers_hands_on_what_it_read() -> None:
    case = Pictures([])
    model, batch = make_net(case), make_pictures(case)
    layers = discover_layers(model, batch, blocks=[f"blocks.{number}" for number in range(3)])
    found = reads_of(model, layers, batch)
    assert found["blocks.1"] == {"blocks.0"}
    assert found["head"] == {"blocks.0", "blocks.2"}
    assert carried(layers, names_of(layers, 3), found) == [(), ("blocks.0", "blocks.1")]
    assert carried(layers, names_of(layers, 4), found)[1] == ("blocks.0", "blocks.2")


def test_models_without_skip_connections_send_one_value() -> None:
    model = build("gpt-tiny")
    batch = {"tokens": torch.zeros(2, 8, dtype=torch.long), "labels": torch.zeros(2, 8, dtype=torch.long)}
    layers = discover_layers(model, batch)
    names = names_of(layers, 1, 2, 4)
    assert carried(layers, names, reads_of(model, layers, batch)) == [()] * 4
