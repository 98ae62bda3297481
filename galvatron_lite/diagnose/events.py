"""Reading a trace of ``torch.profiler`` (Chrome's trace format), bounded and checked."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, TypeGuard

from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import check_regular

Stretch = tuple[float, float]


class Cover:
    """The union of some stretches: disjoint and in order."""

    __slots__ = ("_ends", "_starts", "_sums")

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        merged: list[list[float]] = []
        for start, end in sorted(stretches):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._starts, self._ends = [one[0] for one in merged], [one[1] for one in merged]
        self._sums = [0.0, *accumulate(end - start for start, end in merged)]

    @property
    def stretches(self) -> Sequence[Stretch]:
        """Of the union."""
        return list(zip(self._starts, self._ends, strict=True))

    def inside(self, start: float, end: float) -> float:
        """How much of a stretch is covered."""
        return max(self._until(end) - self._until(start), 0.0)

    def rest(self, start: float, end: float) -> float:
        """How much of a stretch is not covered."""
        return max(end - start - self.inside(start, end), 0.0)

    def minus(self, other: Cover) -> Cover:
        """What of this is not covered by another one."""
        left: list[Stretch] = []
        for start, end in self.stretches:
            place = start
            first = bisect_right(other._ends, start)
            for hole, back in zip(other._starts[first:], other._ends[first:], strict=True):
                if hole >= end:
                    break
                if hole > place:
                    left.append((place, hole))
                place = max(place, back)
            if place < end:
                left.append((place, end))
        return Cover(left)

    def _until(self, moment: float) -> float:
        """How much lies before a moment."""
        place = bisect_left(self._starts, moment)
        if place == 0:
            return 0.0
        return self._sums[place] - max(self._ends[place - 1] - moment, 0.0)


MOST_BYTES = 2 * 2**30  # characters of text, unpacked
MOST_EVENTS = 5_000_000  # that are of use
_KINDS = frozenset({"cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset"})
_FEWER = "Trace fewer steps (profile_steps=range(10, 12))."


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """Something that took time."""

    name: str  # of the operation or range
    category: str  # what kind of event it is
    thread: str  # where it ran
    start: float  # start, end: seconds
    end: float
    sequence: int = -1  # number of the node of the autograd graph; -1: none
    external: int = -1  # number that joins a kernel with the operation that launched it; -1: none
    group: str = ""  # of ranks, of a collective, as far as the trace tells


@dataclass(frozen=True, slots=True)
class Trace:
    """A file."""

    path: Path  # of it
    events: tuple[TimedEvent, ...]  # in the order they began; longer ones first
    about: Mapping[str, Any]  # the other values of the file, by key


def read_trace(path: Path) -> Trace:
    """The events of a trace that are of use (operations, ranges, kernels), and what else it says of itself.

    Events are converted while the text is parsed, so that their objects are not in memory together.
    """

    def convert(value: dict[str, Any]) -> Any:
        return _event(value, path) if "ph" in value else value

    try:
        with _opened(check_regular(path)) as stream:
            text = stream.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError("trace", str(path), f"It cannot be read ({error}).") from error
    if len(text) > MOST_BYTES:
        raise FileFormatError("trace", str(path), f"It is over {MOST_BYTES >> 30} GiB long. {_FEWER}")
    try:
        about = json.loads(text, object_hook=convert, parse_constant=_refuse)
    except FileFormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FileFormatError("trace", str(path), f"It is no trace of a profiler: JSON is wanted ({error}).") from error
    about = {"traceEvents": about} if isinstance(about, list) else about
    values = about.pop("traceEvents", []) if isinstance(about, dict) else None
    if not isinstance(values, list) or any(not isinstance(value, (TimedEvent, dict, type(None))) for value in values):
        raise FileFormatError(
            f"{path}, traceEvents", str(values)[:30], "A list of events is wanted; each is an object."
        )
    events = [value for value in values if isinstance(value, TimedEvent)]
    if len(events) > MOST_EVENTS:
        raise FileFormatError("trace", str(path), f"It has over {MOST_EVENTS} events. {_FEWER}")
    return Trace(path, tuple(sorted(events, key=lambda one: (one.start, -one.end))), about)


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _event(value: dict[str, Any], path: Path) -> TimedEvent | None:
    """An event that is of use; None: one that is not."""
    category = value.get("cat")
    if value.get("ph") != "X" or not isinstance(category, str) or category not in _KINDS:
        return None
    name, start, duration = value.get("name"), value.get("ts"), value.get("dur")
    if not isinstance(name, str) or not _is_time(start) or not _is_time(duration) or duration < 0:
        raise FileFormatError(f"{path}, event {str(name)[:40]!r}", f"{start}, {duration}", "It has no time (ts, dur).")
    arguments = value.get("args")
    more = arguments if isinstance(arguments, dict) else {}
    seconds = float(start) / 1e6
    return TimedEvent(
        name, category, str(value.get("tid")), seconds, seconds + float(duration) / 1e6,
        _integer(more.get("Sequence number")), _integer(more.get("External id")), _group(more),
    )  # fmt: skip


def _is_time(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and abs(value) < 1e18


def _integer(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else -1


def _group(more: Mapping[str, Any]) -> str:
    """The group of a collective: its description and its size."""
    description, size = more.get("Process Group Description"), more.get("Group size")
    name = description if isinstance(description, str) and description not in ("", "undefined") else ""
    return f"{name} ({size} ranks)" if name and isinstance(size, int) else name
