"""Types of adaptation: its settings, measurements, corrections and decisions, and the records of its log."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from galvatron_lite.files import Strict
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile

LOG_VERSION = 1


class Planner(StrEnum):
    """Where new plans are searched."""

    PROCESS = "process"
    INLINE = "inline"


@dataclass(frozen=True, slots=True)
class Adapt(Strict):
    """How the plan is adapted while the model trains.

    Attributes:
        window: steps that are evaluated together. Ranks communicate once a window.
        warm_up: steps that are ignored after the start and after every switch of plan.
        threshold: relative deviation from the prediction that counts, of quartiles of the step time and of factors.
        patience: consecutive windows that must deviate before a new plan is searched.
        least_gain: share of the step time that a new plan must save; twice that for a plan that was left before.
        cool_down: steps after a switch in which no other plan is searched; a switch that made steps slower is undone.
        steps: of the run; a switch must pay back before they end. None: not known.
        horizon: steps in which a switch must pay back if ``steps`` is None.
        mem: memory budget per device of new plans, as for ``galvatron plan``; empty: that of the first plan, or 95 %.
        fix: pins of every new plan, as for ``galvatron plan``; ``auto_parallelize`` adds the pins of the first plan.
        forbid: dimensions that no new plan uses; ``auto_parallelize`` adds those of the first plan.
        log: file of decisions, one JSON line each, which a restarted run reads; empty: no log.
        planner: where plans are searched: in a ``process`` beside rank 0, or ``inline``, while all ranks wait.
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
    """Forward times of consecutive layers with one strategy, measured on the ranks of their stage."""

    first: str  # name of the first layer
    ranks: tuple[int, ...]
    seconds: tuple[float, ...]  # median of one micro-batch, on each of the ranks


@dataclass(frozen=True, slots=True)
class LinkPoint(Strict):
    """An all-reduce within a level of the cluster, measured between two steps on all groups of the level at once."""

    level: str
    size: int  # bytes of the tensor
    seconds: float  # of the slowest rank; the second fastest of nine measurements
    predicted: float  # seconds, by the uncorrected profile


@dataclass(frozen=True, slots=True)
class StepWindow(Strict):
    """Measurements of consecutive steps."""

    step: int  # steps trained at the end of the window
    seconds: tuple[float, float, float]  # quartiles over the steps of the slowest rank's step time
    groups: tuple[LayerGroup, ...] = ()
    memory: tuple[int, ...] = ()  # peak bytes of the allocator by rank; empty on CPUs
    links: tuple[LinkPoint, ...] = ()  # by level and size; empty if links were not measured


@dataclass(frozen=True, slots=True)
class LinkFactor(Strict):
    """How a level of the cluster differs from the profile."""

    level: str
    per_byte: float  # factor on the time per byte
    latency: float = 0.0  # additional seconds of an all-reduce of any size within the level


@dataclass(frozen=True, slots=True)
class Corrections(Strict):
    """Corrections of a profile."""

    links: tuple[LinkFactor, ...] = ()  # of levels that differ from the profile
    devices: tuple[float, ...] = ()  # factor on the compute time of each rank; empty: as profiled
    memory: float = 1.0  # factor on the predicted bytes of a plan; at least 1
    residual: float = 1.0  # factor on step times that the others do not explain


class AdaptAction(StrEnum):
    """The action of a decision: keep the plan, search for a new plan, switch to a plan, or undo the last switch."""

    KEEP = "keep"
    PLAN = "plan"
    SWITCH = "switch"
    BACK = "back"


@dataclass(frozen=True, slots=True)
class Decision(Strict):
    """A decision and its reason."""

    step: int  # steps trained before
    action: AdaptAction
    reason: str  # for people, with the figures
    corrections: Corrections = Corrections()  # of the profile from now on
    plan: str = ""  # ``plan_name`` of the plan to continue with; empty: the current plan


@dataclass(frozen=True, slots=True)
class Started(Strict):
    """The inputs of decisions and new plans: the first record of a log, and the query to a planning process."""

    version: int  # of this schema
    settings: Adapt  # include the budget and the pins of new plans
    profile: Profile  # uncorrected
    plan: Plan  # the current plan; new plans have its devices, batch, tolerance and margin
    step: int = 0  # steps trained before
    corrections: Corrections = Corrections()  # of the profile so far
    kind: Literal["started"] = "started"


@dataclass(frozen=True, slots=True)
class WindowRecord(Strict):
    """A window was evaluated."""

    window: StepWindow
    kind: Literal["seen"] = "seen"


@dataclass(frozen=True, slots=True)
class PlannedRecord(Strict):
    """The fastest plan by the corrected profile, or the error of the search."""

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
    """A switch has ended, after some seconds or with an error."""

    step: int
    seconds: float
    error: str = ""
    kind: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class Exhausted(Strict):
    """Memory was exhausted on some ranks."""

    step: int  # steps trained before
    ranks: tuple[int, ...]
    factor: float  # on the predicted bytes: the new correction of memory
    kind: Literal["exhausted"] = "exhausted"


Event = WindowRecord | PlannedRecord | Done | Exhausted
"""An event that changes the state of decisions."""
Record = Started | Event | Decided
"""A line of a log."""
