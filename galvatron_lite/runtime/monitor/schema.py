"""Settings, measurements, corrections and decisions of adapting, and the records of its log."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from galvatron_lite.files import Strict
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile

LOG_VERSION = 1


class Planner(StrEnum):
    """Where new plans are made."""

    PROCESS = "process"
    INLINE = "inline"


@dataclass(frozen=True, slots=True)
class Adapt(Strict):
    """How training adapts.

    Attributes:
        window: steps that are evaluated together; ranks communicate once a window.
        warm_up: first steps, after the start and after every switch, that are ignored.
        threshold: relative deviation from the prediction that counts: of the step time's quartiles, of factors.
        patience: windows in a row that must deviate before anything is done.
        least_gain: share of the step time that a new plan must gain; twice that, to go back to a plan that was left.
        cool_down: steps after a switch without another one, but back where it made steps slower.
        steps: of the whole run; a switch must pay back before they end. None: not known.
        horizon: steps ahead in which a switch must pay back where ``steps`` is not given.
        mem: budget a device of new plans, as for ``galvatron plan``; empty: that of the first plan, or 95 %.
        fix: pins of every new plan, as for ``galvatron plan``; ``auto_parallelize`` adds its own.
        forbid: dimensions that no new plan uses; likewise.
        log: file that decisions are written to, a JSON line each, and that a restarted run reads; empty: none.
        planner: where plans are made: in a ``process`` beside rank 0, or ``inline``, while all ranks wait.
    """

    window: int = 20
    warm_up: int = 5
    threshold: float = 0.15
    patience: int = 2
    least_gain: float = 0.05
    cool_down: int = 100
    steps: int | None = None
    horizon: int = 1000
    mem: str | int = ""
    fix: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    log: str = ""
    planner: Planner = Planner.PROCESS


@dataclass(frozen=True, slots=True)
class LayerGroup(Strict):
    """Forward passes of consecutive layers of one stage and strategy."""

    first: str  # name of its first layer
    ranks: tuple[int, ...]
    seconds: tuple[float, ...]  # of one micro-batch, median, on each rank


@dataclass(frozen=True, slots=True)
class LinkPoint(Strict):
    """An all-reduce between the members of a level, measured between two steps on all groups of the level at once."""

    level: str
    size: int  # bytes of the tensor
    seconds: float  # of the slowest rank; the second quickest of nine times
    predicted: float  # seconds, by the profile as it was made


@dataclass(frozen=True, slots=True)
class StepWindow(Strict):
    """Measurements of some steps."""

    step: int  # steps trained at its end
    # first quartile, median and third quartile over its steps of the slowest rank's step time
    seconds: tuple[float, float, float]
    groups: tuple[LayerGroup, ...] = ()
    memory: tuple[int, ...] = ()  # peak bytes of the allocator by rank; empty on CPUs
    links: tuple[LinkPoint, ...] = ()  # by level and size; empty where they were not measured


@dataclass(frozen=True, slots=True)
class LinkFactor(Strict):
    """How a level differs from the profile."""

    level: str
    per_byte: float  # factor on the time a byte takes
    latency: float = 0.0  # seconds that an all-reduce between its members takes longer, whatever its size


@dataclass(frozen=True, slots=True)
class Corrections(Strict):
    """How the profile is corrected."""

    links: tuple[LinkFactor, ...] = ()  # by level
    devices: tuple[float, ...] = ()  # factor on the compute time of each rank; empty: as profiled
    memory: float = 1.0  # factor on the predicted bytes of a plan; at least 1
    residual: float = 1.0  # factor on step times that none of these explains


class AdaptAction(StrEnum):
    """What is decided."""

    KEEP = "keep"
    PLAN = "plan"
    SWITCH = "switch"
    BACK = "back"


@dataclass(frozen=True, slots=True)
class Decision(Strict):
    """What is done, and why."""

    step: int  # steps trained before
    action: AdaptAction
    reason: str  # in words, with the figures
    corrections: Corrections = Corrections()  # of the profile, from now on
    plan: str = ""  # name of the plan to continue with (``plan_name``); empty: the present one


@dataclass(frozen=True, slots=True)
class Started(Strict):
    """What decisions and new plans depend on: the first record of a log, and the query to a planning process."""

    version: int  # of this schema
    settings: Adapt  # also the budget and the pins of new plans
    profile: Profile  # as it was made
    plan: Plan  # the present one; its devices, batch, tolerance and margin hold for the next one
    step: int = 0  # steps that were trained before
    corrections: Corrections = Corrections()  # of the profile, so far
    kind: Literal["started"] = "started"


@dataclass(frozen=True, slots=True)
class WindowRecord(Strict):
    """A window was evaluated."""

    window: StepWindow
    kind: Literal["seen"] = "seen"


@dataclass(frozen=True, slots=True)
class PlannedRecord(Strict):
    """The fastest plan by the corrected profile; or why there is none."""

    step: int
    plan: Plan | None = None
    error: str = ""
    kind: Literal["planned"] = "planned"


@dataclass(frozen=True, slots=True)
class Decided(Strict):
    """A decision was taken."""

    decision: Decision
    kind: Literal["decided"] = "decided"


@dataclass(frozen=True, slots=True)
class Done(Strict):
    """A switch took so many seconds; or failed, for ``error``."""

    step: int
    seconds: float
    error: str = ""
    kind: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class Exhausted(Strict):
    """Memory ran out on some ranks."""

    step: int  # steps trained before
    ranks: tuple[int, ...]
    factor: float  # on the predicted bytes, by which the budget is corrected
    kind: Literal["exhausted"] = "exhausted"


Event = WindowRecord | PlannedRecord | Done | Exhausted
"""What the state of decisions changes with."""
Record = Started | Event | Decided
"""A line of a log."""
