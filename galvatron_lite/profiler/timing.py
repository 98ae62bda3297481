"""Times code on all ranks with warm-up and adaptive repetitions, and runs the tasks of a profile with a journal.

All ranks run the same code at the same moment (a barrier precedes each repetition), so that contention for shared
resources is in the figure. A repetition counts as the mean over ranks (compute, whose noise averages out between two
communications) or the slowest rank (communication, which ends for all ranks together); the result is the median over
repetitions. Differences are taken within a repetition, so that a machine that slows down meanwhile does not affect
them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, median, quantiles
from time import monotonic
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from galvatron_lite.errors import LOG

T = TypeVar("T")
Lap: TypeAlias = Callable[[], None]  # called by the timed code at the end of each of its parts


class Across(StrEnum):
    """How the figures of all ranks combine in one repetition."""

    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class TimingRule:
    """How long to go on measuring one point."""

    warmup: int = 2  # repetitions that are discarded
    least: int = 5  # fewest repetitions
    most: int = 60  # most repetitions
    spread: float = 0.05  # stop once (third quartile - first quartile) / median is at most this
    seconds: float = 0.3  # stop once this time was spent


DEFAULT_RULE = TimingRule()
BRIEF_RULE = TimingRule(warmup=1, least=3, most=6, spread=0.1, seconds=0.1)
"""For plans of one device, whose only choice is recomputation."""
_PATIENCE = 4
"""Factor on repetitions and time for a difference that is not clear."""
_CLEAR = 2.0  # a difference is clear if it exceeds its noise by this factor


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured seconds."""

    laps: tuple[float, ...]  # seconds of each part, median over the repetitions
    repetitions: int  # number of counted repetitions
    spread: float  # (third quartile - first quartile) / median of the sum of the parts

    @property
    def seconds(self) -> float:
        """Seconds of all parts together."""
        return sum(self.laps)


def time_laps(
    run: Callable[[Lap], object],
    device: torch.device | str,
    rule: TimingRule = DEFAULT_RULE,
    across: Across = Across.MEAN,
) -> Timing:
    """Time the parts of ``run``, which calls its argument at the end of each part.

    Args:
        run: the code to time; it must call its argument equally often each time.
        device: where it runs; CUDA is timed by events.
        rule: how long to time.
        across: how the figures of ranks combine.
    """
    place = torch.device(device)
    for _ in range(rule.warmup):
        _time_once(run, place)
    begun, rows, chunk = time.perf_counter(), list[list[float]](), rule.least
    while True:
        more = [_time_once(run, place) for _ in range(chunk)]
        rows += _combine(more, [across] * len(more[0]))
        spent = max(gather_ranks(time.perf_counter() - begun))
        chunk = min(rule.least, rule.most - len(rows))
        if chunk <= 0 or spent >= rule.seconds or _spread(rows) <= rule.spread:
            return Timing(tuple(median(column) for column in zip(*rows, strict=True)), len(rows), _spread(rows))


def time_call(
    run: Callable[[], object],
    device: torch.device | str,
    rule: TimingRule = DEFAULT_RULE,
    across: Across = Across.MEAN,
) -> Timing:
    """Time one call; see ``time_laps``."""
    return time_laps(as_single_lap(run), device, rule, across)


@dataclass(frozen=True, slots=True)
class Term:
    """A weighted time in a difference."""

    weight: float  # factor on its seconds
    run: Callable[[Lap], object]  # the code to time, as for ``time_laps``; its last lap counts
    across: Across = Across.MEAN  # how the figures of ranks combine


@dataclass(frozen=True, slots=True)
class Difference:
    """A measured difference of times."""

    seconds: float  # the weighted sum of all terms, median over the repetitions
    noise: float  # its standard error, seconds
    repetitions: int  # number of counted repetitions

    @property
    def is_clear(self) -> bool:
        """Whether the difference exceeds its noise."""
        return abs(self.seconds) > _CLEAR * self.noise


def time_difference(terms: Sequence[Term], device: torch.device | str, rule: TimingRule = DEFAULT_RULE) -> Difference:
    """Time all terms in turn, repeatedly; longer than the rule allows while the difference is not clear."""
    place, across = torch.device(device), [term.across for term in terms]

    def in_turn() -> list[float]:
        return [_time_once(term.run, place)[-1] for term in terms]

    for _ in range(rule.warmup):
        in_turn()
    begun, rows = time.perf_counter(), list[list[float]]()
    while True:
        rows += _combine([in_turn() for _ in range(rule.least)], across)
        sums = [sum(t.weight * seconds for t, seconds in zip(terms, row, strict=True)) for row in rows]
        low, middle, high = quantiles(sums, n=4) if len(sums) > 1 else sums * 3
        # the standard error of a median is 1.253 s / sqrt(n), with s by the quartiles (range / 1.349)
        difference = Difference(middle, 1.253 * (high - low) / 1.349 / sqrt(len(sums)), len(sums))
        spent = max(gather_ranks(time.perf_counter() - begun))
        patience = 1 if difference.is_clear else _PATIENCE
        # a stall of the machine may have used up all of the time, so an unclear difference is repeated once more
        is_late = spent >= patience * len(terms) * rule.seconds and (difference.is_clear or len(rows) > rule.least)
        if is_late or len(rows) >= patience * rule.most or difference.noise <= rule.spread * abs(difference.seconds):
            return difference


