"""From the events of a trace to what a step's time went to on its rank.

On CPUs the main thread is the rank: a layer's forward is its range; backward is the time from one node of the autograd
graph to the next, for the layer whose forward made the node (both have its sequence number). Communication counts where
no operation runs. On GPUs kernels are the rank: each belongs to the layer of the operation that launched it,
communication counts where no other kernel runs, and time without any is the host's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from galvatron_lite.diagnose.events import Cover, TimedEvent, Trace
from galvatron_lite.diagnose.expected import RankTimes, Where
from galvatron_lite.errors import FileFormatError
from galvatron_lite.runs.schema import LAYER, METADATA, PART, STEP, StepPart

_USERS_STEP = "ProfilerStep#"
_NODE = "autograd::engine::evaluate_function: "
_SPOKEN = ("gloo:", "nccl:", "c10d::")
_COLLECTIVES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
    "broadcast": "broadcast", "send": "send_recv", "recv": "send_recv", "barrier": "barrier", "gather": "gather",
    "scatter": "scatter",
}  # fmt: skip
_PLACES = {
    StepPart.FORWARD: Where.LAYERS,
    StepPart.BACKWARD: Where.LAYERS,
    StepPart.WEIGHT: Where.LAYERS,
    StepPart.OTHER: Where.LAYERS,
    StepPart.GRADIENTS: Where.GRADIENTS,
    StepPart.CHECK: Where.CHECK,
    StepPart.OPTIMIZER: Where.OPTIMIZER,
}
FORWARD, BACKWARD = True, False


def rank_of(trace: Trace) -> int:
    """The rank that made a trace."""
    for key in (METADATA, "distributedInfo"):
        told = trace.about.get(key)
        rank = told.get("rank") if isinstance(told, dict) else None
        if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**31:
            return rank
    return 0


def times_of(trace: Trace) -> RankTimes:
    """What the steps of a trace went to, on its rank."""
    steps = _steps(trace)
    return _Reading(trace, steps).times()


def _steps(trace: Trace) -> list[TimedEvent]:
    """The steps: ours, else the user's (``profiler.step()``), else all of it as one."""
    for name in (STEP, _USERS_STEP):
        found = [event for event in trace.events if event.name.startswith(name) and event.category == "user_annotation"]
        if found:
            return found
    if not trace.events:
        raise FileFormatError("trace", str(trace.path), "It holds no operations: trace whole training steps.")
    first, last = trace.events[0], max(trace.events, key=lambda event: event.end)
    return [TimedEvent("all", "user_annotation", first.thread, first.start, last.end)]


def kind_of(name: str) -> str:
    """The kind of a collective, from what a backend calls it; empty: it is none."""
    plain = "".join(letter for letter in name.lower() if letter.isalpha())
    return next((kind for word, kind in _COLLECTIVES.items() if word in plain), "")


@dataclass(frozen=True, slots=True)
class _Belongs:
    """What an operation is done for."""

    layer: str
    forward: bool


