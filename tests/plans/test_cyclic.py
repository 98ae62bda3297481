"""Plans of cyclic data parallelism: how many devices, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting, device_count, moments
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import check_plan, check_runs, read_plan, write_plan
from galvatron_lite.plans.schema import PLAN_VERSION, Cyclic, LayerRun, Plan, Schedule, Stage
from galvatron_lite.plans.written import plan_from
from tests.factories import make_graph, make_kind


def cyclic_plan(setting: CyclicSetting, count: int = 3) -> Plan:
    """A plan of one layer a stage."""
    stages = tuple(Stage((LayerRun(f"l{place}", f"l{place}", 1, Strategy()),)) for place in range(count))
    return Plan(
        PLAN_VERSION, "test", device_count(setting, count), 2 * count, count, Schedule.CYCLIC, "fp32", stages,
        cyclic=Cyclic(CyclicRule.V2, setting),
    )  # fmt: skip


@pytest.mark.parametrize("setting", CyclicSetting)
def test_written_read_and_run(setting: CyclicSetting, tmp_path: Path) -> None:
    plan = cyclic_plan(setting)
    write_plan(plan, tmp_path / "plan.yaml")
    assert check_runs(read_plan(tmp_path / "plan.yaml")) == plan
    assert (plan.stage_devices, plan.microbatch) == (1, 2)
    assert plan.pipeline == (3 if setting is CyclicSetting.STAGES else 1)


@pytest.mark.parametrize("count", range(1, 9))
def test_devices_are_those_that_a_stage_is_busy_with(count: int) -> None:
    # Between a worker's forward and backward of a stage its activations are there: the device is taken.
    needed = 0
    for stage in range(count):
        spans = []
        for step in range(4):
            for worker in range(count):
                own = [moment.time for moment in moments(step, worker, stage, count)]
                spans.append((min(own), max(own)))
        middle = range(2 * count, 6 * count)
        needed += max(sum(first <= time <= last for first, last in spans) for time in middle)
    assert device_count(CyclicSetting.STAGES, count) == needed
    assert [device_count(one, count) for one in (CyclicSetting.SINGLE, CyclicSetting.DATA)] == [1, count]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"devices": 4}, "devices"),
        ({"microbatches": 2}, "microbatches"),
        ({"schedule": Schedule.ONE_F_ONE_B}, "schedule"),
        ({"cyclic": None}, "schedule"),
        ({"virtual_stages": 3}, "schedule"),
    ],
)
def test_numbers_that_contradict_one_another(change: dict[str, object], named: str) -> None:
    plan = replace(cyclic_plan(CyclicSetting.DATA), **change)  # type: ignore[arg-type]
    with pytest.raises(InputError) as refused:
        check_plan(plan)
    assert refused.value.field == f"plan, {named}"


def test_layers_are_whole() -> None:
    plan = cyclic_plan(CyclicSetting.DATA)
    split = Stage((LayerRun("l0", "l0", 1, Strategy(tensor=3)),))
    with pytest.raises(InputError, match="has 1 device"):
        check_plan(replace(plan, stages=(split, *plan.stages[1:])))


def test_by_hand() -> None:
    graph = make_graph([make_kind("block", 10)], ["block"] * 4)
    stages = [{"runs": [{"layers": name, "strategy": "whole"}]} for name in ("l0..l1", "l2..l3")]
    written = {
        "devices": 3, "global_batch": 4, "microbatches": 2, "stages": stages,
        "cyclic": {"rule": "cdp-v1", "setting": "stages"},
    }  # fmt: skip
    plan = plan_from(written, graph, "hand")
    assert plan.schedule is Schedule.CYCLIC
    assert plan.cyclic == Cyclic(CyclicRule.V1, CyclicSetting.STAGES)