def as_single_lap(run: Callable[[], object]) -> Callable[[Lap], object]:
    """Wrap a call for ``time_laps``, as a single part."""

    def with_lap(lap: Lap) -> None:
        run()
        lap()

    return with_lap


def launched() -> bool:
    """Whether a process group of more than one rank exists."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _time_once(run: Callable[[Lap], object], device: torch.device) -> list[float]:
    if launched():
        dist.barrier()
    if device.type == "cuda":
        return _time_once_cuda(run, device)
    moments = [time.perf_counter()]
    run(lambda: moments.append(time.perf_counter()))
    return [after - before for before, after in pairwise(moments)]


def _time_once_cuda(run: Callable[[Lap], object], device: torch.device) -> list[float]:
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


def gather_ranks(value: T) -> list[T]:
    """Return the values of all ranks."""
    if not launched():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _combine(rows: list[list[float]], across: Sequence[Across]) -> list[list[float]]:
    """Combine the rows of all ranks, each column by its rule."""
    return [
        [fmean(column) if how is Across.MEAN else max(column) for how, column in zip(across, columns, strict=True)]
        for columns in (zip(*same, strict=True) for same in zip(*gather_ranks(rows), strict=True))
    ]


def _spread(rows: list[list[float]]) -> float:
    totals = [sum(row) for row in rows]
    if len(totals) < 2:
        return 0.0
    low, middle, high = quantiles(totals, n=4)
    return (high - low) / middle if middle > 0 else 0.0


_IDENTITY = "identity"


class Journal:
    """A file of finished measurements, one JSON object a line, after a line that identifies the profile.

    A line that a crash cut short is dropped. A journal of another identity is begun anew.

    Args:
        path: path of the file.
        identity: a hash of model, machine and settings.
        resume: whether to keep the measurements of an existing file of this identity.
    """

    def __init__(self, path: Path, identity: str, resume: bool = True) -> None:
        self.path = path
        lines = _complete_lines(path) if resume else []
        same = bool(lines) and lines[0].get(_IDENTITY) == identity
        self.finished: dict[str, Any] = {line["key"]: line["value"] for line in lines[1:] if "key" in line and same}
        path.parent.mkdir(parents=True, exist_ok=True)
        if not same:
            path.write_text("", encoding="utf-8")
            self._append({_IDENTITY: identity})

    def add(self, key: str, value: Any) -> None:
        """Add a finished measurement; it is on disk when this returns."""
        self.finished[key] = value
        self._append({"key": key, "value": value})

    def remove(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines that can be read, and truncate the file after its last line break."""
    try:
        raw = path.read_bytes()
    except OSError:
        return []
    lines = raw[: raw.rfind(b"\n") + 1]
    if len(lines) < len(raw):
        with path.open("r+b") as stream:
            stream.truncate(len(lines))
    parsed = []
    for line in lines.splitlines():
        with suppress(ValueError):
            parsed.append(json.loads(line))
    return [line for line in parsed if isinstance(line, dict)]


Results: TypeAlias = dict[str, Any]  # plain data of finished tasks by key

Progress: TypeAlias = Callable[[int, int, str], object]
"""Called with finished tasks, all tasks, and the label of the next one."""


@dataclass(frozen=True, slots=True)
class MeasureTask:
    """One measurement."""

    key: str  # unique in the profile
    label: str  # for people
    run: Callable[
        [Mapping[str, Any]], Any
    ]  # measures on all ranks; takes the results so far, returns plain data (JSON)


def run_tasks(tasks: Sequence[MeasureTask], journal: Journal | None, progress: Progress | None = None) -> Results:
    """Run the tasks that the journal does not hold, in order, and add each result to it.

    Returns:
        Plain data by key, those of rank 0 on every rank.
    """
    results: Results = from_first_rank(dict(journal.finished) if journal else {})
    report = progress if progress is not None and journal is not None else lambda *_: None
    for number, task in enumerate(tasks):
        report(number, len(tasks), task.label)
        if task.key not in results:
            results[task.key] = from_first_rank(task.run(results))
            if journal:
                journal.add(task.key, results[task.key])
    report(len(tasks), len(tasks), "done")
    return results


def from_first_rank(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    if not launched():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def is_first_rank() -> bool:
    """Whether this process writes files."""
    return not launched() or dist.get_rank() == 0


LOG_INTERVAL = 15.0  # seconds between lines of progress


def log_progress(title: str) -> Progress:
    """Return a ``Progress`` that logs a line at the start and then regularly, for scripts without a display."""
    last = [float("-inf")]

    def report(done: int, total: int, label: str) -> None:
        if monotonic() - last[0] >= LOG_INTERVAL:
            last[0] = monotonic()
            LOG.info(f"{title}: {done} of {total} ({label})")

    return report
