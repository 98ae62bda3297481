"""The parts of a step on a rank, from its trace of ``torch.profiler`` (Chrome's format), which is read with bounds.

On CPUs the main thread counts: a layer takes its range in forward; backward is the time from one node of the autograd
graph to the next, for the layer whose forward made the node (both have its sequence number). Communication counts where
no operation runs. On GPUs kernels count: each belongs to the layer of the operation that launched it, communication
counts where no other kernel runs, and time without kernels is the time of the host.
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

from galvatron_lite.diagnose.expected import RankTimes, Where
from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import check_regular
from galvatron_lite.runs.schema import LAYER, METADATA, PART, STEP, StepPart

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


_USERS_STEP = "ProfilerStep#"
_NODE = "autograd::engine::evaluate_function: "
_MESSAGES = ("gloo:", "nccl:", "c10d::")
_COLLECTIVES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
    "broadcast": "broadcast", "send": "send_recv", "recv": "send_recv", "barrier": "barrier", "gather": "gather",
    "scatter": "scatter",
}  # fmt: skip
_PLACES = {
    StepPart.GRADIENTS: Where.GRADIENTS,
    StepPart.CHECK: Where.CHECK,
    StepPart.OPTIMIZER: Where.OPTIMIZER,
}
"""Where communication in a part of a step is; in the others it is inside layers."""


def rank_of(trace: Trace) -> int:
    """The rank that made a trace."""
    for key in (METADATA, "distributedInfo"):
        metadata = trace.about.get(key)
        rank = metadata.get("rank") if isinstance(metadata, dict) else None
        if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**31:
            return rank
    return 0


def times_of(trace: Trace) -> RankTimes:
    """The times of the steps of a trace, on its rank."""
    reading = _Reading(trace, _steps(trace))
    if reading.kernels:
        reading.on_device()
    else:
        reading.on_host()
    return reading.times()


def _steps(trace: Trace) -> list[TimedEvent]:
    """The steps: ours, else the user's (``profiler.step()``), else all of it as one."""
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
    """The kind of a collective, from its backend's name for it; empty: it is none."""
    plain = "".join(letter for letter in name.lower() if letter.isalpha())
    return next((kind for word, kind in _COLLECTIVES.items() if word in plain), "")


class _Ranges:
    """Ranges of each thread that do not overlap."""

    def __init__(self, ranges: Sequence[TimedEvent]) -> None:
        self._ranges: dict[str, list[TimedEvent]] = {}
        for event in ranges:
            self._ranges.setdefault(event.thread, []).append(event)
        self._starts = {thread: [event.start for event in range_] for thread, range_ in self._ranges.items()}

    def around(self, operation: TimedEvent) -> TimedEvent | None:
        """The range that an operation lies in."""
        ranges = self._ranges.get(operation.thread, [])
        place = bisect_right(self._starts.get(operation.thread, []), operation.start) - 1
        return ranges[place] if place >= 0 and ranges[place].end >= operation.end else None


