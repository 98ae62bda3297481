"""Timing that can be trusted: warm-up, as many repetitions as the noise asks for, and what the spread was.

Under a process group every rank runs the same thing at the same moment (a barrier before each repetition), so that
contention for what the ranks share is in the figure. One repetition's figure is the mean over the ranks (compute,
whose noise evens out between two communications) or the slowest rank's (communication, which ends for all together);
the result is the median over the repetitions. What is a difference is taken within each repetition, so that a machine
that becomes slower meanwhile does not show in it.

Tasks of a measurement, run one after the other on all ranks; the journal that an interrupted one resumes from.
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
    """Which figure of one repetition is taken over the ranks."""

    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class TimingRule:
    """How long to go on measuring one point."""

    warmup: int = 2  # repetitions that are thrown away
    least: int = 5  # repetitions at the least
    most: int = 60  # repetitions at the most
    spread: float = 0.05  # stop once (third quartile - first quartile) / median is this small
    seconds: float = 0.3  # stop once so much time was spent


DEFAULT_RULE = TimingRule()
BRIEF_RULE = TimingRule(warmup=1, least=3, most=6, spread=0.1, seconds=0.1)
"""For figures that decide little: whether one device computes again what it could keep."""
_PATIENCE = 4
"""How many times longer a rule allows to time a difference that does not stand out of its noise."""
_CLEAR = 2.0  # A difference stands out where it is so many times its noise


@dataclass(frozen=True, slots=True)
class Timing:
    """What one point took."""

    laps: tuple[float, ...]  # seconds of each part, median over the repetitions
    repetitions: int  # how many were counted
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
    """Time the parts of ``run``, which calls the ``Lap`` it is given at the end of each part.

    Args:
        run: what to time; it must call its argument equally often each time.
        device: where it runs; CUDA is timed by events.
        across: how the ranks' figures become one.
    """
    place = torch.device(device)
    for _ in range(rule.warmup):
        _one(run, place)
    begun, rows, chunk = time.perf_counter(), list[list[float]](), rule.least
    while True:
        more = [_one(run, place) for _ in range(chunk)]
        rows += _combine(more, [across] * len(more[0]))
        spent = max(of_all_ranks(time.perf_counter() - begun))
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
    return time_laps(single_part(run), device, rule, across)


@dataclass(frozen=True, slots=True)
class Term:
    """One of the times that a difference is made of."""

    weight: float  # what its seconds count
    run: Callable[[Lap], object]  # what to time; of the parts that it ends by calling its argument, the last one counts
    across: Across = Across.MEAN  # how the ranks' figures become one


@dataclass(frozen=True, slots=True)
class Difference:
    """What times differ by."""

    seconds: float  # the sum of all terms, median over the repetitions
    noise: float  # standard error of that, seconds
    repetitions: int  # how many were counted

    @property
    def is_clear(self) -> bool:
        """Whether it stands out of its noise."""
        return abs(self.seconds) > _CLEAR * self.noise


def time_difference(terms: Sequence[Term], device: torch.device | str, rule: TimingRule = DEFAULT_RULE) -> Difference:
    """Time all terms in turn, again and again; longer than the rule says where they hardly differ."""
    place, across = torch.device(device), [term.across for term in terms]

    def in_turn() -> list[float]:
        return [_one(term.run, place)[-1] for term in terms]

    for _ in range(rule.warmup):
        in_turn()
    begun, rows = time.perf_counter(), list[list[float]]()
    while True:
        rows += _combine([in_turn() for _ in range(rule.least)], across)
        sums = [sum(t.weight * seconds for t, seconds in zip(terms, row, strict=True)) for row in rows]
        low, middle, high = quantiles(sums, n=4) if len(sums) > 1 else sums * 3
        # the standard error of a median is 1.253 s / sqrt(n), with s by the quartiles (range / 1.349)
        difference = Difference(middle, 1.253 * (high - low) / 1.349 / sqrt(len(sums)), len(sums))
        spent = max(of_all_ranks(time.perf_counter() - begun))
        patience = 1 if difference.is_clear else _PATIENCE
        # a moment in which the machine stood still may have taken all of the time
        is_late = spent >= patience * len(terms) * rule.seconds and (difference.is_clear or len(rows) > rule.least)
        if is_late or len(rows) >= patience * rule.most or difference.noise <= rule.spread * abs(difference.seconds):
            return difference


def single_part(run: Callable[[], object]) -> Callable[[Lap], object]:
    """A call as what has one part."""

    def with_lap(lap: Lap) -> None:
        run()
        lap()

    return with_lap


def launched() -> bool:
    """Whether a process group of more than one rank exists."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _one(run: Callable[[Lap], object], device: torch.device) -> list[float]:
    if launched():
        dist.barrier()
    if device.type == "cuda":
        return _one_cuda(run, device)
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


