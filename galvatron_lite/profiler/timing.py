"""Timing that can be trusted: warm-up, as many repetitions as the noise asks for, and what the spread was.

Under a process group every rank runs the same thing at the same moment (a barrier before each repetition), so that
contention for what the ranks share is in the figure. One repetition's figure is the mean over the ranks (compute,
whose noise evens out between two communications) or the slowest rank's (communication, which ends for all together);
the result is the median over the repetitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import mean, median, quantiles
from typing import TypeAlias

import torch
import torch.distributed as dist

Lap: TypeAlias = Callable[[], None]
"""Called by the timed code at the end of each of its parts."""


class Across(StrEnum):
    """Which figure of one repetition is taken over the ranks."""

    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class TimingRule:
    """How long to go on measuring one point.

    Attributes:
        warmup: repetitions that are thrown away.
        least: repetitions at the least.
        most: repetitions at the most.
        spread: stop once (third quartile - first quartile) / median is this small.
        seconds: stop once so much time was spent.
    """

    warmup: int = 2
    least: int = 5
    most: int = 60
    spread: float = 0.05
    seconds: float = 0.3


DEFAULT_RULE = TimingRule()


@dataclass(frozen=True, slots=True)
class Timing:
    """What one point took.

    Attributes:
        laps: seconds of each part, median over the repetitions.
        repetitions: how many were counted.
        spread: (third quartile - first quartile) / median of the sum of the parts.
    """

    laps: tuple[float, ...]
    repetitions: int
    spread: float

    @property
    def seconds(self) -> float:
        """Seconds of all parts together."""
        return sum(self.laps)


def time_laps(
    run: Callable[[Lap], object],
    device: torch.device | str,
    rule: TimingRule = DEFAULT_RULE,
    across: Across = Across.MEAN,
    group: dist.ProcessGroup | None = None,
) -> Timing:
    """Time the parts of ``run``, which calls the ``Lap`` it is given at the end of each part.

    Args:
        run: what to time; it must call its argument equally often each time.
        device: where it runs; CUDA is timed by events.
        rule: when to stop.
        across: how the ranks' figures become one; the ranks are those of ``group``.
        group: the process group; None takes the default group where one exists.

    Returns:
        The same figures on every rank.
    """
    place = torch.device(device)
    for _ in range(rule.warmup):
        _one(run, place, group)
    begun, rows, chunk = time.perf_counter(), list[list[float]](), rule.least
    while True:
        rows += _combine([_one(run, place, group) for _ in range(chunk)], across, group)
        spent = _slowest(time.perf_counter() - begun, group)
        chunk = min(rule.least, rule.most - len(rows))
        if chunk <= 0 or spent >= rule.seconds or _spread(rows) <= rule.spread:
            return Timing(tuple(median(column) for column in zip(*rows, strict=True)), len(rows), _spread(rows))


def time_call(
    run: Callable[[], object],
    device: torch.device | str,
    rule: TimingRule = DEFAULT_RULE,
    across: Across = Across.MEAN,
    group: dist.ProcessGroup | None = None,
) -> Timing:
    """Time one call; see ``time_laps``."""

    def whole(lap: Lap) -> None:
        run()
        lap()

    return time_laps(whole, device, rule, across, group)


def launched() -> bool:
    """Whether a process group of more than one rank exists."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _one(run: Callable[[Lap], object], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    if launched():
        dist.barrier(group)
    return _one_cuda(run, device) if device.type == "cuda" else _one_cpu(run)


def _one_cpu(run: Callable[[Lap], object]) -> list[float]:
    moments = [time.perf_counter()]
    run(lambda: moments.append(time.perf_counter()))
    return [after - before for before, after in pairwise(moments)]


def _one_cuda(run: Callable[[Lap], object], device: torch.device) -> list[float]:
    torch.cuda.synchronize(device)
    events: list[torch.cuda.Event] = []

    def lap() -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)

    lap()
    run(lap)
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def _combine(rows: list[list[float]], across: Across, group: dist.ProcessGroup | None) -> list[list[float]]:
    if not launched():
        return rows
    everyone: list[list[list[float]]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, rows, group=group)
    take: Callable[[Sequence[float]], float] = mean if across is Across.MEAN else max
    return [[take(column) for column in zip(*same, strict=True)] for same in zip(*everyone, strict=True)]


def _slowest(seconds: float, group: dist.ProcessGroup | None) -> float:
    if not launched():
        return seconds
    everyone = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(everyone, seconds, group=group)
    return max(everyone)


def _spread(rows: list[list[float]]) -> float:
    totals = [sum(row) for row in rows]
    if len(totals) < 2:
        return 0.0
    low, middle, high = quantiles(totals, n=4)
    return (high - low) / middle if middle > 0 else 0.0