class _Reading:
    """One trace, looked at."""

    def __init__(self, trace: Trace, steps: Sequence[TimedEvent]) -> None:
        self._trace, self._steps = trace, steps
        within = Cover((step.start, step.end) for step in steps)
        events = [one for one in trace.events if within.inside(one.start, one.end) > 0 or one.start == one.end]
        self._kernels = [one for one in events if one.category in ("kernel", "gpu_memcpy", "gpu_memset")]
        ranges = [one for one in events if one.category == "user_annotation"]
        self._operations = [one for one in events if one.category == "cpu_op"]
        self._parts = [one for one in ranges if one.name.startswith(PART)]
        self._layers = [one for one in ranges if one.name.startswith(LAYER)]
        spoken = [one for one in (*ranges, *self._operations) if one.name.startswith(_SPOKEN) and kind_of(one.name)]
        if self._kernels:
            self._spoken = [one for one in self._kernels if "nccl" in one.name.lower()]
        else:
            # what stages of a pipeline send is asked for beforehand, and counts where it is waited for
            staged = bool(self._of(StepPart.WAITING))
            self._spoken = [one for one in spoken if not staged or kind_of(one.name) != "send_recv"]
        self._starts = [one.start for one in self._parts]

    def times(self) -> RankTimes:
        """See ``times_of``."""
        return self._on_device() if self._kernels else self._on_host()

    def _on_host(self) -> RankTimes:
        spoken = Cover((one.start, one.end) for one in self._spoken)
        computes = Cover((one.start, one.end) for one in self._operations if one.name.startswith("aten::"))
        exposed = spoken.minus(computes)
        forward, backward = dict[str, float](), dict[str, float]()
        for layer in self._outermost(self._layers):
            if self._part_at(layer.start) is not StepPart.BACKWARD:
                own = layer.end - layer.start - exposed.inside(layer.start, layer.end)
                _add(forward, layer.name.removeprefix(LAYER), own)
        for name, start, end in self._backward_stretches():
            _add(backward, name, end - start - exposed.inside(start, end))
        communication = self._communication(exposed)
        for part, where in ((StepPart.GRADIENTS, Where.GRADIENTS), (StepPart.CHECK, Where.CHECK)):
            self._take_all(communication, part, where, computes)
        optimizer = sum(
            one.end - one.start - exposed.inside(one.start, one.end) for one in self._of(StepPart.OPTIMIZER)
        )  # fmt: skip
        waiting = sum(one.end - one.start for one in self._of(StepPart.WAITING))
        return self._record(forward, backward, communication, optimizer, waiting)

    def _on_device(self) -> RankTimes:
        quiet = Cover((one.start, one.end) for one in self._kernels if "nccl" not in one.name.lower())
        exposed = Cover((one.start, one.end) for one in self._spoken).minus(quiet)
        launched = {one.external: one for one in self._operations if one.external >= 0}
        owners = _Owners(self._layers, self._nodes(), self._made_by())
        forward, backward, optimizer = dict[str, float](), dict[str, float](), 0.0
        for kernel in self._kernels:
            if "nccl" in kernel.name.lower():
                continue
            operation = launched.get(kernel.external)
            part = StepPart.OTHER if operation is None else self._part_at(operation.start)
            owner = None if operation is None else owners(operation)
            took = kernel.end - kernel.start
            if part is StepPart.OPTIMIZER:
                optimizer += took
            elif owner is not None:
                _add(forward if owner.forward else backward, owner.layer, took)
        communication = self._communication(exposed, launched)
        waiting = communication.pop((Where.LAYERS, "send_recv"), 0.0)
        return self._record(forward, backward, communication, optimizer, waiting)

    def _record(
        self,
        forward: dict[str, float],
        backward: dict[str, float],
        communication: dict[tuple[Where, str], float],
        optimizer: float,
        waiting: float,
    ) -> RankTimes:
        """Of a mean step; what is left is other."""
        count = len(self._steps)
        total = sum(step.end - step.start for step in self._steps)
        known = sum(sum(one.values()) for one in (forward, backward, communication)) + optimizer + waiting
        return RankTimes(
            rank_of(self._trace), total / count, count, _per(forward, count), _per(backward, count),
            {key: seconds / count for key, seconds in communication.items()}, optimizer / count, waiting / count,
            max(total - known, 0.0) / count, traced=True,
            groups={kind_of(one.name): one.group for one in self._spoken if one.group}, layered=bool(self._layers),
            parted=bool(self._parts),
        )  # fmt: skip

    def _communication(
        self, exposed: Cover, launched: Mapping[int, TimedEvent] | None = None
    ) -> dict[tuple[Where, str], float]:
        """Communication that nothing hides; where several kinds run at once the earliest counts."""
        found: dict[tuple[Where, str], float] = {}
        counted = 0.0
        for one in sorted(self._spoken, key=lambda event: event.start):
            start = max(one.start, counted)
            if start >= one.end:
                continue
            counted = one.end
            cause = one if launched is None else launched.get(one.external, one)
            for part, begin, end in self._cut(start, one.end, None if launched is None else cause.start):
                if part is not StepPart.WAITING and (seconds := exposed.inside(begin, end)):
                    key = _PLACES[part], kind_of(one.name)
                    found[key] = found.get(key, 0.0) + seconds
        return found

    def _take_all(self, table: dict[tuple[Where, str], float], part: StepPart, where: Where, computes: Cover) -> None:
        """In a part that only communicates, all time without operations is waiting, whether events tell it or not."""
        seconds = sum(one.end - one.start - computes.inside(one.start, one.end) for one in self._of(part))
        told = {kind: own for (place, kind), own in table.items() if place is where}
        longest = max(told, key=lambda kind: told[kind], default="")
        if seconds:
            table[where, longest] = told.get(longest, 0.0) + max(seconds - sum(told.values()), 0.0)

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
        return [one for one in self._parts if _part(one) is wanted]

    def _outermost(self, ranges: Sequence[TimedEvent]) -> list[TimedEvent]:
        """Those that lie in no other one of their thread."""
        until: dict[str, float] = {}
        found = []
        for one in ranges:
            if one.start >= until.get(one.thread, float("-inf")):
                found.append(one)
                until[one.thread] = one.end
        return found

    def _made_by(self) -> dict[int, str]:
        """The layer that made a node of the autograd graph, by its sequence number: the last operation that has it."""
        layers = _Stack(self._layers)
        found: dict[int, str] = {}
        for one in self._operations:
            if one.sequence >= 0 and not one.name.startswith(_NODE) and (layer := layers.at(one)):
                found[one.sequence] = layer
        return found

    def _backward_stretches(self) -> list[tuple[str, float, float]]:
        """Time of the backward parts, from each node that is known to the next, by layer; empty before the first."""
        made = self._made_by()
        nodes = [(one.start, made[one.sequence]) for one in self._nodes() if one.sequence in made]
        starts = [start for start, _ in nodes]
        found = []
        for part in self._of(StepPart.BACKWARD):
            place, moment, name = bisect_left(starts, part.start), part.start, ""
            while place < len(nodes) and nodes[place][0] < part.end:
                found.append((name, moment, nodes[place][0]))
                moment, name = nodes[place]
                place += 1
            found.append((name, moment, part.end))
        return found

    def _nodes(self) -> list[TimedEvent]:
        return [one for one in self._operations if one.name.startswith(_NODE)]


