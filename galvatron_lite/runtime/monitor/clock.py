"""Clocks of parts of steps and of passes of blocks, by host time or by events on a GPU; and traces of steps.

Traces are those of ``torch.profiler``, with ranges around steps, their parts, and layers. Ranges exist only while a
trace is made: layers get their hooks when it begins, and lose them when it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from galvatron_lite.model.graph import Role
from galvatron_lite.runs.schema import StepPart
from galvatron_lite.runtime.monitor.notes import StepPhase

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from galvatron_lite.runtime.engine import ParallelModel


import json
import os
from collections.abc import Iterable, Sequence
from functools import wraps
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from galvatron_lite.runs.schema import LAYER, METADATA, PART, STEP, TRACES, CollectiveRecord


class LayerClock:
    """Seconds of the forward passes of this rank's blocks; recomputation in backward counts as a pass, too.

    Attributes:
        running: whether passes are timed: hooks and events take some microseconds each.
    """

    def __init__(self, parallel: ParallelModel) -> None:
        self.running = False
        self._mark = partial(moment, parallel.device)
        self._starts: dict[str, list[Any]] = {}
        self._passes: dict[str, list[tuple[Any, Any]]] = {}
        self._handles: list[RemovableHandle] = []
        for runtime in parallel.runtimes:
            for name in (placed.layer.name for placed in runtime.stage if placed.layer.role is Role.BLOCK):
                module = runtime.model.get_submodule(name)
                self._handles.append(module.register_forward_pre_hook(partial(self._start, name), prepend=True))
                self._handles.append(module.register_forward_hook(partial(self._stop, name)))

    def _start(self, name: str, *_: Any) -> None:
        if self.running:
            self._starts.setdefault(name, []).append(self._mark())

    def _stop(self, name: str, *_: Any) -> None:
        if self.running and self._starts.get(name):
            self._passes.setdefault(name, []).append((self._starts[name].pop(), self._mark()))

    def take(self) -> dict[str, float]:
        """The median seconds of a pass of every block since the last call; waits for the GPU."""
        passes, self._passes = self._passes, {}
        self._starts.clear()
        for end in (end for marks in passes.values() for _, end in marks if not isinstance(end, float)):
            end.synchronize()
        return {name: median(between(*marks) for marks in pass_) for name, pass_ in passes.items()}

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class StepClock:
    """Marks where parts of the present step begin on this rank.

    Attributes:
        on_part: called with the name of every part that begins, and an empty one at the step's end.
    """

    def __init__(self, device: torch.device) -> None:
        self._mark = partial(moment, device)
        self._marks: list[tuple[StepPart, Any]] = []
        self.on_part: Callable[[str], None] | None = None

    def at(self, part: StepPart) -> None:
        """A part begins, and the one before it ends."""
        self._marks.append((part, self._mark()))
        if self.on_part is not None:
            self.on_part(part.value)

    def phase(self, phase: StepPhase | None) -> None:
        """``Watch`` has noted a phase; None: the rank waits for another stage."""
        if self._marks:
            part = StepPart.WAITING if phase is None else StepPart.__members__.get(phase.name, StepPart.OTHER)
            self.at(part)

    def begin(self) -> None:
        """A step begins."""
        self._marks = []
        self.at(StepPart.OTHER)

    def end(self) -> StepMarks:
        """The step ends."""
        marks = StepMarks([*self._marks, (StepPart.OTHER, self._mark())])
        self._marks = []
        if self.on_part is not None:
            self.on_part("")
        return marks


class StepMarks:
    """When each part of a step began; the last mark ends the step."""

    __slots__ = ("_marks",)

    def __init__(self, marks: list[tuple[StepPart, Any]]) -> None:
        self._marks = marks

    @property
    def is_ready(self) -> bool:
        """Whether the GPU has finished the step."""
        end = self._marks[-1][1]
        return isinstance(end, float) or bool(end.query())

    @property
    def seconds(self) -> float:
        """Of the step."""
        return between(self._marks[0][1], self._marks[-1][1])

    def since(self, earlier: StepMarks | None) -> float:
        """Seconds from the end of an earlier step to the beginning of this one."""
        return 0.0 if earlier is None else max(between(earlier._marks[-1][1], self._marks[0][1]), 0.0)

    def parts(self) -> dict[StepPart, float]:
        """Seconds by part; they add up to those of the step."""
        seconds = defaultdict[StepPart, float](float)
        for (part, start), (_, end) in pairwise(self._marks):
            seconds[part] += between(start, end)
        return seconds


class Scalar:
    """A value on a device that is read later, without waiting for it."""

    __slots__ = ("_event", "_value")

    def __init__(self, value: Tensor) -> None:
        self._event: Any = None
        self._value = value.detach()
        if self._value.is_cuda:
            host = torch.empty_like(self._value, device="cpu", pin_memory=True)
            self._value = host.copy_(self._value, non_blocking=True)
            self._event = moment(value.device)

    @property
    def is_ready(self) -> bool:
        """Whether the value has arrived."""
        return self._event is None or bool(self._event.query())

    def get(self) -> float:
        """The value."""
        return float(self._value)


def moment(device: torch.device) -> Any:
    """Now: on the host in seconds, on a GPU an event of its present stream."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Seconds between two moments; a GPU has to have reached both."""
    return float(end - start) if isinstance(start, float) else float(start.elapsed_time(end)) / 1e3


