"""What an explanation and a comparison of plans say. No torch here.

Names of figures end in their unit; without one they are counts, shares (0..1) or names. Parts of the step time add up
to it. Where something could not be said, ``left_out`` says what, and why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from galvatron_lite.files import STRICT
from galvatron_lite.plans.schema import MemoryBreakdown

if TYPE_CHECKING:
    from pydantic import ConfigDict


class TimeClass(StrEnum):
    """What time goes into."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    COMMUNICATION = "communication"
    WAITING = "waiting"
    OPTIMIZER = "optimizer"
    HOST = "host"


class Constraint(StrEnum):
    """What keeps a plan from being faster."""

    MEMORY = "memory"
    LINK = "link"
    BATCH = "batch"
    BALANCE = "balance"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class TimePart:
    """A part of the step time of the slowest group of devices.

    Attributes:
        what: class.
        name: of compute the class of operation, of communication its cause, of waiting what is waited for.
        seconds: of the step: what delays it.
        hidden_seconds: of communication: what runs behind compute, besides.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    what: TimeClass
    name: str
    seconds: float
    hidden_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TimeAccount:
    """Where the time of a step goes on the group of devices that is busiest; the parts add up to ``step_seconds``.

    Attributes:
        step_seconds: of a step.
        group: number of the busiest group of devices.
        parts: largest first.
        operations: how compute is known by class of operation: ``estimated`` (from data sheets, class by class),
            ``shared out`` (whole layers were measured; data sheets say how their time divides), or empty.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    step_seconds: float
    group: int
    parts: tuple[TimePart, ...]
    operations: str = ""

    def seconds_of(self, what: TimeClass) -> float:
        """Seconds of all parts of a class."""
        return sum(part.seconds for part in self.parts if part.what is what)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A run of layers done otherwise in one dimension, everything else equal.

    Attributes:
        dimension: in which it differs.
        strategy: of the run instead.
        off: whether it is the run without that dimension at all.
        added_step_seconds: what a step would take longer; negative: less.
        added_bytes: what a device of the run would hold more at its worst moment; negative: less.
        fits: whether that is within the budget.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    dimension: str
    strategy: str
    off: bool
    added_step_seconds: float
    added_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class RunChoice:
    """What was chosen for a run of layers, and what that buys.

    Attributes:
        stages: numbers of the stages that hold such a run; several where they do the same.
        first, last: names of its first and last layer.
        layers: how many, over all those stages.
        kinds: of layers, by name.
        strategy: chosen.
        step_seconds: what its layers take of a step of their devices, mean over the stages.
        neighbours: the same run done otherwise.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    stages: tuple[int, ...]
    first: str
    last: str
    layers: int
    kinds: tuple[str, ...]
    strategy: str
    step_seconds: float
    neighbours: tuple[Neighbour, ...] = ()


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of the devices of a group at their worst moment.

    Attributes:
        group: number of the group of devices.
        stages: that it runs.
        used_bytes: on one of its devices.
        budget_bytes: it may use.
        moment: when that is, in words.
        layer: whose pass it is; empty for the optimizer's moment.
        microbatch: micro-batch of that pass, from 0; -1 for the optimizer's.
        memory: by what it is for, bytes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    group: int
    stages: tuple[int, ...]
    used_bytes: int
    budget_bytes: int
    moment: str
    layer: str
    microbatch: int
    memory: MemoryBreakdown


@dataclass(frozen=True, slots=True)
class Bound:
    """Something that keeps the plan from being faster.

    Attributes:
        constraint: which.
        said: a line.
        seconds: of a step that could be had without it, or at most, where known; ``said`` tells what is changed.
        binds: whether it does.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    constraint: Constraint
    said: str
    seconds: float | None
    binds: bool


