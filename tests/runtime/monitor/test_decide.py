"""Decisions of adaptation on simulated measurements, their log, and the settings."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from galvatron_lite.cli import main
from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runtime.monitor.attach import adapt_settings, correct_inputs, earlier_corrections
from galvatron_lite.runtime.monitor.correct import corrected, link_factors
from galvatron_lite.runtime.monitor.decide import State, begin, decide, read_log, replay, wants_links, write_record
from galvatron_lite.runtime.monitor.planning import PlanningProcess, answer, plan_name, step_seconds
from galvatron_lite.runtime.monitor.schema import (
    Adapt,
    AdaptAction,
    Corrections,
    Decided,
    Decision,
    Done,
    Event,
    Exhausted,
    LinkFactor,
    Planner,
    Record,
    Started,
    WindowRecord,
)
from tests.runtime.monitor.machines import fastest, started, wide_profile, window_on

SETTINGS = Adapt(window=10, warm_up=0, patience=2, cool_down=40, steps=100000)
SLOW = Corrections((LinkFactor("node", 60.0),))


def train(
    first: Started, truths: list[Corrections], noise: float = 0.0, slower: frozenset[str] = frozenset()
) -> tuple[State, list[Record]]:
    """Simulate a window for each of ``truths``, with the plans and switches that decisions lead to.

    Steps take three times as long under the plans in ``slower`` as predicted.
    """
    state, step, draw = begin(first), first.step, random.Random(1)
    records: list[Record] = [first]

    def feed(event: Event) -> State:
        after, decision = decide(state, event)
        records.append(event)
        records.extend([] if decision is None else [Decided(decision)])
        return after

    for truth in truths:
        step += state.settings.window
        plan_truth = replace(truth, residual=3.0) if plan_name(state.plan) in slower else truth
        window = window_on(first.profile, plan_truth, state.plan, step, draw.uniform(-noise, noise))
        window = window if wants_links(state, window) else replace(window, links=())
        state = feed(WindowRecord(window))
        if state.planning:
            state = feed(answer(state.query(step)))
        if state.target is not None:
            state = feed(Done(step, 0.5))
    return state, records


def actions(records: list[Record]) -> list[AdaptAction]:
    taken = [record.decision.action for record in records if isinstance(record, Decided)]
    return [action for action in taken if action is not AdaptAction.KEEP]


def test_nothing_is_done_where_all_is_as_predicted() -> None:
    _, records = train(started(SETTINGS), [Corrections()] * 10, noise=0.1)
    assert actions(records) == []


def test_a_slow_link_is_found_and_avoided_by_one_switch() -> None:
    """From the fourth window the link is sixty times slower. After two such windows there is one switch."""
    first = started(SETTINGS)
    state, records = train(first, [Corrections()] * 3 + [SLOW] * 10, noise=0.05)
    assert actions(records) == [AdaptAction.PLAN, AdaptAction.SWITCH]
    planned = next(r.decision for r in records if isinstance(r, Decided) and r.decision.action is AdaptAction.PLAN)
    assert planned.step == 50
    (link,) = planned.corrections.links
    assert link.per_byte == pytest.approx(60.0, rel=0.1)
    assert planned.corrections.devices == ()
    truth = corrected(first.profile, SLOW)
    assert step_seconds(truth, Corrections(), state.plan) < 0.95 * step_seconds(truth, Corrections(), first.plan)


def test_after_the_link_recovers_a_fast_plan_is_chosen_and_stays() -> None:
    gain = 0.02
    recovered = [Corrections()] * 12
    state, records = train(started(replace(SETTINGS, least_gain=gain)), [SLOW] * 10 + recovered, noise=0.01)
    assert actions(records)[:2] == [AdaptAction.PLAN, AdaptAction.SWITCH]
    assert actions(records).count(AdaptAction.SWITCH) <= 2
    best, last = (step_seconds(wide_profile(), Corrections(), plan) for plan in (fastest(wide_profile()), state.plan))
    assert last <= best / (1.0 - gain)


def test_a_link_that_comes_and_goes_does_not_make_plans_flap() -> None:
    """One window slow, one well, twelve times: patience keeps the plan."""
    _, records = train(started(SETTINGS), [SLOW, Corrections()] * 12)
    assert actions(records) == []


def test_new_plans_keep_what_is_pinned() -> None:
    first = started(SETTINGS)
    free = answer(replace(first, corrections=SLOW)).plan
    kept = answer(replace(first, corrections=SLOW, settings=Adapt(fix=("pp=1", "zero=3")))).plan
    assert {run.strategy.zero_stage for stage in free.stages for run in stage.runs} != {3}
    assert {run.strategy.zero_stage for stage in kept.stages for run in stage.runs} == {3}


def test_new_plans_keep_the_tolerance_and_the_margin_of_the_first() -> None:
    first = started(SETTINGS)
    plan = replace(first.plan, provenance=replace(first.plan.provenance, tolerance=0.05, margin=0.1))
    made_from = answer(begin(replace(first, plan=plan)).query(10)).plan.provenance
    assert (made_from.tolerance, made_from.margin) == (0.05, 0.1)


def test_a_plan_that_disappoints_is_left_for_good() -> None:
    first = started(SETTINGS)
    found = answer(replace(first, corrections=SLOW)).plan
    assert found is not None
    state, records = train(first, [SLOW] * 14, slower=frozenset({plan_name(found)}))
    taken = actions(records)
    assert taken[:3] == [AdaptAction.PLAN, AdaptAction.SWITCH, AdaptAction.BACK]
    assert AdaptAction.SWITCH not in taken[3:]
    assert plan_name(state.plan) == plan_name(first.plan)


def test_few_steps_left_do_not_pay_for_a_switch() -> None:
    _, records = train(started(replace(SETTINGS, steps=21)), [SLOW] * 2)
    assert actions(records) == [AdaptAction.PLAN]
    last = records[-1]
    assert isinstance(last, Decided)
    assert "does not pay" in last.decision.reason


def test_a_slow_device_gets_fewer_layers() -> None:
    truth = Corrections(devices=(1.0, 2.0))
    state, records = train(started(SETTINGS), [truth] * 6)
    assert actions(records) == [AdaptAction.PLAN, AdaptAction.SWITCH]
    planned = next(r.decision for r in records if isinstance(r, Decided) and r.decision.action is AdaptAction.PLAN)
    assert planned.corrections.devices[1] / planned.corrections.devices[0] == pytest.approx(2.0, rel=0.01)
    sizes = [sum(run.count for run in stage.runs) for stage in state.plan.stages]
    assert sizes[0] > sizes[1]


def test_memory_that_ran_out_makes_a_plan_that_takes_less() -> None:
    profile = wide_profile()
    first = started(SETTINGS, profile)
    peak = first.plan.prediction.peak_memory
    state, _ = decide(begin(first), Exhausted(10, (0, 1), factor=1.05 * 0.95 * 2**30 / peak))
    state, decision = decide(state, answer(state.query(10)))
    assert decision.action is AdaptAction.SWITCH
    assert state.target.prediction.peak_memory < peak


@pytest.mark.parametrize(("factor", "latency"), [(1.0, 0.0), (3.0, 0.0), (0.5, 0.0), (1.0, 2e-3), (8.0, 1e-3)])
def test_link_factors_are_those_that_points_were_made_with(factor: float, latency: float) -> None:
    """On nodes of two devices, where only the rack is slow."""
    profile = _on_nodes(wide_profile(4))
    truth = Corrections((LinkFactor("rack", factor, latency),))
    window = window_on(profile, truth, fastest(profile), 10)
    found = link_factors(window.links, 0.15)
    if (factor, latency) == (1.0, 0.0):
        assert found == ()
        return
    (link,) = found
    assert link.level == "rack"
    assert link.per_byte == pytest.approx(factor, rel=0.01)
    assert link.latency == pytest.approx(latency, abs=2e-5)


def _on_nodes(profile: Profile) -> Profile:
    level = profile.cluster.levels[0]
    levels = (replace(level, size=2), replace(level, name="rack", size=2, bandwidth=1e8))
    return replace(profile, cluster=replace(profile.cluster, levels=levels))


def test_a_log_is_replayed_to_the_same_decisions(tmp_path: Path) -> None:
    _, records = train(started(SETTINGS), [Corrections()] * 2 + [SLOW] * 8, noise=0.05)
    log = str(tmp_path / "log.jsonl")
    for record in records:
        write_record(log, record)
    again = read_log(tmp_path / "log.jsonl")
    assert again == records
    replayed = replay(again)
    assert len(replayed) == sum(isinstance(record, Decided) for record in records)
    assert all(one.same for one in replayed)
    changed = [
        replace(record, window=replace(record.window, seconds=(9.0, 9.0, 9.0)))
        if isinstance(record, WindowRecord)
        else record
        for record in again
    ]
    assert not all(one.same for one in replay(changed))


@pytest.mark.parametrize("line", ["{", '{"kind": "other"}', '{"kind": "done", "step": 1}', '{"kind": "done", "x": 1}'])
def test_logs_that_are_none_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(FileFormatError, match="line 1"):
        read_log(path)


def test_the_planning_process_says_what_this_one_does() -> None:
    question = replace(started(SETTINGS), corrections=SLOW)
    assert PlanningProcess(question).answer() == answer(question)


FOUND = Corrections((LinkFactor("node", 3.0), LinkFactor("gone", 2.0)), (1.0, 1.5), residual=1.2)


@pytest.mark.parametrize(
    "settings", [Adapt(window=1), Adapt(patience=0), Adapt(threshold=0.0), Adapt(least_gain=1.0), Adapt(horizon=0)]
)
def test_settings_that_cannot_be_are_refused(settings: Adapt) -> None:
    with pytest.raises(InputError, match="adapt, "):
        adapt_settings(settings, "95%")


def test_the_budget_is_that_of_the_first_plan_where_none_is_given() -> None:
    assert adapt_settings(False, "40GB") is None
    assert adapt_settings(True, "40GB") == Adapt(mem="40GB")
    assert adapt_settings(Adapt(mem="30GB"), "40GB") == Adapt(mem="30GB")


def test_a_run_started_again_plans_with_what_it_learnt(tmp_path: Path) -> None:
    """If the number of devices has changed, as after a lost process, corrections of links and memory still apply."""
    path = tmp_path / "log.jsonl"
    settings = Adapt(log=str(path))
    assert earlier_corrections(settings, wide_profile()) == Corrections()
    log = str(path)
    write_record(log, started(settings))
    write_record(log, Decided(Decision(20, AdaptAction.PLAN, "", FOUND)))
    write_record(log, Exhausted(30, (1,), 1.25))
    two, four = wide_profile(2), wide_profile(4)
    assert earlier_corrections(settings, two) == Corrections(FOUND.links[:1], FOUND.devices, 1.25)
    assert earlier_corrections(settings, four) == Corrections(FOUND.links[:1], (), 1.25)
    profile, budget = correct_inputs(two, earlier_corrections(settings, two), "50%")
    assert profile == corrected(two, earlier_corrections(settings, two))
    assert budget == int(0.5 * two.cluster.device.memory / 1.25)
    assert correct_inputs(two, Corrections(), "50%") == (two, "50%")


def test_replay_says_whether_decisions_come_out_as_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = started(Adapt(planner=Planner.INLINE))
    window = window_on(first.profile, Corrections(), first.plan, 20)
    reason = "as somebody wrote it"
    for name, status in (("other", 1), ("same", 0)):
        log = str(tmp_path / name)
        for record in (first, WindowRecord(window), Decided(Decision(20, AdaptAction.KEEP, reason))):
            write_record(log, record)
        monkeypatch.setattr(sys, "argv", ["galvatron", "adapt", "replay", str(tmp_path / name)])
        with pytest.raises(SystemExit) as ended:
            main()
        lines = capsys.readouterr().out.splitlines()
        assert int(ended.value.code or 0) == status
        assert ("otherwise" in lines[-1]) == bool(status)
        reason = lines[0].removeprefix("step 20: keep. ")
