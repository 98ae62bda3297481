"""How models come to adapt: what is refused, and what an earlier run has earlier_corrections."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from galvatron_lite.cli import main
from galvatron_lite.errors import InputError
from galvatron_lite.runtime.monitor.attach import adapt_settings, correct_inputs, earlier_corrections
from galvatron_lite.runtime.monitor.correct import corrected
from galvatron_lite.runtime.monitor.log import write_record
from galvatron_lite.runtime.monitor.schema import (
    Adapt,
    AdaptAction,
    Corrections,
    Decided,
    Decision,
    Exhausted,
    LinkFactor,
    Planner,
    WindowRecord,
)
from tests.runtime.monitor.cases import started, wide_profile, window_on

FOUND = Corrections((LinkFactor("node", 3.0), LinkFactor("gone", 2.0)), (1.0, 1.5), residual=1.2)


@pytest.mark.parametrize(
    "settings", [Adapt(window=1), Adapt(patience=0), Adapt(threshold=0.0), Adapt(least_gain=1.0), Adapt(horizon=0)]
)
def test_settings_that_cannot_be_are_refused(settings: Adapt) -> None:
    with pytest.raises(InputError, match="adapt, "):
        adapt_settings(settings, "95%")


def test_the_budget_is_that_of_the_first_plan_where_none_is_said() -> None:
    assert adapt_settings(False, "40GB") is None
    assert adapt_settings(True, "40GB") == Adapt(mem="40GB")
    assert adapt_settings(Adapt(mem="30GB"), "40GB") == Adapt(mem="30GB")


def test_a_run_started_again_plans_with_what_it_learnt(tmp_path: Path) -> None:
    """Also with other devices, as after a lost process: links and memory are what they were."""
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
