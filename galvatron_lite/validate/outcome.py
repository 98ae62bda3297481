"""What comes of predicting one published run."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.plans.schema import MemoryBreakdown, TimeBreakdown


@dataclass(frozen=True, slots=True)
class Skipped:
    """A run that cannot be represented.

    Attributes:
        reason: short; one of few.
        detail: the field, its value and what to give instead, for people; empty where the reason says all.
    """

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run measured, in seconds and bytes; None where it did not.

    Attributes:
        step_seconds: of one optimizer step.
        peak_memory: on the device, or devices, that the run speaks of.
    """

    step_seconds: float | None
    peak_memory: int | None


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the cost model says of a run.

    Attributes:
        step_seconds: of one optimizer step.
        peak_memory: bytes, measured in the way the run measured it (which rank, with or without driver context).
        device_memory: bytes on the fullest device, driver context included; to be held against its capacity.
        capacity: bytes of the device.
        time: where the step goes.
        memory: where the memory of the stage that the run speaks of goes.
    """

    step_seconds: float
    peak_memory: int
    device_memory: int
    capacity: int
    time: TimeBreakdown
    memory: MemoryBreakdown
