"""Clocks for steps and layers, and traces of steps.

Times are taken on the host, or as CUDA events, which are read later and so never stall the GPU. Traces are those of
``torch.profiler``, with ranges for steps, their parts and layers. Hooks for ranges exist only during a trace.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from galvatron_lite.model.graph import Role
from galvatron_lite.runs.schema import LAYER, METADATA, PART, STEP, TRACES, CollectiveRecord, StepPart
from galvatron_lite.runtime.monitor.notes import StepPhase

if TYPE_CHECKING:
    from galvatron_lite.runtime.engine import ParallelModel

_COLLECTIVES = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}  # fmt: skip
"""Functions of ``torch.distributed`` that are timed, and the kind of collective that each is recorded as."""


def time_mark(device: torch.device) -> Any:
    """The present time: host seconds on a CPU, an event on the current stream of a GPU."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Seconds between two time marks; a GPU must have reached both."""
    return float(end - start) if isinstance(start, float) else float(start.elapsed_time(end)) / 1e3


class LayerClock:
    """Times the forward passes of this rank's blocks, including those that recomputation repeats in backward.

    Attributes:
        running: whether passes are timed. Hooks and events cost some microseconds each.
    """

    def __init__(self, parallel: ParallelModel) -> None:
        self.running = False
        self._mark = partial(time_mark, parallel.device)
        self._starts: dict[str, list[Any]] = {}
        self._passes: dict[str, list[tuple[Any, Any]]] = {}
        self._handles: list[Any] = []
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
        """Return the median seconds of a pass by block since the last call. Waits for the GPU."""
        passes, self._passes = self._passes, {}
        self._starts.clear()
        for end in (end for marks in passes.values() for _, end in marks if not isinstance(end, float)):
            end.synchronize()
        return {name: median(seconds_between(*marks) for marks in block) for name, block in passes.items()}

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class StepClock:
    """Marks the times at which the parts of a step begin on this rank.

    Attributes:
        on_part: called with the name of each part when it begins, and with an empty string when the step ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[StepPart, Any]] = []
        self.on_part: Callable[[str], None] | None = None

    def begin_part(self, part: StepPart) -> None:
        """End the current part and begin another."""
        self._marks.append((part, time_mark(self._device)))
        if self.on_part is not None:
            self.on_part(part.value)

    def begin_phase(self, phase: StepPhase | None) -> None:
        """Begin the part that a phase of ``Watch`` belongs to; None: this rank waits for another stage."""
        if self._marks:
            part = StepPart.WAITING if phase is None else StepPart.__members__.get(phase.name, StepPart.OTHER)
            self.begin_part(part)

    def begin_step(self) -> None:
        """Begin a step."""
        self._marks = []
        self.begin_part(StepPart.OTHER)

    def end_step(self) -> StepMarks:
        """End the step and return its marks."""
        marks = StepMarks([*self._marks, (StepPart.OTHER, time_mark(self._device))])
        self._marks = []
        if self.on_part is not None:
            self.on_part("")
        return marks


class StepMarks:
    """The time marks of a step: the beginning of each part, and the end of the step."""

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
        """Seconds of the step."""
        return seconds_between(self._marks[0][1], self._marks[-1][1])

    def since(self, earlier: StepMarks | None) -> float:
        """Seconds from the end of an earlier step to the beginning of this one."""
        return 0.0 if earlier is None else max(seconds_between(earlier._marks[-1][1], self._marks[0][1]), 0.0)

    def parts(self) -> dict[StepPart, float]:
        """Seconds by part. They add up to the seconds of the step."""
        seconds = defaultdict[StepPart, float](float)
        for (part, start), (_, end) in pairwise(self._marks):
            seconds[part] += seconds_between(start, end)
        return seconds


class Scalar:
    """A scalar tensor that is copied to the host without waiting, and read later."""

    __slots__ = ("_event", "_value")

    def __init__(self, value: Tensor) -> None:
        self._event: Any = None
        self._value = value.detach()
        if self._value.is_cuda:
            host = torch.empty_like(self._value, device="cpu", pin_memory=True)
            self._value = host.copy_(self._value, non_blocking=True)
            self._event = time_mark(value.device)

    @property
    def is_ready(self) -> bool:
        """Whether the value is on the host."""
        return self._event is None or bool(self._event.query())

    def get(self) -> float:
        """The value."""
        return float(self._value)


class Tracer:
    """Records a trace of some steps and writes it to the folder of the run.

    Args:
        folder: of the run.
        steps: numbers of the steps to trace.
        layers: returns the modules of this rank's layers with the layers' names; called when the trace begins.
        clock: of the steps.
        metadata: stored in the trace; includes the ``rank``.
        put: receives the records of collectives.
    """

    def __init__(
        self,
        folder: Path,
        steps: range,
        layers: Callable[[], Sequence[tuple[str, nn.Module]]],
        clock: StepClock,
        metadata: dict[str, Any],
        put: Callable[[CollectiveRecord], None],
    ) -> None:
        self._folder, self._steps, self._layers, self._clock, self._metadata = folder, steps, layers, clock, metadata
        self._profile: profile | None = None
        self._collectives, self._put = CollectiveTimer(), put
        self._first = self._last = 0
        self._step: Any = None
        self._part: Any = None
        self._handles: list[Any] = []

    @property
    def is_running(self) -> bool:
        """Whether a trace is being recorded."""
        return self._profile is not None

    def begin_step(self, step: int) -> None:
        """Begin a step, and the trace if this is its first step."""
        if step in self._steps and self._profile is None:
            # in a launched world the tracer logs two lines a run to standard error, unless its level is above all
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile, self._first = profile(activities=activities), step
            self._profile.start()
            for name, module in self._layers():
                self._add_layer_ranges(name, module)
            self._clock.on_part = self._begin_part
            self._collectives.start()
        if self._profile is not None:
            self._step = _begin_range(f"{STEP}{step}")

    def end_step(self, step: int) -> None:
        """End a step, and the trace after its last step."""
        if self._profile is None:
            return
        _end_range(self._step)
        self._last = step
        if step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Stop recording, and write the trace if there is one."""
        profiler, self._profile = self._profile, None
        if profiler is None:
            return
        self._collectives.stop()
        self._begin_part("")
        self._clock.on_part = None
        for handle in self._handles:
            handle.remove()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rank = self._metadata["rank"]
        for record in self._collectives.take(rank, self._last, max(self._last - self._first + 1, 1)):
            self._put(record)
        profiler.add_metadata_json(METADATA, json.dumps(self._metadata))
        profiler.stop()
        folder = self._folder / TRACES
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank:05d}-step-{self._first:05d}.json.gz"
        incomplete = path.with_name(f".{path.name}.part.json.gz")
        profiler.export_chrome_trace(str(incomplete))
        incomplete.replace(path)

    def _add_layer_ranges(self, name: str, module: nn.Module) -> None:
        ranges: list[Any] = []

        def stop(*_: Any) -> None:
            if ranges:
                _end_range(ranges.pop())

        start = module.register_forward_pre_hook(lambda *_: ranges.append(_begin_range(LAYER + name)), prepend=True)
        # first: after the last layer of a stage a hook leaves the model, and later hooks are not called
        self._handles += [start, module.register_forward_hook(stop, prepend=True, always_call=True)]

    def _begin_part(self, part: str) -> None:
        if self._part is not None:
            _end_range(self._part)
        self._part = _begin_range(PART + part) if part else None


