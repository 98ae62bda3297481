"""Repetitions, laps and stopping, on a clock that only the timed code moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import median, stdev
from types import SimpleNamespace

import pytest

from galvatron_lite.profiler import timing
from galvatron_lite.profiler.timing import (
    Difference,
    Lap,
    Term,
    TimingRule,
    as_single_lap,
    time_call,
    time_difference,
    time_laps,
)

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


def test_laps_are_timed_separately(clock: Clock) -> None:
    def run(lap: Lap) -> None:
        clock.wait(0.001)
        lap()
        clock.wait(0.004)
        lap()

    found = time_laps(run, "cpu", RULE)
    assert found.laps == pytest.approx((0.001, 0.004))
    assert found.seconds == pytest.approx(0.005)


def test_a_difference_is_taken_within_a_repetition(clock: Clock) -> None:
    """On a machine that is twice as slow after a while, and still for a moment now and then."""
    calls: list[int] = []

    def term(weight: float, seconds: float) -> Term:
        def run() -> None:
            calls.append(1)
            clock.wait(seconds * (2 if len(calls) > 24 else 1) + (0.5 if len(calls) % 17 == 0 else 0.0))

        return Term(weight, as_single_lap(run))

    terms = term(1.0, 0.010), term(-1.0, 0.003), term(-2.0, 0.001)
    found = time_difference(terms, "cpu", replace(RULE, spread=0.0))
    assert found.is_clear
    assert found.repetitions == 12
    assert 0.005 <= found.seconds <= 0.010


def test_a_difference_below_its_noise_is_timed_for_longer(clock: Clock) -> None:
    draw = Random(1)

    def term(weight: float, seconds: float) -> Term:
        return Term(weight, as_single_lap(lambda: clock.wait(seconds + draw.uniform(0.0, 0.001))))

    clear, hidden = (
        time_difference([term(1.0, 0.010 + more), term(-1.0, 0.010)], "cpu", RULE) for more in (0.004, 1e-5)
    )
    assert clear.is_clear
    assert clear.repetitions < RULE.most
    assert clear.seconds == pytest.approx(0.004, abs=4 * clear.noise)
    assert not hidden.is_clear
    assert hidden.repetitions == 4 * RULE.most
    assert hidden.seconds == pytest.approx(1e-5, abs=4 * hidden.noise)


def test_a_moment_in_which_the_machine_stands_still_does_not_end_it(clock: Clock) -> None:
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        clock.wait(100.0 if len(calls) == 2 else 0.002)

    found = time_difference([Term(1.0, as_single_lap(run))], "cpu", TimingRule(0, 2, 2, 0.0, 0.02))
    assert found.repetitions == 4
    assert found.seconds == pytest.approx(0.002)


def test_noise_is_the_standard_error_of_the_median(clock: Clock) -> None:
    """Of so many normal figures, against what medians of such scatter by."""
    draw = Random(2)

    def found() -> Difference:
        terms = [Term(1.0, as_single_lap(lambda: clock.wait(1.0 + draw.gauss(0.0, 0.1))))]
        return time_difference(terms, "cpu", TimingRule(0, 40, 40, 0.0, 1e9))

    every = [found() for _ in range(400)]
    assert median(one.noise for one in every) == pytest.approx(stdev(one.seconds for one in every), rel=0.15)


def test_only_the_last_part_of_a_term_counts(clock: Clock) -> None:
    def run(lap: Lap) -> None:
        clock.wait(1.0)
        lap()
        clock.wait(0.25)
        lap()

    assert time_difference([Term(2.0, run)], "cpu", RULE).seconds == pytest.approx(0.5)
