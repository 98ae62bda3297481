"""When the parts of a step begin on this rank: by the host's clock, or by events on a GPU, which nobody waits for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.runs.schema import StepPart
from galvatron_lite.runtime.watch.notes import StepPhase

PARTS = {
    StepPhase.FORWARD: StepPart.FORWARD,
    StepPhase.BACKWARD: StepPart.BACKWARD,
    StepPhase.WEIGHT: StepPart.WEIGHT,
    StepPhase.GRADIENTS: StepPart.GRADIENTS,
    StepPhase.CHECK: StepPart.CHECK,
    StepPhase.OPTIMIZER: StepPart.OPTIMIZER,
}
"""What ``Watch`` notes, as parts of a step."""
Enter = Callable[[str], None]


class StepClock:
    """Marks of the step that is under way.

    Args:
        device: of this rank.

    Attributes:
        told: is told of every part that begins; the profiler's ranges.
    """

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], Any] = _event if device.type == "cuda" else perf_counter
        self._marks: list[tuple[StepPart, Any]] = []
        self.told: Enter | None = None

    def at(self, part: StepPart) -> None:
        """A part begins, and the one before it ends."""
        self._marks.append((part, self._mark()))
        if self.told is not None:
            self.told(part.value)

    def phase(self, phase: StepPhase) -> None:
        """``Watch`` comes to a phase."""
        if self._marks:
            self.at(PARTS.get(phase, StepPart.OTHER))

    def begin(self) -> None:
        """A step begins."""
        self._marks = []
        self.at(StepPart.OTHER)

    def end(self) -> Taken:
        """The step is done."""
        taken = Taken([*self._marks, (StepPart.OTHER, self._mark())])
        self._marks = []
        if self.told is not None:
            self.told("")
        return taken


class Taken:
    """The marks of a step that is done.

    Attributes:
        marks: each part, and when it began; the last one ends the step.
    """

    __slots__ = ("marks",)

    def __init__(self, marks: list[tuple[StepPart, Any]]) -> None:
        self.marks = marks

    @property
    def is_ready(self) -> bool:
        """Whether the GPU has come to its end."""
        end = self.marks[-1][1]
        return isinstance(end, float) or bool(end.query())

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return _between(self.marks[0][1], self.marks[-1][1])

    def since(self, earlier: Taken | None) -> float:
        """Seconds from the end of a step before it to its beginning."""
        return 0.0 if earlier is None else max(_between(earlier.marks[-1][1], self.marks[0][1]), 0.0)

    def parts(self) -> dict[StepPart, float]:
        """Seconds by part; they add up to those of the step."""
        found: dict[StepPart, float] = {}
        for (part, start), (_, end) in pairwise(self.marks):
            found[part] = found.get(part, 0.0) + _between(start, end)
        return found


class Scalar:
    """A value on a device that is looked at later, so that nobody waits for it."""

    __slots__ = ("_event", "_value")

    def __init__(self, value: Tensor | float) -> None:
        self._event: Any = None
        self._value = value.detach() if isinstance(value, Tensor) else value
        if isinstance(self._value, Tensor) and self._value.is_cuda:
            self._value = torch.empty_like(self._value, device="cpu", pin_memory=True).copy_(
                self._value, non_blocking=True
            )
            self._event = _event()

    @property
    def is_ready(self) -> bool:
        """Whether it can be had without waiting."""
        return self._event is None or bool(self._event.query())

    def get(self) -> float:
        """The value."""
        return float(self._value)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1e3
