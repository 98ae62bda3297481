"""The cyclic programmes: every rule, setting and number of workers, run on symbols."""

from __future__ import annotations

from collections import Counter

import pytest

from galvatron_lite.parallelism.cyclic.programme import CyclicProgramme, MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting, is_fresh
from tests.parallelism.cyclic.run_programme import Run

STEPS = 4
EVERY = [(rule, setting) for rule in CyclicRule for setting in CyclicSetting]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize(("rule", "setting"), EVERY)
@pytest.mark.parametrize("continued", [False, True])
def test_runs_with_the_versions_of_the_rule(
    workers: int, rule: CyclicRule, setting: CyclicSetting, continued: bool
) -> None:
    begin = 3 if continued else 0
    programme = CyclicProgramme(rule, setting, workers, begin, begin - continued)
    run = Run(programme, STEPS)
    assert len(run.done) == STEPS * 2 * workers * workers
    for _, one in run.done:
        moment = one.moment
        delayed = moment.step if is_fresh(rule, moment.worker, moment.stage, workers) else moment.step - 1
        assert one.version == max(delayed, programme.base)


@pytest.mark.parametrize("workers", [2, 3, 6])
def test_rule_v2_is_what_the_times_allow(workers: int) -> None:
    """A worker uses an update exactly if the last worker's backward pass comes before its own forward pass."""
    run = Run(CyclicProgramme(CyclicRule.V2, CyclicSetting.SINGLE, workers), 3)
    ends = {(one.moment.stage, one.moment.step): one.moment.time for _, one in run.done if one.finishes}
    for _, one in run.done:
        moment = one.moment
        if not moment.backward and moment.step:
            assert (one.version == moment.step) == (ends[moment.stage, moment.step - 1] < moment.time)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_every_stage_is_used_once_a_time_step(workers: int) -> None:
    run = Run(CyclicProgramme(CyclicRule.V2, CyclicSetting.SINGLE, workers), STEPS)
    used = Counter((one.moment.time, one.moment.stage) for _, one in run.done)
    steady = range(2 * (workers - 1), 2 * workers * STEPS)
    assert all(used[time, stage] == 1 for time in steady for stage in range(workers))
    assert max(used.values()) == 1


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize(("early", "most"), [(False, lambda n: n * (n + 1) // 2), (True, lambda n: n * n // 2 + 1)])
def test_stages_kept_on_one_device(workers: int, early: bool, most: object) -> None:
    programme = CyclicProgramme(CyclicRule.V2, CyclicSetting.SINGLE, workers, early_release=early)
    live, peak = 0, 0
    for _, one in Run(programme, STEPS).done:
        live += 0 if one.moment.backward else 1
        peak = max(peak, live)
        live -= 1 if one.moment.backward else 0
    assert live == 0
    assert peak <= most(workers)  # type: ignore[operator]
    if not early:
        assert peak == most(workers)  # type: ignore[operator]


@pytest.mark.parametrize("workers", [2, 3, 6])
@pytest.mark.parametrize("rule", CyclicRule)
def test_data_sends_one_stage_a_time_step(workers: int, rule: CyclicRule) -> None:
    run = Run(CyclicProgramme(rule, CyclicSetting.DATA, workers), STEPS)
    sent = Counter((time, message.source) for time, message in run.sent)
    assert max(sent.values()) == 1
    got = Counter((message.target, message.stage) for _, message in run.sent if message.kind is MessageContent.UPDATE)
    assert all(count <= STEPS for count in got.values())
    partial = sum(message.kind is MessageContent.PARTIAL for _, message in run.sent)
    assert partial == STEPS * workers * (workers - 1)


@pytest.mark.parametrize("workers", [2, 3, 6])
@pytest.mark.parametrize("rule", CyclicRule)
def test_stages_need_a_triangle_of_processes(workers: int, rule: CyclicRule) -> None:
    programme = CyclicProgramme(rule, CyclicSetting.STAGES, workers)
    assert programme.processes == workers * (workers + 1) // 2
    run = Run(programme, STEPS)
    holding: dict[int, tuple[int, int]] = {}
    for process, one in run.done:
        micro = (one.moment.step, one.moment.worker)
        if one.moment.backward:
            assert holding.pop(process) == micro
        else:
            assert process not in holding
            holding[process] = micro
    assert {stage for number in range(programme.processes) for stage in programme.stages_of(number)} == set(
        range(workers)
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("rule", CyclicRule)
@pytest.mark.parametrize("setting", [CyclicSetting.DATA, CyclicSetting.STAGES])
@pytest.mark.parametrize("steps", [1, 3])
def test_settling_brings_every_update_everywhere(
    workers: int, rule: CyclicRule, setting: CyclicSetting, steps: int
) -> None:
    programme = CyclicProgramme(rule, setting, workers)
    run = Run(programme, steps)
    run.settle()
    for process in run.processes:
        known = {(stage, step) for stage in programme.stages_of(process.number) for step in range(steps)}
        assert known <= process.updates
    assert not any(box for boxes in run.mail.values() for box in boxes.values())