@dataclass(frozen=True, slots=True)
class MemoryStep:
    """The fastest plan from a budget on.

    Attributes:
        budget_bytes: a device that it needs.
        step_seconds: of it.
        summary: what it does.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    budget_bytes: int
    step_seconds: float
    summary: str


@dataclass(frozen=True, slots=True)
class MemoryPrice:
    """What a step gains by more memory on each device: a difference of two plans, as plans are discrete.

    Attributes:
        budget_bytes: a device, now.
        added_bytes: more, on each device.
        step_seconds: of the fastest plan now.
        then_step_seconds: of the fastest plan with the memory added.
        seconds_per_gib: seconds a step that each of the added GiB saves.
        steps: the fastest plans between the two budgets, least budget first: where the price is paid.
        wanted_groups: groups of devices that hold more than the budget in the plan with the memory added; none where it
            has other groups.
        less_bytes: less, on each device; 0: not looked at.
        less_step_seconds: of the fastest plan then; None where none fits, or it was not looked at.
        proven: whether the searches proved both plans the fastest.
        gap: of the searches: how far from the fastest either may be, as a share.
        same_shape: whether only plans of the plan's own pipeline, micro-batches and schedule were looked at.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    budget_bytes: int
    added_bytes: int
    step_seconds: float
    then_step_seconds: float
    seconds_per_gib: float
    steps: tuple[MemoryStep, ...]
    wanted_groups: tuple[int, ...] = ()
    less_bytes: int = 0
    less_step_seconds: float | None = None
    proven: bool = True
    gap: float = 0.0
    same_shape: bool = False


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The best plan met that chooses otherwise in a dimension.

    Attributes:
        dimension: which.
        chosen: in the plan.
        instead: in the other.
        summary: what the other does.
        step_seconds: of it.
        added_step_seconds: than the plan.
        peak_bytes: on its fullest device.
        fits: whether that is within the budget.
        proven: whether no plan with that choice is faster.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    dimension: str
    chosen: str
    instead: str
    summary: str
    step_seconds: float
    added_step_seconds: float
    peak_bytes: int
    fits: bool
    proven: bool = False


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The fastest plan after a change.

    Attributes:
        name: of the change: ``memory_more``.
        change: in words.
        devices, batch: asked for.
        step_seconds: of the fastest plan then; None where there is none or it was not looked at.
        samples_per_second: of it.
        gain: samples a second over those of the plan now, less 1; step time where the batch is the same.
        summary: what it does.
        peak_bytes: on its fullest device.
        gap: how far from the fastest it may be, as a share of the step; 0 where it is proven.
        why: why there is no plan: nothing fits, or it was not tried for time.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    change: str
    devices: int
    batch: int
    step_seconds: float | None = None
    samples_per_second: float | None = None
    gain: float | None = None
    summary: str = ""
    peak_bytes: int | None = None
    gap: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Constants:
    """Calibrated constants of a device or of links.

    Attributes:
        name: of the entry.
        rows: published runs that it was fitted to; 0: it is as its source has it.
        residual: mean absolute relative error of step times of those runs after the fit.
        source: where it comes from.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    rows: int
    residual: float
    source: str


@dataclass(frozen=True, slots=True)
class Trust:
    """How sure the prediction is.

    Attributes:
        layers: ``measured`` or ``estimated``: the seconds of layers.
        layers_source: on or from what.
        communication: the same of links.
        communication_source: on or from what.
        spread: of the repetitions of measured layers (see ``profiler.schema.Origin``); 0 for estimates.
        links_residual: median of |predicted - measured| / measured of collectives; None where none were measured.
        constants: of estimates: the calibrated constants of the devices, how many published runs they were fitted to,
            and what error those had after the fit.
        error: mean absolute relative error of step times that is known of this kind of prediction; None: none is.
        error_of: what it was measured on.
        missing: what is not known of it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    layers: str
    layers_source: str
    communication: str
    communication_source: str
    spread: float = 0.0
    links_residual: float | None = None
    constants: tuple[Constants, ...] = ()
    error: float | None = None
    error_of: str = ""
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a plan is as it is.

    Attributes:
        model: its name.
        headline: the plan in a line.
        profile: name of what it was priced with.
        devices, batch, microbatches: of the plan.
        step_seconds: predicted.
        samples_per_second: of the whole cluster.
        best_step_seconds: of the fastest plan at the plan's budget, where it was looked for.
        time: where the step's time goes; None where that cannot be said.
        runs: what was chosen for the layers.
        memory: of each group of devices.
        bounds: what keeps it from being faster, the dearest first.
        price: of memory; None where it was not asked for or cannot be said.
        runners_up: the quickest other plan in each dimension.
        what_ifs: other memory, links, devices, batches.
        trust: how sure all this is.
        left_out: what is not said here, and why.
        notes: of the plan's prediction.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    model: str
    headline: str
    profile: str
    devices: int
    batch: int
    microbatches: int
    step_seconds: float
    samples_per_second: float
    best_step_seconds: float | None
    time: TimeAccount | None
    runs: tuple[RunChoice, ...]
    memory: tuple[StageMemory, ...]
    bounds: tuple[Bound, ...]
    price: MemoryPrice | None
    runners_up: tuple[RunnerUp, ...]
    what_ifs: tuple[WhatIf, ...]
    trust: Trust
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Compared:
    """One of several plans, priced on the common basis.

    Attributes:
        name: of its file, or what it was given as.
        headline: the plan in a line.
        devices, batch, microbatches: of the plan.
        step_seconds: predicted.
        samples_per_second: of it.
        said_step_seconds: what its own file predicts; None where it says nothing.
        peak_bytes: on its fullest device.
        fits: whether that is within the budget.
        memory: by what it is for, bytes, on its fullest device.
        time: seconds by class; they add up to ``step_seconds``.
        parts: the same in detail; None where that cannot be said.
        made_from: the profile its own figures were made from; empty where it names none.
        notes: of its prediction.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    headline: str
    devices: int
    batch: int
    microbatches: int
    step_seconds: float
    samples_per_second: float
    said_step_seconds: float | None
    peak_bytes: int
    fits: bool | None
    memory: MemoryBreakdown
    time: dict[str, float]
    parts: TimeAccount | None
    made_from: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """Consecutive layers that plans do otherwise.

    Attributes:
        first, last: names of the layers.
        count: how many.
        strategies: of each plan, in their order: ``stage 0: zero3x8``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    first: str
    last: str
    count: int
    strategies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Buys:
    """What a plan buys over the first one.

    Attributes:
        name: of the plan.
        added_step_seconds: than the first plan; negative: it is quicker.
        added_bytes: on the fullest device.
        said: in a line.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    added_step_seconds: float
    added_bytes: int
    said: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plans of one model side by side.

    Attributes:
        model: its name.
        basis: what all were priced with.
        budget_bytes: a device, that all are held against.
        plans: in the order they were given.
        layers: where they differ.
        buys: each but the first against it.
        notes: where a plan was made from something else, or for another batch or number of devices.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    model: str
    basis: str
    budget_bytes: int
    plans: tuple[Compared, ...]
    layers: tuple[LayerDifference, ...]
    buys: tuple[Buys, ...]
    notes: tuple[str, ...] = field(default=())
