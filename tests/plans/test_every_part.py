"""What contradicts itself in any part of a plan is refused, by the field's name and value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import check_plan
from galvatron_lite.plans.schema import BranchPlacement, LayerRun, Plan, Stage
from tests.plans.export.made import PLANS, plan

WRONG = LayerRun("x", "x", 1, Strategy(data=8))
RIGHT = LayerRun("y", "y", 1, Strategy(data=2))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("last", [False, True])
def test_every_run_of_every_stage_is_checked(number: int, last: bool) -> None:
    good = plan(Strategy(data=2), (2, 1, 3, 2))
    runs = good.stages[number].runs
    stage = Stage((*runs, WRONG) if last else (WRONG, *runs))
    bad = replace(good, stages=(*good.stages[:number], stage, *good.stages[number + 1 :]))
    with pytest.raises(
        InputError, match=rf"plan, stages\.{number}\.runs\.{len(runs) if last else 0}\.strategy: 'data8'"
    ):
        check_plan(bad)


@pytest.mark.parametrize(
    ("first", "devices", "runs"), [(0, 2, (RIGHT, WRONG)), (-1, 2, (RIGHT,)), (3, 2, (RIGHT,)), (0, 0, (RIGHT,))]
)
def test_every_branch_is_checked(first: int, devices: int, runs: tuple[LayerRun, ...]) -> None:
    good = BranchPlacement("left", ("left",), 0, 2, (RIGHT,))
    check_plan(branched(good, good))
    with pytest.raises(InputError, match=r"plan, branches\.1"):
        check_plan(branched(good, BranchPlacement("right", ("right",), first, devices, runs)))


def branched(*branches: BranchPlacement) -> Plan:
    whole = LayerRun("before", "before", 1, Strategy())
    return replace(PLANS["data"], stages=(Stage((whole,)),), branches=branches)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"microbatches": 3}, "microbatches"),
        ({"microbatches": 0}, "microbatches"),
        ({"global_batch": 0}, "global_batch"),
    ],
)
def test_the_field_and_its_value_are_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as raised:
        check_plan(replace(PLANS["data"], **change))
    assert (raised.value.field, raised.value.value) == (f"plan, {field}", change[field])