def _begin_range(name: str) -> Any:
    entered = record_function(name)
    entered.__enter__()  # type: ignore[no-untyped-call]
    return entered


def _end_range(entered: Any) -> None:
    entered.__exit__(None, None, None)


class CollectiveTimer:
    """Times collectives between ``start`` and ``stop`` by replacing the functions of ``torch.distributed``."""

    def __init__(self) -> None:
        self._originals: dict[str, Any] = {}
        # by kind and ranks: bytes of each call, and a function that returns its seconds
        self._calls: dict[tuple[str, tuple[int, ...]], list[tuple[int, Callable[[], float]]]] = {}
        self._inside = False

    def start(self) -> None:
        """Replace the functions."""
        for name, kind in _COLLECTIVES.items():
            original = getattr(dist, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(dist, name, wraps(original)(partial(self._timed, original, kind)))

    def stop(self) -> None:
        """Restore the functions."""
        for name, original in self._originals.items():
            setattr(dist, name, original)
        self._originals = {}

    def take(self, rank: int, step: int, steps: int) -> Iterator[CollectiveRecord]:
        """Return the records of ``steps`` steps up to ``step``; the device must have finished them."""
        groups, self._calls = self._calls, {}
        for (kind, ranks), calls in groups.items():
            size, seconds = sum(size for size, _ in calls), sum(max(span(), 0.0) for _, span in calls)
            yield CollectiveRecord(rank, step, steps, kind, ranks, len(calls), size, round(seconds, 7))

    def _timed(self, original: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # torch implements some collectives by others
            return original(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        size = max(tensor.nbytes for tensor in tensors)  # of the tensor that all ranks have together
        group = kwargs.get("group") or next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None)
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        device = tensors[0].device
        start = time_mark(device)
        self._inside = True
        try:
            work = original(*args, **kwargs)
        finally:
            self._inside = False
        span = _span(work, start, device) if len(ranks) > 1 else None
        if span is not None:
            self._calls.setdefault((kind, ranks), []).append((size, span))
        return work


def _span(work: Any, start: Any, device: torch.device) -> Callable[[], float] | None:
    """A function that returns the seconds a collective took; None where its backend does not report completion."""
    if work is None:  # it has completed, or the stream waits for it
        end = time_mark(device)
        return lambda: seconds_between(start, end)
    ends: list[Any] = []
    try:
        work.get_future().add_done_callback(lambda _: ends.append(time_mark(device)))
    except RuntimeError:
        return None
    return lambda: seconds_between(start, ends[0]) if ends else 0.0