def of_all_ranks(value: T) -> list[T]:
    """The value of every rank; that of this process where it is alone."""
    if not launched():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _combine(rows: list[list[float]], across: Sequence[Across]) -> list[list[float]]:
    """Rows of all ranks as one, each column in its way."""
    return [
        [fmean(column) if how is Across.MEAN else max(column) for how, column in zip(across, columns, strict=True)]
        for columns in (zip(*same, strict=True) for same in zip(*of_all_ranks(rows), strict=True))
    ]


def _spread(rows: list[list[float]]) -> float:
    totals = [sum(row) for row in rows]
    if len(totals) < 2:
        return 0.0
    low, middle, high = quantiles(totals, n=4)
    return (high - low) / middle if middle > 0 else 0.0


_IDENTITY = "identity"


class Journal:
    """One JSON object a line: first what is being measured, then one finished point each.

    A line that a crash cut short is dropped. A journal of something else is begun anew.

    Args:
        path: of the file; made when first written to.
        identity: what tells this measurement from another (a hash of model, machine and settings).
        resume: False begins anew whatever the file holds.
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
        """Keep a finished point; it is on disk when this returns."""
        self.finished[key] = value
        self._append({"key": key, "value": value})

    def remove(self) -> None:
        """Delete the file: the profile is written."""
        self.path.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    """The lines that can be read; what follows the last line break is cut off the file."""
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
"""Called with tasks done, tasks in all, and the label of the one that comes next."""


@dataclass(frozen=True, slots=True)
class MeasureTask:
    """One thing to measure."""

    key: str  # tells it from every other task of the profile
    label: str  # for people
    # measures it, on every rank at once; gets what is finished so far; gives plain data (JSON)
    run: Callable[[Mapping[str, Any]], Any]


def run_tasks(tasks: Sequence[MeasureTask], journal: Journal | None, progress: Progress | None = None) -> Results:
    """Run what is not finished yet, in order, and keep each result at once.

    Returns:
        Plain data by key, the same (rank 0's) on every rank.
    """
    results: Results = agree(dict(journal.finished) if journal else {})
    tell = progress if progress is not None and journal is not None else lambda *_: None
    for place, task in enumerate(tasks):
        tell(place, len(tasks), task.label)
        if task.key not in results:
            results[task.key] = agree(task.run(results))
            if journal:
                journal.add(task.key, results[task.key])
    tell(len(tasks), len(tasks), "done")
    return results


def agree(value: Any) -> Any:
    """Rank 0's value on every rank."""
    if not launched():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def first_rank() -> bool:
    """Whether this process is the one that writes files."""
    return not launched() or dist.get_rank() == 0


EVERY = 15.0  # seconds between lines


def notices(title: str) -> Progress:
    """A function (done, total, label) that says a line at the start, and every so often to the log.

    Training scripts have no place of their own for it, and minutes of silence look like a hang.
    """
    last = [float("-inf")]

    def tell(done: int, total: int, label: str) -> None:
        if monotonic() - last[0] >= EVERY:
            last[0] = monotonic()
            LOG.info(f"{title}: {done} of {total} ({label})")

    return tell
