"""Plans in words and rows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.describe import (
    branch_rows,
    fits_line,
    plan_line,
    shown_groups,
    stage_groups,
    stage_rows,
    time_line,
)
from galvatron_lite.plans.schema import (
    PLAN_VERSION,
    BranchPlacement,
    Cyclic,
    LayerRun,
    MemoryBreakdown,
    Mode,
    Plan,
    Prediction,
    Proof,
    Provenance,
    Schedule,
    Stage,
    TimeBreakdown,
)  # fmt: skip

PLAIN, SHARDED, SLICED = Strategy(data=2), Strategy(zero=2, zero_stage=3), Strategy(tensor=2)


def staged(*stages: list[tuple[int, Strategy]]) -> Plan:
    """A plan of stages of (layers, strategy), on two devices each."""
    plan_stages, place = [], 0
    for runs in stages:
        stage_runs = []
        for count, strategy in runs:
            stage_runs.append(LayerRun(f"l{place}", f"l{place + count - 1}", count, strategy))
            place += count
        plan_stages.append(Stage(tuple(stage_runs)))
    return Plan(PLAN_VERSION, "m", 2 * len(stages), 8, 1, Schedule.ONE_F_ONE_B, "bf16", tuple(plan_stages))


def test_stages_that_do_the_same_have_one_row() -> None:
    ends = [(1, PLAIN), (1, SHARDED)]
    plan = staged(ends, *[[(2, SHARDED)]] * 60, *[[(1, SHARDED)]] * 18, ends[::-1])
    rows = [(row.stage, row.layers) for row in stage_rows(plan)]
    assert rows == [
        ("0", "l0"), ("", "l1"), ("1 … 78 (78)", "l2 … l139 (1 to 2 a stage)"), ("79", "l140"), ("", "l141"),
    ]  # fmt: skip


def test_stages_of_several_runs_have_a_row_for_each() -> None:
    rows = stage_rows(staged(*[[(2, SLICED), (1, SHARDED)]] * 4))
    assert [(row.stage, row.layers, row.strategy) for row in rows] == [
        ("0 … 3 (4)", "l0 … l10 (2 a stage)", "tensor2"),
        ("", "l2 … l11 (1 a stage)", "zero3x2"),
    ]


def test_a_plan_in_a_line() -> None:
    plan = staged([(2, SLICED), (1, SHARDED)])
    assert plan_line(plan) == (
        "m on 2 devices: no pipeline, batch 8 in 1 micro-batch of 8, bf16; tensor2 (2), zero3x2 (1)"
    )
    given = Provenance("", "", "", "estimated: data sheet", "", {}, 2**31, Proof.GIVEN)
    stages = (replace(plan.stages[0], memory=MemoryBreakdown(parameters=2**30)),)
    priced = replace(plan, stages=stages, provenance=given)
    prediction = Prediction(0.5, TimeBreakdown(), 1.0, 1.0, 0.5, 2**30)
    line = plan_line(replace(priced, prediction=prediction))
    assert line.endswith("; predicted 500 ms a step, 1.0 GiB of 2.0 GiB a device (costs estimated: data sheet)")


def test_interleaved_stages_and_parts_of_the_time_are_shown() -> None:
    plan = replace(staged(*[[(1, PLAIN)]] * 4), devices=4, virtual_stages=2)
    assert "pipeline of 2, 2 stages each (1f1b)" in plan_line(plan)
    priced = replace(plan, prediction=Prediction(0.5, TimeBreakdown(forward=0.1, backward=0.4), 1.0, 1.0, 0.5, 2**30))
    assert time_line(plan) == ""
    assert time_line(priced) == "500 ms a step: backward 80%, forward 20%"
    assert time_line(replace(priced, mode=Mode.INFERENCE)).startswith("500 ms a pass: ")


def test_every_branch_has_its_rows() -> None:
    first, second = staged([(2, SLICED), (1, SHARDED)]).stages[0].runs
    one = BranchPlacement("left", ("left",), 0, 2, (first, second), MemoryBreakdown(parameters=2**30), 0.5)
    other = BranchPlacement("right", ("right",), 2, 1, (first,))
    rows = branch_rows(replace(staged([]), branches=(one, other)))
    assert [(row.stage, row.layers) for row in rows] == [
        ("left: devices 0 … 1, 500 ms, 1.0 GiB", "l0 … l1 (2)"), ("", "l2"), ("right: device 2", "l0 … l1 (2)"),
    ]  # fmt: skip


def test_the_line_of_many_strategies_and_parts_ends_early() -> None:
    strategies = [Strategy(tensor=2), Strategy(data=2), *(Strategy(zero=2, zero_stage=stage) for stage in (1, 2, 3))]
    lines = [plan_line(replace(staged([(1, one) for one in strategies[:count]]), microbatches=2)) for count in (3, 4)]
    assert [line.count("(1)") for line in lines] == [3, 3]
    assert [line.endswith("…") for line in lines] == [False, True]
    assert all("in 2 micro-batches of 4" in line for line in lines)


def test_a_plan_fits_up_to_its_budget() -> None:
    plan = staged([(1, PLAIN)], [(1, SHARDED)])
    assert (plan.fits, plan.overfull, fits_line(plan)) == (None, (), "")
    given = Provenance("", "", "", "", "", {}, 2**30, Proof.GIVEN)
    prediction = Prediction(0.5, TimeBreakdown(), 1.0, 1.0, 0.5, 2**30)
    for half in (replace(plan, provenance=given), replace(plan, prediction=prediction)):
        assert (half.fits, half.overfull, fits_line(half)) == (None, (), "")
    for more, fits in [(0, True), (1, False)]:
        memory = MemoryBreakdown(parameters=2**29, context=2**29 + more)
        stages = (plan.stages[0], replace(plan.stages[1], memory=memory))
        priced = replace(plan, stages=stages, provenance=given, prediction=prediction)
        assert (priced.fits, priced.overfull) == (fits, () if fits else (1,))
        said = "fits: yes, 1.0 GiB of 1.0 GiB" if fits else "fits: no, 1.0 GiB of 1.0 GiB; too full: stage 1"
        assert fits_line(priced) == said


def test_two_stages_alike_stay_apart_and_so_do_other_devices() -> None:
    assert len(stage_rows(staged([(1, PLAIN)], [(1, PLAIN)]))) == 2
    plan = staged(*[[(1, PLAIN)]] * 6)
    unlike = tuple(replace(stage, device="ab"[number // 3]) for number, stage in enumerate(plan.stages))
    assert [row.stage for row in stage_rows(replace(plan, stages=unlike))] == ["0 … 2 (3) a", "3 … 5 (3) b"]


@given(st.lists(st.sampled_from([PLAIN, SHARDED, SLICED]), min_size=1, max_size=40))
def test_groups_are_all_stages_in_order_and_each_does_one_thing(strategies: list[Strategy]) -> None:
    groups = stage_groups(staged(*[[(1, strategy)] for strategy in strategies]))
    assert [number for group in groups for number in group] == list(range(len(strategies)))
    assert all(len({strategies[number] for number in group}) == 1 for group in groups)


@pytest.mark.parametrize(("fullest", "bars"), [(0, 6), (10, 7), (19, 6)])
def test_of_many_groups_the_ends_and_the_fullest_have_bars(fullest: int, bars: int) -> None:
    plan = staged(*[[(1, PLAIN if number % 2 else SHARDED)] for number in range(20)])
    shown = shown_groups(plan, plan.stages[fullest])
    drawn = [group[0] for group in shown if group is not None]
    assert drawn == sorted({0, 1, 2, fullest, 17, 18, 19})
    assert len(drawn) == bars
    assert shown.count(None) == bars - 5
    cyclic = replace(plan, cyclic=Cyclic(CyclicRule.V1, CyclicSetting.SINGLE))
    assert shown_groups(cyclic, plan.stages[0]) == [range(20)]
    near = shown_groups(plan, plan.stages[4])
    assert [group and group[0] for group in near] == [0, 1, 2, None, 4, None, 17, 18, 19]