class Tracer:
    """Makes a trace of some steps.

    Args:
        layers: gives the modules of this rank's layers, each with the layer's name, when the trace begins.
        about: metadata of the trace, with the ``rank``.
        put: takes records of the collectives.
    """

    def __init__(
        self,
        folder: Path,
        steps: range,
        layers: Callable[[], Sequence[tuple[str, nn.Module]]],
        clock: StepClock,
        about: dict[str, Any],
        put: Callable[[CollectiveRecord], None],
    ) -> None:
        self._folder, self._steps, self._layers, self._clock, self._about = folder, steps, layers, clock, about
        self._profile: profile | None = None
        self._collectives, self._put, self._last = CollectiveTimer(), put, 0
        self._first = 0
        self._step: Any = None
        self._part: Any = None
        self._handles: list[Any] = []

    @property
    def runs(self) -> bool:
        """Whether the profiler runs."""
        return self._profile is not None

    def begin(self, step: int) -> None:
        """A step begins."""
        if step in self._steps and self._profile is None:
            # in a launched world the tracer logs two lines a run to standard error, unless its level is above all
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile, self._first = profile(activities=kinds), step
            self._profile.start()
            for name, module in self._layers():
                self._watch(name, module)
            self._clock.on_part = self._on_part
            self._collectives.start()
        if self._profile is not None:
            self._step = _begin(f"{STEP}{step}")

    def end(self, step: int) -> None:
        """It ends."""
        if self._profile is None:
            return
        _end(self._step)
        self._last = step
        if step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Write the trace, where one is being made."""
        profiler, self._profile = self._profile, None
        if profiler is None:
            return
        self._collectives.stop()
        self._on_part("")
        self._clock.on_part = None
        for handle in self._handles:
            handle.remove()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rank = self._about["rank"]
        for record in self._collectives.take(rank, self._last, max(self._last - self._first + 1, 1)):
            self._put(record)
        profiler.add_metadata_json(METADATA, json.dumps(self._about))
        profiler.stop()
        folder = self._folder / TRACES
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank:05d}-step-{self._first:05d}.json.gz"
        part = path.with_name(f".{path.name}.part.json.gz")
        profiler.export_chrome_trace(str(part))
        part.replace(path)

    def _watch(self, name: str, module: nn.Module) -> None:
        ranges: list[Any] = []

        def stop(*_: Any) -> None:
            if ranges:
                _end(ranges.pop())

        start = module.register_forward_pre_hook(lambda *_: ranges.append(_begin(LAYER + name)), prepend=True)
        self._handles.append(start)
        # first: after the last layer of a stage a hook leaves the model, and later hooks are not called
        self._handles.append(module.register_forward_hook(stop, prepend=True, always_call=True))

    def _on_part(self, part: str) -> None:
        """A part of the step begins, or with an empty name the step ends."""
        if self._part is not None:
            _end(self._part)
        self._part = _begin(PART + part) if part else None


def _begin(name: str) -> Any:
    entered = record_function(name)
    entered.__enter__()  # type: ignore[no-untyped-call]
    return entered


def _end(entered: Any) -> None:
    entered.__exit__(None, None, None)


_NAMES = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}  # fmt: skip
"""Functions that are timed, and the kinds of their collectives."""


class CollectiveTimer:
    """Times collectives between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._plain: dict[str, Any] = {}
        # of each kind on each ranks: bytes of each call, and what gives its seconds
        self._calls: dict[tuple[str, tuple[int, ...]], list[tuple[int, Callable[[], float]]]] = {}
        self._inside = False

    def start(self) -> None:
        """Replace the functions."""
        for name, kind in _NAMES.items():
            plain = getattr(dist, name, None)
            if plain is not None:
                self._plain[name] = plain
                setattr(dist, name, wraps(plain)(partial(self._timed, plain, kind)))

    def stop(self) -> None:
        """Put them back."""
        for name, plain in self._plain.items():
            setattr(dist, name, plain)
        self._plain = {}

    def take(self, rank: int, step: int, steps: int) -> Iterable[CollectiveRecord]:
        """Records of so many steps up to this one; the device has to have done all of it."""
        groups, self._calls = self._calls, {}
        for (kind, ranks), calls in groups.items():
            size, seconds = sum(size for size, _ in calls), sum(max(span(), 0.0) for _, span in calls)
            yield CollectiveRecord(rank, step, steps, kind, ranks, len(calls), size, round(seconds, 7))

    def _timed(self, plain: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # one calls another
            return plain(*args, **kwargs)
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        size = max(tensor.nbytes for tensor in tensors)  # of the tensor that all ranks have together
        group = kwargs.get("group") or next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None)
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        begin = moment(tensors[0].device)
        self._inside = True
        try:
            work = plain(*args, **kwargs)
        finally:
            self._inside = False
        span = _span(work, begin, tensors[0].device) if len(ranks) > 1 else None
        if span is not None:
            self._calls.setdefault((kind, ranks), []).append((size, span))
        return work


def _span(work: Any, begin: Any, device: torch.device) -> Callable[[], float] | None:
    """Gives the seconds until a collective has completed; None where its backend does not tell when."""
    if work is None:  # it has completed, or the stream waits for it
        end = moment(device)
        return lambda: between(begin, end)
    ends: list[Any] = []
    try:
        work.get_future().add_done_callback(lambda _: ends.append(moment(device)))
    except RuntimeError:
        return None
    return lambda: between(begin, ends[0]) if ends else 0.0
