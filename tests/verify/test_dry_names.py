"""Plans under the names of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.dry.roles import named_for
from tests.equivalence.plans import write_plan


def _plan(blocks: Sequence[str]) -> Plan:
    names = ["before", *blocks, "after"]
    apart = {
        name: Strategy(data=2) if place % 2 else Strategy(zero=2, zero_stage=1) for place, name in enumerate(names)
    }
    return write_plan([names], apart, devices=2, batch=2)


def _layers(blocks: Sequence[str]) -> list[Layer]:
    middle = [Layer(name, "block", Role.BLOCK) for name in blocks]
    return [Layer("before", "before", Role.BEFORE), *middle, Layer("after", "after", Role.AFTER)]


OWN = [f"blocks.{number}" for number in range(4)]
SHAPES = [f"layers.{number}" for number in range(4)]


def test_names_of_a_shape_become_those_of_the_module() -> None:
    assert named_for(_plan(SHAPES), _layers(OWN)) == _plan(OWN)
    assert named_for(_plan(OWN), _layers(OWN)) == _plan(OWN)
    with pytest.raises(InputError, match=r"plan is for 5 layers, the model has 6"):
        named_for(_plan(SHAPES[:3]), _layers(OWN))


def test_one_layer_between_encoder_and_decoder_may_be_several() -> None:
    planned = ["encoder.layers.0", "encoder.layers.1", "bridge", "decoder.layers.0"]
    own = ["encoder.block.0", "encoder.block.1", "encoder.norm", "decoder.embed_tokens", "decoder.block.0"]
    runs = [(run.first, run.last, run.count) for run in named_for(_plan(planned), _layers(own)).stages[0].runs]
    assert runs[3] == ("encoder.norm", "decoder.embed_tokens", 2)
    assert [run[0] for run in runs] == ["before", *own[:3], own[4], "after"]
    with pytest.raises(InputError, match=r"plan is for 6 layers, the model has 8"):
        named_for(_plan(planned), _layers([*own, "decoder.block.1"]))
    plan = _plan(planned)
    whole = replace(plan.stages[0].runs[0], last="after", count=6)
    joined = named_for(replace(plan, stages=(replace(plan.stages[0], runs=(whole,)),)), _layers(own))
    assert [(run.first, run.last, run.count) for run in joined.stages[0].runs] == [("before", "after", 7)]


def test_a_name_that_was_edited_into_another_is_told() -> None:
    with pytest.raises(InputError, match=r"'blocks\.9'.*no such layer.*blocks\.3"):
        named_for(_plan([*OWN[:3], "blocks.9"]), _layers(OWN))
