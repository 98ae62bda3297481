"""Pins that no convolutional layer can follow: which layer, which value, why, and what instead."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass
from galvatron_lite.model.shapes.registry import load_model
from galvatron_lite.parallelism.registry import REFUSING
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.search.pins import read_pins
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.space import reasons
from tests.parallelism.test_spatial_cost import CHANNELS, HEIGHT, WIDTH, convolved, stack

DEVICES = 8
PROFILE = estimate_profile(load_model("resnet50"), load_cluster("a100-80gb"), precision="bf16", name="test")


def asked(*pins: str) -> Plan:
    fixed = read_pins(pins, (), PROFILE.graph).at(DEVICES, 64)
    return find_plan(
        PROFILE, devices=DEVICES, global_batch=64, budget=10**11, fixed=fixed, backend="any", runners_up=0, effort=0
    )


@pytest.mark.parametrize(
    ("pins", "field", "value", "said"),
    [
        (("stages.3.1.width=8",), "stages.3.1.width", 8, "extent of 7 leaves a rank of 8 without a share.*1, 2, 4"),
        (("before.channels=2",), "before.channels", 2, "3 -> 64 channels cannot be shared evenly by 2"),
        (("after.channels=2",), "after.channels", 2, "ends in a loss.*offers 1"),
        (("width=3",), "width", 3, "must divide the 8 devices"),
        (("before.width=2", "before.filters=2"), "before.width", "2, 2", r"has all that is pinned.* it offers filters"),
        (
            ("stages.0.0.channels=2", "stages.0.0.filters=2"),
            "stages.0.0.filters",
            "2, 2",
            "pins it offers filters 1",
        ),
        (
            ("stages.0.0.width=2", "stages.0.0.tp=2"),
            "stages.0.0.tensor",
            "2, 2",
            "pins it offers tensor 1",
        ),
        (
            ("stages.0.0.width=2", "stages.0.0.dp=8"),
            "stages.0.0.width",
            "2, 8",
            r"No strategy of stages\.0\.0 .* offers batch_degree 1, 2, 4 or width 1\.",
        ),
    ],
)
def test_the_layer_the_value_and_a_remedy_are_named(
    pins: tuple[str, ...], field: str, value: object, said: str
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        asked(*pins)
    assert field in caught.value.field
    assert caught.value.value == value


@pytest.mark.parametrize(
    ("pins", "height", "width"),
    [(("height=8",), 8, 1), (("height=2", "width=1"), 2, 1), (("height=4", "width=2"), 4, 2)],
)
def test_grids_that_are_not_declared_can_be_pinned_for_one_layer_as_for_all(
    pins: tuple[str, ...], height: int, width: int
) -> None:
    strategies = {
        run.first: run.strategy
        for stage in asked("pp=1", *(f"stages.0.0.{pin}" for pin in pins)).stages
        for run in stage.runs
    }
    assert (strategies["stages.0.0"].height, strategies["stages.0.0"].width) == (height, width)
    assert (strategies["before"].height, strategies["before"].spatial) != (height, height * width)


def test_edges_need_not_agree_where_no_matmul_can_be_split() -> None:
    plan = asked("before.width=8", "after.dp=8")
    strategies = {run.first: run.strategy for stage in plan.stages for run in stage.runs}
    assert strategies["before"].width == 8
    assert strategies["after"].batch_degree == 8


def test_edges_that_have_no_layout_in_common_are_named() -> None:
    graph = load_model("gpt2")
    known = estimate_profile(graph, load_cluster("a100-80gb"), precision="bf16", name="test")
    fixed = read_pins(("before.tensor=4", "after.tensor=1", "pp=1"), (), graph).at(DEVICES, 64)
    with pytest.raises(InfeasibleError, match=r"before and after the blocks.*before: .*tensor4.*; after: .*data8"):
        find_plan(known, devices=DEVICES, global_batch=64, budget=10**11, fixed=fixed, runners_up=0)


@pytest.mark.parametrize(
    ("kind", "degrees", "said"),
    [
        (stack(convolved("a", 7)), {"width": 32}, "needs 1 of rank 2's items of an extent of 64: more than the share"),
        (stack(convolved("a", 3, 2)), {"height": 48}, "48 -> 24 leaves a rank of 48"),
        (
            stack(Operator("fc", OperatorClass.MATMUL, (1, CHANNELS * HEIGHT * WIDTH, 10), 1, 1, 2, 1, 1, 1)),
            {"height": 2}, "fc takes its picture as one row",
        ),
        (load_model("gpt2").kinds["block"], {"height": 2, "filters": 2}, "does not work on pictures"),
        (stack(convolved("a", 3)), {"depth": 2}, "extent of 1 leaves a rank of 2"),
    ],
)  # fmt: skip
def test_every_refusal_has_a_reason_and_what_is_offered_has_none(
    kind: LayerKind, degrees: dict[str, int], said: str
) -> None:
    for dimension in REFUSING:
        offered = {int(str(choice[dimension.degree])) for choice in dimension.choices(kind, 32)}
        assert all(bool(dimension.refusal(kind, degree)) == (degree not in offered) for degree in (2, 4, 8, 16, 32))
        if dimension.degree in degrees:
            assert re.search(said, dimension.refusal(kind, degrees[dimension.degree]))


def test_plans_that_ask_for_it_are_not_priced() -> None:
    plan = asked("before.width=8", "after.dp=8")
    runs = [replace(run, strategy=Strategy(width=8)) for run in plan.stages[0].runs]
    wrong = replace(plan, stages=(replace(plan.stages[0], runs=tuple(runs)),))
    with pytest.raises(InputError, match=r"stages\.3\.0.*width: an extent of 14 -> 7 leaves a rank of 8.*1, 2, 4"):
        evaluate(PROFILE, wrong)


def test_layers_with_the_same_reason_share_a_line() -> None:
    said = [line for line in reasons(PROFILE.graph) if line.startswith("tensor")]
    assert len(said) == 1
    assert said[0].startswith("tensor: before … after: ")
    graph = PROFILE.graph
    kinds = {
        name: replace(kind, tensor_reason="" if name == "stage1_first" else "no") for name, kind in graph.kinds.items()
    }
    told = reasons(replace(graph, kinds=kinds))
    assert "tensor: before … stages.0.2, stages.1.1 … after: no" in told


def test_well_known_shapes_of_pictures_are_what_their_names_say() -> None:
    plan = find_plan(PROFILE, devices=4, global_batch=32, budget=10**11, runners_up=8)
    told = {one.summary.partition(": ")[0]: one.summary.partition(": ")[2] for one in plan.alternatives}
    assert told["plain data parallel"].startswith("data4, ")
    assert told["spatial"].startswith("spatial")
    assert told["filters"].startswith("filters4, ")
    assert "tensor parallel" not in told