class _Stack:
    """The layer whose range an operation lies in, asked in the order of time."""

    def __init__(self, ranges: Sequence[TimedEvent]) -> None:
        self._ranges: dict[str, list[TimedEvent]] = {}
        for one in ranges:
            self._ranges.setdefault(one.thread, []).append(one)
        self._starts = {thread: [one.start for one in own] for thread, own in self._ranges.items()}

    def at(self, operation: TimedEvent) -> str:
        own = self._ranges.get(operation.thread, [])
        place = bisect_right(self._starts.get(operation.thread, []), operation.start) - 1
        if place < 0 or own[place].end < operation.end:
            return ""
        return own[place].name.removeprefix(LAYER)


class _Owners:
    """What operations are done for: a layer's forward, or the backward of the node that they run in."""

    def __init__(self, layers: Sequence[TimedEvent], nodes: Sequence[TimedEvent], mapping: Mapping[int, str]) -> None:
        self._layers, self._made = _Stack(layers), mapping
        self._nodes: dict[str, list[TimedEvent]] = {}
        for one in nodes:
            self._nodes.setdefault(one.thread, []).append(one)
        self._starts = {thread: [one.start for one in own] for thread, own in self._nodes.items()}

    def __call__(self, operation: TimedEvent) -> _Belongs | None:
        own = self._nodes.get(operation.thread, [])
        place = bisect_right(self._starts.get(operation.thread, []), operation.start) - 1
        if place >= 0 and own[place].end >= operation.end and own[place].sequence in self._made:
            return _Belongs(self._made[own[place].sequence], BACKWARD)
        layer = self._layers.at(operation)
        return _Belongs(layer, FORWARD) if layer else None


def _part(event: TimedEvent) -> StepPart:
    name = event.name.removeprefix(PART)
    return StepPart(name) if name in StepPart._value2member_map_ else StepPart.OTHER


def _add(to: dict[str, float], name: str, seconds: float) -> None:
    to[name] = to.get(name, 0.0) + max(seconds, 0.0)


def _per(mapping: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: seconds / count for name, seconds in mapping.items()}
