"""Clocks of training: parts of a step and forward passes of blocks, by host time, or by events on a GPU."""

from __future__ import annotations

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

PARTS = {
    StepPhase.FORWARD: StepPart.FORWARD,
    StepPhase.BACKWARD: StepPart.BACKWARD,
    StepPhase.WEIGHT: StepPart.WEIGHT,
    StepPhase.GRADIENTS: StepPart.GRADIENTS,
    StepPhase.CHECK: StepPart.CHECK,
    StepPhase.OPTIMIZER: StepPart.OPTIMIZER,
}
"""Parts of a step, by the phases that ``Watch`` notes."""


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
                start, stop = self._hooks(name)
                module = runtime.model.get_submodule(name)
                self._handles.append(module.register_forward_pre_hook(start, prepend=True))
                self._handles.append(module.register_forward_hook(stop))

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def start(*_: Any) -> None:
            if self.running:
                self._starts.setdefault(name, []).append(self._mark())

        def stop(*_: Any) -> None:
            if self.running and self._starts.get(name):
                self._passes.setdefault(name, []).append((self._starts[name].pop(), self._mark()))

        return start, stop

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

    def phase(self, phase: StepPhase) -> None:
        """``Watch`` has noted a phase."""
        if self._marks:
            self.at(PARTS.get(phase, StepPart.OTHER))

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
        seconds: dict[StepPart, float] = {}
        for (part, start), (_, end) in pairwise(self._marks):
            seconds[part] = seconds.get(part, 0.0) + between(start, end)
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
