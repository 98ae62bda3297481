"""What diagnose prints: costs apart from gains, each advice once, and what tracing itself took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from galvatron_lite.cli.runs import print_diagnosis as _print
from galvatron_lite.diagnose.diagnosis import Diagnosis, DiagnosisInput, MemoryRow, _backend, _untraced
from galvatron_lite.diagnose.expected import RankTimes, Where, expect
from galvatron_lite.diagnose.findings import GLOO, NCCL, Cause, Finding, _of_links, findings, rank_words
from galvatron_lite.runs.schema import RecordedRun, RunHeader, StepRecord
from tests.diagnose.jobs import known_profile, plan_of


def test_what_is_quicker_has_no_advice() -> None:
    profile = known_profile()
    expected = expect(profile, plan_of(profile))
    times = [
        RankTimes(rank, expected.seconds, 3, optimizer=group.optimizer + change, other=group.other)
        for group in expected.groups
        for rank, change in zip(group.ranks, [-0.9 * expected.seconds] * len(group.ranks), strict=True)
    ]
    found = [one for one in findings(times, expected) if one.cause is Cause.OPTIMIZER]
    assert found
    assert all(one.seconds < 0 and one.advice == "" for one in found)
    slower = [replace(one, optimizer=2 * expected.seconds) for one in times]
    assert all(one.advice for one in findings(slower, expected) if one.cause is Cause.OPTIMIZER)


def test_costs_come_with_each_advice_once_and_gains_apart(capsys: pytest.CaptureFixture[str]) -> None:
    found = (
        Finding(Cause.HOST, "in no layer", 0.04, 0.05, 0.01, "Look here.", stage=0),
        Finding(Cause.HOST, "in no layer", 0.03, 0.04, 0.01, "Look here.", stage=1),
        Finding(Cause.RANK, "rank 1", 0.02, 0.03, 0.01, "Look there.", (1,)),
        Finding(Cause.OPTIMIZER, "the update", -0.02, 0.01, 0.03, ""),
    )
    told = Diagnosis("run", 3, 0.233, 0.1, True, found, 0.0, (MemoryRow((1, 1), 10, 10),), (), 0.145)
    _print(told)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "145 ms a step, predicted 100 ms (+45%); without the profiler."
    assert "they took 233 ms" in lines[1]
    assert [sum(words in line for line in lines) for words in ("Look here.", "As for 1.", "Look there.")] == [1, 1, 1]
    assert sum("rank 1: 30 ms" in line and "rank: rank" not in line for line in lines) == 1
    apart = next(number for number, line in enumerate(lines) if line.startswith("Quicker than predicted"))
    assert lines[apart + 1].startswith("    -20 ms  optimizer: the update")
    assert any(line.startswith("Memory on rank 1:") for line in lines)


def test_advice_is_of_what_carries_the_messages() -> None:
    profile = known_profile()
    expected = expect(profile, plan_of(profile))
    times = [RankTimes(rank, expected.seconds, 3) for group in expected.groups for rank in group.ranks]
    source = DiagnosisInput("run", None, expected.plan, tuple(times))
    assert _backend(source, profile) == (GLOO if profile.cluster.device.name.startswith("CPU ") else NCCL)
    assert "NCCL" in _of_links(Where.GRADIENTS, NCCL)
    assert "NCCL" not in _of_links(Where.GRADIENTS, GLOO)


def test_ranks_in_words() -> None:
    assert (rank_words(1, 1), rank_words(0, 3)) == ("rank 1", "ranks 0..3")


def test_steps_without_the_profiler_are_told_of_a_traced_run() -> None:
    plan = plan_of(known_profile())
    steps = [StepRecord(number, 1.0, own, profiled=number == 3) for number, own in enumerate((9.0, 0.1, 0.2, 5.0, 0.3))]
    run = RecordedRun(Path("run"), (RunHeader(1, plan, "abc", 1.0),), tuple(steps))
    assert _untraced(run) == 0.2
    assert _untraced(None) is None
    assert _untraced(replace(run, steps=())) is None