class _Reading:
    def __init__(self, trace: Trace, steps: Sequence[TimedEvent]) -> None:
        self._trace, self._steps = trace, steps
        within = Cover((step.start, step.end) for step in steps)
        events = [
            event for event in trace.events if within.inside(event.start, event.end) > 0 or event.start == event.end
        ]
        self.kernels = [event for event in events if event.category in ("kernel", "gpu_memcpy", "gpu_memset")]
        ranges = [event for event in events if event.category == "user_annotation"]
        self._operations = [event for event in events if event.category == "cpu_op"]
        self._parts = [range_ for range_ in ranges if range_.name.startswith(PART)]
        self._layers = [range_ for range_ in ranges if range_.name.startswith(LAYER)]
        messages = [one for one in (*ranges, *self._operations) if one.name.startswith(_MESSAGES) and kind_of(one.name)]
        if self.kernels:
            self._messages = [kernel for kernel in self.kernels if "nccl" in kernel.name.lower()]
        else:
            # messages between stages are started beforehand, and count where they are waited for
            staged = bool(self._of(StepPart.WAITING))
            self._messages = [message for message in messages if not staged or kind_of(message.name) != "send_recv"]
        self._starts = [part.start for part in self._parts]
        # seconds of all steps: by layer, by place and kind, and of the parts
        self._forward, self._backward = defaultdict[str, float](float), defaultdict[str, float](float)
        self._communication = defaultdict[tuple[Where, str], float](float)
        self._optimizer = self._waiting = 0.0

    def on_host(self) -> None:
        """Add up what the main thread did."""
        messages = Cover((message.start, message.end) for message in self._messages)
        computes = Cover(
            (operation.start, operation.end) for operation in self._operations if operation.name.startswith("aten::")
        )
        exposed = messages.minus(computes)
        for layer in self._outermost(self._layers):
            if self._part_at(layer.start) is not StepPart.BACKWARD:
                self._forward[layer.name.removeprefix(LAYER)] += exposed.rest(layer.start, layer.end)
        for name, start, end in self._backward_stretches():
            self._backward[name] += exposed.rest(start, end)
        self._communicate(exposed)
        for part in (StepPart.GRADIENTS, StepPart.CHECK):
            self._take_all(part, computes)
        self._optimizer = sum(exposed.rest(update.start, update.end) for update in self._of(StepPart.OPTIMIZER))
        self._waiting = sum(one.end - one.start for one in self._of(StepPart.WAITING))

    def on_device(self) -> None:
        """Add up what kernels did."""
        quiet = Cover((kernel.start, kernel.end) for kernel in self.kernels if "nccl" not in kernel.name.lower())
        exposed = Cover((message.start, message.end) for message in self._messages).minus(quiet)
        launched = {operation.external: operation for operation in self._operations if operation.external >= 0}
        layers, nodes, layer_of = _Ranges(self._layers), _Ranges(self._nodes()), self._layer_of_nodes()
        for kernel in self.kernels:
            if "nccl" in kernel.name.lower():
                continue
            operation = launched.get(kernel.external)
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
        self._communicate(exposed, launched)
        self._waiting = self._communication.pop((Where.LAYERS, "send_recv"), 0.0)

    def times(self) -> RankTimes:
        """Of a mean step; what is left is other."""
        count, total = len(self._steps), sum(step.end - step.start for step in self._steps)
        forward, backward = (
            {name: seconds / count for name, seconds in one.items()} for one in (self._forward, self._backward)
        )
        communication = {key: seconds / count for key, seconds in self._communication.items()}
        optimizer, waiting = self._optimizer / count, self._waiting / count
        explained = sum(sum(one.values()) for one in (forward, backward, communication)) + optimizer + waiting
        return RankTimes(
            rank_of(self._trace), total / count, count, forward, backward, communication, optimizer, waiting,
            max(total / count - explained, 0.0), traced=True,
            groups={kind_of(message.name): message.group for message in self._messages if message.group},
            layered=bool(self._layers), parted=bool(self._parts),
        )  # fmt: skip

    def _communicate(self, exposed: Cover, launched: Mapping[int, TimedEvent] | None = None) -> None:
        """Add up communication that nothing hides; where several kinds run at once the earliest counts."""
        counted = 0.0
        for message in sorted(self._messages, key=lambda event: event.start):
            start = max(message.start, counted)
            if start >= message.end:
                continue
            counted = message.end
            cause = message if launched is None else launched.get(message.external, message)
            for part, begin, end in self._cut(start, message.end, None if launched is None else cause.start):
                if part is not StepPart.WAITING and (seconds := exposed.inside(begin, end)):
                    self._communication[_PLACES.get(part, Where.LAYERS), kind_of(message.name)] += seconds

    def _take_all(self, part: StepPart, computes: Cover) -> None:
        """In a part that only communicates, all time without operations is waiting, with or without events."""
        where = _PLACES[part]
        seconds = sum(computes.rest(one.start, one.end) for one in self._of(part))
        kinds = {kind: own for (place, kind), own in self._communication.items() if place is where}
        longest = max(kinds, key=lambda kind: kinds[kind], default="")
        if seconds:
            self._communication[where, longest] += max(seconds - sum(kinds.values()), 0.0)

    def _cut(self, start: float, end: float, cause: float | None) -> Iterable[tuple[StepPart, float, float]]:
        """A stretch by the parts of the step that it lies in; of a kernel, that in which it was launched."""
        if cause is not None or not self._parts:
            yield self._part_at(start if cause is None else cause), start, end
            return
        place = max(bisect_right(self._starts, start) - 1, 0)
        for part in self._parts[place:]:
            if part.start >= end:
                return
            if part.end > start:
                yield _part(part), max(start, part.start), min(end, part.end)

    def _part_at(self, moment: float) -> StepPart:
        place = bisect_right(self._starts, moment) - 1
        if place < 0 or self._parts[place].end < moment:
            return StepPart.OTHER
        return _part(self._parts[place])

    def _of(self, wanted: StepPart) -> list[TimedEvent]:
        return [part for part in self._parts if _part(part) is wanted]

    def _outermost(self, ranges: Sequence[TimedEvent]) -> list[TimedEvent]:
        """Those that lie in no other one of their thread."""
        until: dict[str, float] = {}
        outermost = []
        for range_ in ranges:
            if range_.start >= until.get(range_.thread, float("-inf")):
                outermost.append(range_)
                until[range_.thread] = range_.end
        return outermost

    def _layer_of_nodes(self) -> dict[int, str]:
        """The layer that made a node of the autograd graph, by its sequence number: the last operation that has it."""
        layers = _Ranges(self._layers)
        found: dict[int, str] = {}
        for operation in self._operations:
            if operation.sequence >= 0 and not operation.name.startswith(_NODE):
                layer = layers.around(operation)
                if layer is not None:
                    found[operation.sequence] = layer.name.removeprefix(LAYER)
        return found

    def _backward_stretches(self) -> list[tuple[str, float, float]]:
        """Time of the backward parts, from each node that is known to the next, by layer; empty before the first."""
        layer_of = self._layer_of_nodes()
        nodes = [(node.start, layer_of[node.sequence]) for node in self._nodes() if node.sequence in layer_of]
        starts = [start for start, _ in nodes]
        stretches = []
        for part in self._of(StepPart.BACKWARD):
            place, moment, name = bisect_left(starts, part.start), part.start, ""
            while place < len(nodes) and nodes[place][0] < part.end:
                stretches.append((name, moment, nodes[place][0]))
                moment, name = nodes[place]
                place += 1
            stretches.append((name, moment, part.end))
        return stretches

    def _nodes(self) -> list[TimedEvent]:
        return [operation for operation in self._operations if operation.name.startswith(_NODE)]


def _part(event: TimedEvent) -> StepPart:
    name = event.name.removeprefix(PART)
    return StepPart(name) if name in StepPart._value2member_map_ else StepPart.OTHER
