"""Reading a plan against a model's layers, and which batches it can share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.runtime.activations.layout import ActivationLayout as Layout
from galvatron_lite.runtime.assignment import check_samples, glue_layout, place_layers
from tests.runtime.plans import make_plan

LAYERS = (
    Layer("before", "before", Role.BEFORE, ("embed",)),
    *(Layer(f"blocks.{i}", "block", Role.BLOCK, (f"blocks.{i}",)) for i in range(4)),
    Layer("after", "after", Role.AFTER, ("head",)),
)
DATA, SEQUENCE = Strategy(data=2), Strategy(tensor=2, sequence_parallel=True)


def test_runs_are_spread_over_their_layers() -> None:
    runs = (LayerRun("before", "before", 1, DATA), LayerRun("blocks.0", "blocks.3", 4, SEQUENCE))
    stages = (Stage(runs), Stage((LayerRun("after", "after", 1, DATA),)))
    plan = Plan(PLAN_VERSION, "m", 4, 8, 1, Schedule.GPIPE, "fp32", stages)
    first, last = place_layers(plan, LAYERS)
    assert [placed.layer.name for placed in first] == ["before", *(f"blocks.{i}" for i in range(4))]
    assert [placed.layout for placed in first[:2]] == [Layout(batch=2), Layout(sequence=2)]
    assert [placed.layer.name for placed in last] == ["after"]


def test_edges_never_share_tokens() -> None:
    (stage,) = place_layers(make_plan([[layer.name for layer in LAYERS]], [[SEQUENCE] * 6], 8), LAYERS)
    assert stage[0].layout == Layout(copies=2) == glue_layout(stage)
    assert glue_layout(stage[1:5]) == Layout(copies=2)


def test_a_run_of_another_length_is_refused() -> None:
    stage = Stage((LayerRun("before", "blocks.1", 2, DATA),))
    plan = Plan(PLAN_VERSION, "m", 2, 8, 1, Schedule.GPIPE, "fp32", (stage,))
    with pytest.raises(
        InputError, match=r"before to blocks\.1.*the next 2 layer\(s\) of this one are before, blocks\.0"
    ):
        place_layers(plan, LAYERS)


@given(st.integers(1, 200), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 6]))
def test_the_nearest_batches_are_named(samples: int, microbatches: int, first: int, second: int) -> None:
    plan = make_plan([["a"], ["b"]], [[Strategy(data=first)], [Strategy(data=second)]], samples, microbatches)

    def fits(count: int) -> bool:
        return count % microbatches == 0 and all(count // microbatches % degree == 0 for degree in (first, second))

    if fits(samples):
        check_samples(samples, plan, microbatches)
        return
    above = next(count for count in range(samples, 10 * samples + 100) if fits(count))
    below = next((count for count in range(samples, 0, -1) if fits(count)), None)
    near = f"the nearest: {below} or {above}." if below else f"the nearest: {above}."
    with pytest.raises(InputError, match=near):
        check_samples(samples, plan, microbatches)
