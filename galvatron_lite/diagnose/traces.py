"""Measures the parts of a step on a rank from a trace of ``torch.profiler`` (Chrome's format) of bounded size.

On CPUs the main thread counts. Forward of a layer is its range; backward is the time from one node of the autograd
graph to the next, for the layer whose forward created the node (with the same sequence number). Communication counts
while no operation runs. On GPUs kernels count, each for the layer of the operation that launched it; communication
counts while no other kernel runs, and time without kernels is host time.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, TypeGuard

from galvatron_lite.diagnose.expected import RankTimes, WaitPlace
from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import check_regular
from galvatron_lite.runs.schema import LAYER, METADATA, PART, STEP, StepPart

Interval = tuple[float, float]


class IntervalUnion:
    """The union of time intervals: disjoint and in order."""

    __slots__ = ("_ends", "_starts", "_sums")

    def __init__(self, stretches: Iterable[Interval]) -> None:
        merged: list[list[float]] = []
        for start, end in sorted(stretches):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._starts, self._ends = [start for start, _ in merged], [end for _, end in merged]
        self._sums = [0.0, *accumulate(end - start for start, end in merged)]

    @property
    def intervals(self) -> Sequence[Interval]:
        """The disjoint intervals."""
        return list(zip(self._starts, self._ends, strict=True))

    def covered(self, start: float, end: float) -> float:
        """Return the length of an interval that the union covers."""
        return max(self._covered_before(end) - self._covered_before(start), 0.0)

    def uncovered(self, start: float, end: float) -> float:
        """Return the length of an interval that the union does not cover."""
        return max(end - start - self.covered(start, end), 0.0)

    def difference(self, other: IntervalUnion) -> IntervalUnion:
        """Return the parts of this union that ``other`` does not cover."""
        remaining: list[Interval] = []
        for start, end in self.intervals:
            position = start
            first = bisect_right(other._ends, start)
            for other_start, other_end in zip(other._starts[first:], other._ends[first:], strict=True):
                if other_start >= end:
                    break
                if other_start > position:
                    remaining.append((position, other_start))
                position = max(position, other_end)
            if position < end:
                remaining.append((position, end))
        return IntervalUnion(remaining)

    def _covered_before(self, moment: float) -> float:
        """Return the covered length before a moment."""
        index = bisect_left(self._starts, moment)
        if index == 0:
            return 0.0
        return self._sums[index] - max(self._ends[index - 1] - moment, 0.0)


MOST_BYTES = 2 * 2**30  # most characters of text, unpacked
MOST_EVENTS = 5_000_000  # most relevant events
_KINDS = frozenset({"cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset"})
_FEWER = "Trace fewer steps (profile_steps=range(10, 12))."


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An operation, range or kernel."""

    name: str
    category: str  # category of the event in the trace
    thread: str
    start: float  # seconds
    end: float  # seconds
    sequence: int = -1  # number of the node of the autograd graph; -1: none
    correlation: int = -1  # number that a kernel shares with the operation that launched it; -1: none
    group: str = ""  # group of ranks of a collective, if the trace names it


@dataclass(frozen=True, slots=True)
class Trace:
    """The content of a trace file."""

    path: Path
    events: tuple[TimedEvent, ...]  # by start; longer ones first
    metadata: Mapping[str, Any]  # the other values of the file, by key


