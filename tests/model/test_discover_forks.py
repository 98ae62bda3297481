"""Models that fork: every layer is of one branch or of the trunk, and tensors tell who reads whom."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.model.discover import discover_layers, watch_model
from galvatron_lite.model.graph import ModelGraph, Passed, Role
from galvatron_lite.parallelism.branch.find import find_regions
from tests.model.forks import MODELS, Pair, loss_of, picture

UNITS = ["first", "pool", "second", "low", "grow", "last", "out"]
CAMERA = ["0", "1", "2", "3"]
TOWER = ["embed", "blocks.0", "blocks.1", "norm"]

Branches = list[tuple[list[str], list[str]]]


def tower(name: str, *more: str) -> tuple[list[str], list[str]]:
    return [name, *more], [*(f"{name}.{part}" for part in TOWER), *more]


def handing(*parts: str) -> Branches:
    return [([name], [f"{name}.{part}" for part in parts]) for name in ("left", "right")]


BRANCHES: dict[str, Branches] = {
    "pair": [([name], [f"{name}.{unit}" for unit in UNITS]) for name in ("left", "right")],
    "between": [([name], [f"{name}.{unit}" for unit in UNITS]) for name in ("pair.left", "pair.right")],
    "heads": [(["kind"], ["kind"]), (["box"], ["box.0", "box.2", "box.3"])],
    "cameras": [([f"encoders.{place}"], [f"encoders.{place}.{part}" for part in CAMERA]) for place in range(3)],
    "towers": [tower("query", "from_query"), tower("item", "from_item")],
    "apart": [tower("first", "words"), tower("second")],
    **{name: handing("0", "1", "3") for name in ("flatten", "identity", "given", "dropout")},
    "twice": handing("0", "1", "2", "4"),
}
"""Roots and layers of each branch."""
ENDS = {"between": (["stem"], ["tail"]), "heads": (["embed"], []), "cameras": ([], ["fuse"])}
"""Modules before and after the blocks; none where a model is left out."""
APART = sorted(set(MODELS) - set(BRANCHES) - {"tied towers", "in place"})


@cache
def captured(name: str) -> ModelGraph:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return trace(model, batch, loss_fn=loss_of)


@pytest.mark.parametrize("name", BRANCHES)
def test_each_branch_has_layers_of_its_own(name: str) -> None:
    graph = captured(name)
    (region,) = find_regions(graph)
    assert [(list(branch.roots), list(branch.layers)) for branch in region.branches] == BRANCHES[name]
    assert [list(graph.layers[place].modules) for place in (0, -1)] == list(ENDS.get(name, ([], [])))
    assert (graph.layers[0].role, graph.layers[-1].role) == (Role.BEFORE, Role.AFTER)


@pytest.mark.parametrize("name", APART)
def test_what_depends_is_no_branch(name: str) -> None:
    assert find_regions(captured(name)) == ()


def test_what_others_read_of_a_tower_is_in_no_branch() -> None:
    graph = captured("tied towers")
    assert [(tie.first, tie.second, tie.parameters) for tie in graph.ties] == [("before", "after", 50 * 16)]
    assert graph.layers[0].modules == ("query.embed",)
    assert [branch.layers[0] for branch in find_regions(graph)[0].branches] == ["query.blocks.0", "item.embed"]


def test_what_is_written_into_a_handed_on_input_others_depend_on() -> None:
    (region,) = find_regions(captured("in place"))
    assert region.entry == ("left.1",)  # it writes into the picture that the right tower reads
    assert [branch.roots for branch in region.branches] == [("left.2", "left.4"), ("right",)]


@pytest.mark.parametrize("name", MODELS)
def test_discovery_and_capture_agree(name: str) -> None:
    graph, (model, batch) = captured(name), MODELS[name]()
    watched = watch_model(model, batch)
    assert [layer.name for layer in watched.layers] == [layer.name for layer in graph.layers]
    assert trace(model, batch, loss_fn=loss_of, watched=watched) == graph
    held = [path for layer in graph.layers for path in layer.modules]
    assert len(held) == len(set(held))
    assert graph.parameters == sum(parameter.numel() for parameter in MODELS[name]()[0].parameters())


def test_the_graph_holds_who_reads_the_batch() -> None:
    first = {name: captured(name).tensors[0] for name in ("pair", "cameras", "towers")}
    assert first["pair"] == Passed("before", ("left.first", "right.first"), 0)
    assert first["cameras"] == Passed("before", tuple(f"encoders.{place}.0" for place in range(3)), 0)
    assert first["towers"] == Passed("before", ("query.embed", "item.embed"), 0)
    graph = captured("pair")
    assert ("left.out", "right.first") not in graph.edges
    assert [(b.input_bytes, b.output_bytes) for b in find_regions(graph)[0].branches] == [(3 * 64 * 4, 64 * 4)] * 2


@pytest.mark.parametrize("name", ["argmax", "detach"])
def test_what_takes_no_gradient_is_passed_all_the_same(name: str) -> None:
    graph = captured(name)
    assert Passed("words", ("second.embed",), 50 * 4) in graph.tensors
    assert graph.crossing([layer.name for layer in graph.layers].index("second.embed")) >= 50 * 4


def test_inception_blocks_are_layers() -> None:
    assert [layer.name for layer in captured("inceptions").layers] == ["before", "mix1", "mix2", "mix3", "after"]


def test_frozen_branches_are_branches() -> None:
    model = Pair()
    model.left.requires_grad_(False)
    branches = find_regions(trace(model, picture(), loss_fn=loss_of))[0].branches
    assert [(list(branch.roots), list(branch.layers)) for branch in branches] == BRANCHES["pair"]
    frozen = trace(Pair().requires_grad_(False), picture(), loss_fn=loss_of)
    assert [list(branch.roots) for branch in find_regions(frozen)[0].branches] == [["left"], ["right"]]


def test_blocks_that_the_user_names_are_what_they_are() -> None:
    model, batch = MODELS["heads"]()
    layers = discover_layers(model, batch, "body")
    assert [layer.name for layer in layers] == ["before", "body.0", "body.1", "body.2", "after"]
    assert layers[-1].modules == ("kind", "box")


def test_small_heads_stay_behind_the_blocks() -> None:
    """What a branch could save is less than a fiftieth of the work."""
    model, batch = MODELS["heads"]()
    model.kind, model.box = nn.Linear(16, 1), nn.Linear(16, 1)
    assert discover_layers(model, batch)[-1].modules == ("kind", "box")


def test_two_towers_of_transformers() -> None:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"vocab_size": 50, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    config = transformers.CLIPConfig(
        text_config=sizes | words, vision_config=sizes | {"image_size": 16, "patch_size": 8}, projection_dim=8
    )
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "pixel_values": torch.randn(2, 3, 16, 16)}
    graph = trace(transformers.CLIPModel(config), {**batch, "return_loss": True})
    (region,) = find_regions(graph)
    assert [branch.roots for branch in region.branches] == [
        ("vision_model", "visual_projection"),
        ("text_model", "text_projection"),
    ]
    assert [graph.layers[place].modules for place in (0, -1)] == [(), ()]
