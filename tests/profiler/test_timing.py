"""Repetitions, laps and stopping, on code whose duration is known."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from galvatron_lite.profiler.timing import Lap, TimingRule, time_call, time_laps

RULE = TimingRule(warmup=1, least=4, most=12, spread=0.5, seconds=5.0)


def counting(seconds: Callable[[int], float]) -> tuple[Callable[[], None], list[int]]:
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        time.sleep(seconds(len(calls)))

    return run, calls


def test_stops_at_the_least_when_steady() -> None:
    run, calls = counting(lambda _: 0.002)
    timing = time_call(run, "cpu", RULE)
    assert timing.repetitions == 4
    assert len(calls) == 5
    assert timing.seconds >= 0.002


def test_stops_at_the_most_when_noisy() -> None:
    run, calls = counting(lambda call: 0.0005 if call % 2 else 0.01)
    timing = time_call(run, "cpu", TimingRule(1, 4, 10, 0.01, 5.0))
    assert timing.repetitions == 10
    assert len(calls) == 11
    assert timing.spread > 0.5


def test_stops_when_time_is_up() -> None:
    run, _ = counting(lambda call: 0.001 * (call % 5))
    assert time_call(run, "cpu", TimingRule(0, 4, 1000, 0.0, 0.02)).repetitions < 40


def test_laps_are_told_apart() -> None:
    def run(lap: Lap) -> None:
        time.sleep(0.001)
        lap()
        time.sleep(0.004)
        lap()

    timing = time_laps(run, "cpu", RULE)
    assert timing.laps[0] >= 0.001
    assert timing.laps[1] >= 0.004
    assert timing.seconds == pytest.approx(sum(timing.laps))


def test_one_outlier_does_not_move_the_median() -> None:
    run, _ = counting(lambda call: 0.2 if call == 3 else 0.002)
    assert time_call(run, "cpu", RULE).seconds < 0.1