def read_trace(path: Path) -> Trace:
    """Read the relevant events (operations, ranges, kernels) and the metadata of a trace.

    Events are converted while the text is parsed, so that their objects are never all in memory.

    Raises:
        FileFormatError: a file that is no trace or too large.
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
    return Trace(path, tuple(sorted(events, key=lambda event: (event.start, -event.end))), about)


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _event(value: dict[str, Any], path: Path) -> TimedEvent | None:
    """Return a relevant event; None for others."""
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
    """Return the group of a collective: its description and its size."""
    description, size = more.get("Process Group Description"), more.get("Group size")
    name = description if isinstance(description, str) and description not in ("", "undefined") else ""
    return f"{name} ({size} ranks)" if name and isinstance(size, int) else name


_USERS_STEP = "ProfilerStep#"
_NODE = "autograd::engine::evaluate_function: "
_MESSAGES = ("gloo:", "nccl:", "c10d::")
_COLLECTIVES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
    "broadcast": "broadcast", "send": "send_recv", "recv": "send_recv", "barrier": "barrier", "gather": "gather",
    "scatter": "scatter",
}  # fmt: skip
_PLACES = {
    StepPart.GRADIENTS: WaitPlace.GRADIENTS,
    StepPart.CHECK: WaitPlace.CHECK,
    StepPart.OPTIMIZER: WaitPlace.OPTIMIZER,
}
"""The place of communication by the part of a step; in other parts it is inside layers."""


def rank_of(trace: Trace) -> int:
    """Return the rank that recorded a trace."""
    for key in (METADATA, "distributedInfo"):
        metadata = trace.metadata.get(key)
        rank = metadata.get("rank") if isinstance(metadata, dict) else None
        if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**31:
            return rank
    return 0


def times_of(trace: Trace) -> RankTimes:
    """Return the times of the steps of a trace."""
    steps = _StepTimes(trace, _steps(trace))
    if steps.kernels:
        steps.add_kernel_times()
    else:
        steps.add_host_times()
    return steps.times()


def _steps(trace: Trace) -> list[TimedEvent]:
    """Return the steps: ours, else the user's (``profiler.step()``), else the full trace as one step."""
    for name in (STEP, _USERS_STEP):
        events = [
            event for event in trace.events if event.name.startswith(name) and event.category == "user_annotation"
        ]
        if events:
            return events
    if not trace.events:
        raise FileFormatError("trace", str(trace.path), "It holds no operations: trace whole training steps.")
    first, last = trace.events[0], max(trace.events, key=lambda event: event.end)
    return [TimedEvent("all", "user_annotation", first.thread, first.start, last.end)]


def kind_of(name: str) -> str:
    """Return the kind of a collective by its name in a trace; empty if it is none."""
    plain = "".join(letter for letter in name.lower() if letter.isalpha())
    return next((kind for word, kind in _COLLECTIVES.items() if word in plain), "")


class _Ranges:
    """Finds the range that contains an operation, among ranges of each thread that do not overlap."""

    def __init__(self, ranges: Sequence[TimedEvent]) -> None:
        self._ranges: dict[str, list[TimedEvent]] = {}
        for event in ranges:
            self._ranges.setdefault(event.thread, []).append(event)
        self._starts = {thread: [event.start for event in events] for thread, events in self._ranges.items()}

    def around(self, operation: TimedEvent) -> TimedEvent | None:
        """Return the range that contains an operation; None if there is none."""
        ranges = self._ranges.get(operation.thread, [])
        index = bisect_right(self._starts.get(operation.thread, []), operation.start) - 1
        return ranges[index] if index >= 0 and ranges[index].end >= operation.end else None


