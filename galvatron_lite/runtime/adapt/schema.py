"""What adapting works with and logs: settings, measurements, corrections, decisions. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Literal

from galvatron_lite.files import STRICT
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile

if TYPE_CHECKING:
    from pydantic import ConfigDict

LOG_VERSION = 1


class Planner(StrEnum):
    """Where plans are made anew."""

    PROCESS = "process"
    INLINE = "inline"


@dataclass(frozen=True, slots=True)
class Adapt:
    """How training adapts.

    Attributes:
        window: steps that are looked at together; ranks speak to one another once a window.
        warm_up: first steps, after the start and after every switch, that are not looked at.
        threshold: relative deviation from the prediction that counts: of the step time's quartiles, of factors.
        patience: windows in a row that must deviate before anything is done.
        least_gain: share of the step time that a new plan must gain; twice that, to go back to a plan that was left.
        cool_down: steps after a switch in which no other one is made, but back where it made steps slower.
        steps: of the whole run; a switch must pay back before they end. None: not known.
        horizon: steps ahead in which a switch must pay back where ``steps`` is not given.
        mem: budget a device of new plans, as for ``galvatron plan``; empty: that of the first plan, or 95 %.
        fix: what every new plan keeps to, as for ``galvatron plan``; ``auto_parallelize`` adds its own.
        forbid: dimensions that no new plan uses; likewise.
        log: file that decisions are written to, a JSON line each, and that a run started again learns from; empty:
            none.
        planner: where plans are made: in a ``process`` beside rank 0, or ``inline``, while all ranks wait.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
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
class LayerGroup:
    """Consecutive layers of one stage and strategy, in forward."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    first: str  # name of its first layer
    ranks: tuple[int, ...]  # that run it, in order
    seconds: tuple[float, ...]  # of one micro-batch's forward, median, on each of them


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """An all-reduce between the members of a level, measured between two steps on all groups of the level at once."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    level: str  # its name
    size: int  # bytes of the tensor
    seconds: float  # of the slowest rank; the second quickest of nine times
    predicted: float  # seconds, by the profile as it was made


@dataclass(frozen=True, slots=True)
class StepWindow:
    """What was measured of some steps."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    step: int  # steps trained at its end
    # first quartile, median and third quartile over its steps of the slowest rank's step time
    seconds: tuple[float, float, float]
    groups: tuple[LayerGroup, ...] = ()  # layers
    # peak bytes by rank, as the allocator holds them; empty where it does not tell (on CPUs)
    memory: tuple[int, ...] = ()
    links: tuple[LinkPoint, ...] = ()  # by level and size; empty where nothing was wrong with the steps


@dataclass(frozen=True, slots=True)
class LinkFactor:
    """How a level differs from the profile."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    level: str  # its name
    per_byte: float  # factor on the time a byte takes
    latency: float = 0.0  # seconds that an all-reduce between its members takes longer, whatever its size


@dataclass(frozen=True, slots=True)
class Corrections:
    """How the profile is corrected."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    links: tuple[LinkFactor, ...] = ()  # by level
    devices: tuple[float, ...] = ()  # factor on the compute time of each rank; empty: as profiled
    memory: float = 1.0  # factor on the bytes that a plan is predicted to take; at least 1
    residual: float = 1.0  # factor on step times that none of these explains


class AdaptAction(StrEnum):
    """What is decided."""

    KEEP = "keep"
    PLAN = "plan"
    SWITCH = "switch"
    BACK = "back"


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done, and why."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    step: int  # steps trained when it was taken
    action: AdaptAction  # what is done
    reason: str  # in words, with the figures
    corrections: Corrections = Corrections()  # of the profile, as they are from now on
    plan: str = ""  # name of the plan to go on with (``plan_name``); empty: the present one


@dataclass(frozen=True, slots=True)
class Started:
    """First record of a log: what decisions are taken from."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    version: int  # of this schema
    settings: Adapt  # of adapting
    profile: Profile  # as it was made
    plan: Plan  # that training began with, with its prediction
    step: int = 0  # steps that were trained before
    corrections: Corrections = Corrections()  # of the profile, from an earlier run
    kind: Literal["started"] = "started"


@dataclass(frozen=True, slots=True)
class WindowRecord:
    """A window was looked at."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    window: StepWindow
    kind: Literal["seen"] = "seen"


@dataclass(frozen=True, slots=True)
class PlannedRecord:
    """A plan was made anew; or why there is none."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    step: int
    plan: Plan | None = None
    error: str = ""
    kind: Literal["planned"] = "planned"


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision was taken."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    decision: Decision
    kind: Literal["decided"] = "decided"


@dataclass(frozen=True, slots=True)
class Done:
    """A switch was made, in so many seconds; an error says why it was not."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    step: int
    seconds: float
    error: str = ""
    kind: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Memory ran out on some ranks."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    step: int  # steps trained before
    ranks: tuple[int, ...]  # where
    factor: float  # on the bytes that were predicted, by which the budget is corrected
    kind: Literal["exhausted"] = "exhausted"


Record = Started | WindowRecord | PlannedRecord | Decided | Done | Exhausted
"""A line of a log."""
