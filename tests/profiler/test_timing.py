"""Repetitions, laps and stopping, on a clock that only the timed code moves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from galvatron_lite.profiler import timing
from galvatron_lite.profiler.timing import Lap, TimingRule, time_call, time_laps

RULE = TimingRule(warmup=1, least=4, most=12, spread=0.5, seconds=5.0)


class Clock:
    """Stands still but for ``wait``."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def counting(clock: Clock, seconds: Callable[[int], float]) -> tuple[Callable[[], None], list[int]]:
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        clock.wait(seconds(len(calls)))

    return run, calls


def test_stops_at_the_least_when_steady(clock: Clock) -> None:
    run, calls = counting(clock, lambda _: 0.002)
    found = time_call(run, "cpu", RULE)
    assert found.repetitions == 4
    assert len(calls) == 5
    assert found.seconds == pytest.approx(0.002)
    assert found.spread == pytest.approx(0.0)


def test_stops_at_the_most_when_noisy(clock: Clock) -> None:
    run, calls = counting(clock, lambda call: 0.0005 if call % 2 else 0.01)
    found = time_call(run, "cpu", TimingRule(1, 4, 10, 0.01, 5.0))
    assert found.repetitions == 10
    assert len(calls) == 11
    assert found.spread > 0.5


def test_stops_when_time_is_up(clock: Clock) -> None:
    run, _ = counting(clock, lambda call: 0.001 * (1 + call % 5))
    found = time_call(run, "cpu", TimingRule(0, 4, 1000, 0.0, 0.02))
    assert found.repetitions == 8
    assert clock.now >= 0.02


def test_laps_are_told_apart(clock: Clock) -> None:
    def run(lap: Lap) -> None:
        clock.wait(0.001)
        lap()
        clock.wait(0.004)
        lap()

    found = time_laps(run, "cpu", RULE)
    assert found.laps == pytest.approx((0.001, 0.004))
    assert found.seconds == pytest.approx(0.005)


def test_one_outlier_does_not_move_the_median(clock: Clock) -> None:
    run, _ = counting(clock, lambda call: 0.2 if call == 3 else 0.002)
    assert time_call(run, "cpu", RULE).seconds == pytest.approx(0.002)


def test_a_real_clock_runs() -> None:
    assert time_call(lambda: sum(range(1000)), "cpu", RULE).seconds > 0