class _StepTimes:
    """Sums up the events of a trace by the parts of its steps."""

    def __init__(self, trace: Trace, steps: Sequence[TimedEvent]) -> None:
        self._trace, self._steps = trace, steps
        within = IntervalUnion((step.start, step.end) for step in steps)
        events = [
            event for event in trace.events if within.covered(event.start, event.end) > 0 or event.start == event.end
        ]
        self.kernels = [event for event in events if event.category in ("kernel", "gpu_memcpy", "gpu_memset")]
        ranges = [event for event in events if event.category == "user_annotation"]
        self._operations = [event for event in events if event.category == "cpu_op"]
        self._parts = [range_ for range_ in ranges if range_.name.startswith(PART)]
        self._layers = [range_ for range_ in ranges if range_.name.startswith(LAYER)]
        if self.kernels:
            self._messages = [kernel for kernel in self.kernels if "nccl" in kernel.name.lower()]
        else:
            events = [*ranges, *self._operations]
            messages = [event for event in events if event.name.startswith(_MESSAGES) and kind_of(event.name)]
            # messages between stages start early, and count as waiting
            has_waiting = bool(self._parts_of(StepPart.WAITING))
            self._messages = [event for event in messages if not has_waiting or kind_of(event.name) != "send_recv"]
        self._starts = [part.start for part in self._parts]
        # sums over all steps, in seconds
        self._forward, self._backward = defaultdict[str, float](float), defaultdict[str, float](float)
        self._communication = defaultdict[tuple[WaitPlace, str], float](float)
        self._optimizer = self._waiting = 0.0

    def add_host_times(self) -> None:
        """Sum up what the main thread did."""
        messages = IntervalUnion((message.start, message.end) for message in self._messages)
        computes = IntervalUnion(
            (operation.start, operation.end) for operation in self._operations if operation.name.startswith("aten::")
        )
        exposed = messages.difference(computes)
        for layer in self._outermost(self._layers):
            if self._part_at(layer.start) is not StepPart.BACKWARD:
                self._forward[layer.name.removeprefix(LAYER)] += exposed.uncovered(layer.start, layer.end)
        for name, start, end in self._backward_intervals():
            self._backward[name] += exposed.uncovered(start, end)
        self._add_communication(exposed)
        for part in (StepPart.GRADIENTS, StepPart.CHECK):
            self._add_waiting(part, computes)
        self._optimizer = sum(
            exposed.uncovered(update.start, update.end) for update in self._parts_of(StepPart.OPTIMIZER)
        )
        self._waiting = sum(part.end - part.start for part in self._parts_of(StepPart.WAITING))

    def add_kernel_times(self) -> None:
        """Sum up what kernels did."""
        computes = [kernel for kernel in self.kernels if "nccl" not in kernel.name.lower()]
        covered = IntervalUnion((kernel.start, kernel.end) for kernel in computes)
        exposed = IntervalUnion((message.start, message.end) for message in self._messages).difference(covered)
        launched = {operation.correlation: operation for operation in self._operations if operation.correlation >= 0}
        layers, nodes, layer_of = _Ranges(self._layers), _Ranges(self._nodes()), self._layer_of_nodes()
        for kernel in computes:
            operation = launched.get(kernel.correlation)
            part = StepPart.OTHER if operation is None else self._part_at(operation.start)
            seconds = kernel.end - kernel.start
            if part is StepPart.OPTIMIZER:
                self._optimizer += seconds
                continue
            node = None if operation is None else nodes.around(operation)
            layer = None if operation is None else layers.around(operation)
            if node is not None and node.sequence in layer_of:
                self._backward[layer_of[node.sequence]] += seconds
            elif layer is not None:
                self._forward[layer.name.removeprefix(LAYER)] += seconds
        self._add_communication(exposed, launched)
        self._waiting = self._communication.pop((WaitPlace.LAYERS, "send_recv"), 0.0)

    def times(self) -> RankTimes:
        """Return the times of a mean step; the remainder is ``other``."""
        count, total = len(self._steps), sum(step.end - step.start for step in self._steps)
        forward = {name: seconds / count for name, seconds in self._forward.items()}
        backward = {name: seconds / count for name, seconds in self._backward.items()}
        communication = {key: seconds / count for key, seconds in self._communication.items()}
        optimizer, waiting = self._optimizer / count, self._waiting / count
        explained = sum(sum(parts.values()) for parts in (forward, backward, communication)) + optimizer + waiting
        return RankTimes(
            rank_of(self._trace), total / count, count, forward, backward, communication, optimizer, waiting,
            max(total / count - explained, 0.0), traced=True,
            groups={kind_of(message.name): message.group for message in self._messages if message.group},
            has_layers=bool(self._layers), has_parts=bool(self._parts),
        )  # fmt: skip

    def _add_communication(self, exposed: IntervalUnion, launched: Mapping[int, TimedEvent] | None = None) -> None:
        """Sum up exposed communication; if several kinds run at once, the one that started first counts."""
        counted = 0.0
        for message in sorted(self._messages, key=lambda event: event.start):
            start = max(message.start, counted)
            if start >= message.end:
                continue
            counted = message.end
            cause = message if launched is None else launched.get(message.correlation, message)
            for part, begin, end in self._split_by_part(start, message.end, None if launched is None else cause.start):
                if part is not StepPart.WAITING and (seconds := exposed.covered(begin, end)):
                    self._communication[_PLACES.get(part, WaitPlace.LAYERS), kind_of(message.name)] += seconds

    def _add_waiting(self, part: StepPart, computes: IntervalUnion) -> None:
        """Count all time without operations as communication in a part that only communicates."""
        where = _PLACES[part]
        seconds = sum(computes.uncovered(range_.start, range_.end) for range_ in self._parts_of(part))
        kinds = {kind: counted for (place, kind), counted in self._communication.items() if place is where}
        longest = max(kinds, key=lambda kind: kinds[kind], default="")
        if seconds:
            self._communication[where, longest] += max(seconds - sum(kinds.values()), 0.0)

    def _split_by_part(self, start: float, end: float, cause: float | None) -> Iterable[tuple[StepPart, float, float]]:
        """Split an interval by the parts of the step; a kernel belongs to the part that launched it (``cause``)."""
        if cause is not None or not self._parts:
            yield self._part_at(start if cause is None else cause), start, end
            return
        first = max(bisect_right(self._starts, start) - 1, 0)
        for part in self._parts[first:]:
            if part.start >= end:
                return
            if part.end > start:
                yield _part(part), max(start, part.start), min(end, part.end)

    def _part_at(self, moment: float) -> StepPart:
        index = bisect_right(self._starts, moment) - 1
        if index < 0 or self._parts[index].end < moment:
            return StepPart.OTHER
        return _part(self._parts[index])

    def _parts_of(self, wanted: StepPart) -> list[TimedEvent]:
        return [part for part in self._parts if _part(part) is wanted]

    def _outermost(self, ranges: Sequence[TimedEvent]) -> list[TimedEvent]:
        """Return the ranges that no other range of their thread contains."""
        until: dict[str, float] = {}
        outermost = []
        for range_ in ranges:
            if range_.start >= until.get(range_.thread, float("-inf")):
                outermost.append(range_)
                until[range_.thread] = range_.end
        return outermost

    def _layer_of_nodes(self) -> dict[int, str]:
        """Return the layers that created nodes of the autograd graph, by sequence number; the last operation counts."""
        layers, layer_of = _Ranges(self._layers), dict[int, str]()
        for operation in self._operations:
            if operation.sequence >= 0 and not operation.name.startswith(_NODE):
                layer = layers.around(operation)
                if layer is not None:
                    layer_of[operation.sequence] = layer.name.removeprefix(LAYER)
        return layer_of

    def _backward_intervals(self) -> list[tuple[str, float, float]]:
        """Return layer, start and end from each node of a layer to the next; the layer is empty before the first."""
        layer_of = self._layer_of_nodes()
        nodes = [(node.start, layer_of[node.sequence]) for node in self._nodes() if node.sequence in layer_of]
        starts = [start for start, _ in nodes]
        intervals = []
        for part in self._parts_of(StepPart.BACKWARD):
            index, moment, name = bisect_left(starts, part.start), part.start, ""
            while index < len(nodes) and nodes[index][0] < part.end:
                intervals.append((name, moment, nodes[index][0]))
                moment, name = nodes[index]
                index += 1
            intervals.append((name, moment, part.end))
        return intervals

    def _nodes(self) -> list[TimedEvent]:
        return [operation for operation in self._operations if operation.name.startswith(_NODE)]


def _part(event: TimedEvent) -> StepPart:
    name = event.name.removeprefix(PART)
    return StepPart(name) if name in StepPart._value2member_map_ else StepPart.OTHER
