"""Models by name: one set for every command."""

from __future__ import annotations

import pytest
import torch

from galvatron_lite.capture.named import graph_named
from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.example import example_batch
from galvatron_lite.model.shapes import load_model, model_names
from galvatron_lite.model.zoo import SIZES, build
from galvatron_lite.verify.source import build_named


def test_a_small_model_of_the_zoo_is_traced() -> None:
    model = build("gpt-tiny", sequence=32)
    found = graph_named("gpttiny", sequence=32, precision="fp32")
    assert found == trace(model, example_batch(model), precision="fp32", name="gpt-tiny")
    assert found.sequence == 32
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_shipped_ones_are_as_their_files_say() -> None:
    assert graph_named("resnet-50", precision="fp32") == load_model("resnet50", precision="fp32")
    with pytest.raises(InputError, match="has none"):
        graph_named("resnet50", sequence=8)


def test_every_name_is_known_to_what_builds_and_one_that_is_not_tells_all() -> None:
    with pytest.raises(InputError) as unknown:
        graph_named("of-my-own")
    assert all(f"{name}," in unknown.value.remedy.replace(";", ",") for name in model_names())
    small = set(SIZES) - {"resnet-50", "resnet-152", "vgg-16"} - set(model_names())
    assert {"gpt-tiny", "moe-tiny", "convnext-mini"} <= small
    assert all(name in unknown.value.remedy for name in small)
    with torch.device("meta"):
        assert build_named("gpt-tiny", 16).config.sequence == 16
