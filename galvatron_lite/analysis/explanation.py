"""What an explanation and a comparison of plans say.

Names of figures end in their unit; without one they are counts, shares (0..1) or names. Parts of the step time add up
to it. Where something could not be said, ``left_out`` says what, and why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.files import Strict
from galvatron_lite.model.graph import ModelGraph, OperatorClass
from galvatron_lite.plans.schema import MemoryBreakdown


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
class TimePart(Strict):
    """A part of the step time of the slowest group of devices."""

    what: TimeClass  # class
    name: str  # of compute the class of operation, of communication its cause, of waiting what is waited for
    seconds: float  # of the step: what delays it
    hidden_seconds: float = 0.0  # of communication: what runs behind compute, besides


@dataclass(frozen=True, slots=True)
class TimeAccount(Strict):
    """Where the time of a step goes on the group of devices that is busiest; the parts add up to ``step_seconds``."""

    step_seconds: float
    group: int  # number of the busiest group of devices
    parts: tuple[TimePart, ...]  # largest first
    # how compute is known by class of operation: ``estimated`` (from data sheets, class by class), ``shared out``
    # (whole layers were measured; data sheets say how their time divides), or empty
    operations: str = ""

    def seconds_of(self, what: TimeClass) -> float:
        """Seconds of all parts of a class."""
        return sum(part.seconds for part in self.parts if part.what is what)


@dataclass(frozen=True, slots=True)
class Neighbour(Strict):
    """A run of layers done otherwise in one dimension, everything else equal."""

    dimension: str  # in which it differs
    strategy: str  # of the run instead
    off: bool  # whether it is the run without that dimension at all
    added_step_seconds: float  # what a step would take longer; negative: less
    added_bytes: int  # what a device of the run would hold more at its worst moment; negative: less
    fits: bool  # whether that is within the budget


@dataclass(frozen=True, slots=True)
class RunChoice(Strict):
    """What was chosen for a run of layers, and what that buys."""

    stages: tuple[int, ...]  # numbers of the stages that hold such a run; several where they do the same
    first: str  # first, last: names of its first and last layer
    last: str
    layers: int  # how many, over all those stages
    kinds: tuple[str, ...]  # of layers, by name
    strategy: str  # chosen
    step_seconds: float  # what its layers take of a step of their devices, mean over the stages
    neighbours: tuple[Neighbour, ...] = ()  # the same run done otherwise


@dataclass(frozen=True, slots=True)
class StageMemory(Strict):
    """Memory of the devices of a group at their worst moment."""

    group: int  # number of the group of devices
    stages: tuple[int, ...]  # that it runs
    used_bytes: int  # on one of its devices
    budget_bytes: int  # it may use
    moment: str  # when that is, in words
    layer: str  # whose pass it is; empty for the optimizer's moment
    microbatch: int  # micro-batch of that pass, from 0; -1 for the optimizer's
    memory: MemoryBreakdown  # by what it is for, bytes


@dataclass(frozen=True, slots=True)
class Bound(Strict):
    """Something that keeps the plan from being faster."""

    constraint: Constraint  # which
    said: str  # a line
    # of a step that could be had without it, or at most, where known; ``said`` tells what is changed
    seconds: float | None
    binds: bool  # whether it does


@dataclass(frozen=True, slots=True)
class MemoryStep(Strict):
    """The fastest plan from a budget on."""

    budget_bytes: int  # a device that it needs
    step_seconds: float  # of it
    summary: str  # what it does


@dataclass(frozen=True, slots=True)
class MemoryPrice(Strict):
    """What a step gains by more memory on each device: a difference of two plans, as plans are discrete."""

    budget_bytes: int  # a device, now
    added_bytes: int  # more, on each device
    step_seconds: float  # of the fastest plan now
    then_step_seconds: float  # of the fastest plan with the memory added
    seconds_per_gib: float  # seconds a step that each of the added GiB saves
    # the fastest plans between the two budgets, least budget first: where the price is paid
    steps: tuple[MemoryStep, ...]
    # groups of devices that hold more than the budget in the plan with the memory added; none where it has other
    # groups
    wanted_groups: tuple[int, ...] = ()
    less_bytes: int = 0  # less, on each device; 0: not looked at
    less_step_seconds: float | None = None  # of the fastest plan then; None where none fits, or it was not looked at
    proven: bool = True  # whether the searches proved both plans the fastest
    gap: float = 0.0  # of the searches: how far from the fastest either may be, as a share
    same_shape: bool = False  # whether only plans of the plan's own pipeline, micro-batches and schedule were looked at


@dataclass(frozen=True, slots=True)
class RunnerUp(Strict):
    """The best plan met that chooses otherwise in a dimension."""

    dimension: str  # which
    chosen: str  # in the plan
    instead: str  # in the other
    summary: str  # what the other does
    step_seconds: float  # of it
    added_step_seconds: float  # than the plan
    peak_bytes: int  # on its fullest device
    fits: bool  # whether that is within the budget
    proven: bool = False  # whether no plan with that choice is faster


@dataclass(frozen=True, slots=True)
class WhatIf(Strict):
    """The fastest plan after a change."""

    name: str  # of the change: ``memory_more``
    change: str  # in words
    devices: int  # devices, batch: asked for
    batch: int
    step_seconds: float | None = None  # of the fastest plan then; None where there is none or it was not looked at
    samples_per_second: float | None = None  # of it
    # samples a second over those of the plan now, less 1; step time where the batch is the same
    gain: float | None = None
    summary: str = ""  # what it does
    peak_bytes: int | None = None  # on its fullest device
    gap: float = 0.0  # how far from the fastest it may be, as a share of the step; 0 where it is proven
    why: str = ""  # why there is no plan: nothing fits, or it was not tried for time


@dataclass(frozen=True, slots=True)
class Constants(Strict):
    """Calibrated constants of a device or of links."""

    name: str  # of the entry
    rows: int  # published runs that it was fitted to; 0: it is as its source has it
    residual: float  # mean absolute relative error of step times of those runs after the fit
    source: str  # where it comes from


@dataclass(frozen=True, slots=True)
class Trust(Strict):
    """How sure the prediction is."""

    layers: str  # ``measured`` or ``estimated``: the seconds of layers
    layers_source: str  # on or from what
    communication: str  # the same of links
    communication_source: str  # on or from what
    spread: float = 0.0  # of the repetitions of measured layers (see ``profiler.schema.Origin``); 0 for estimates
    # median of |predicted - measured| / measured of collectives; None where none were measured
    links_residual: float | None = None
    # of estimates: the calibrated constants of the devices, how many published runs they were fitted to, and what
    # error those had after the fit
    constants: tuple[Constants, ...] = ()
    # mean absolute relative error of step times that is known of this kind of prediction; None: none is
    error: float | None = None
    error_of: str = ""  # what it was measured on
    missing: tuple[str, ...] = ()  # what is not known of it


@dataclass(frozen=True, slots=True)
class Explanation(Strict):
    """Why a plan is as it is."""

    model: str  # its name
    headline: str  # the plan in a line
    profile: str  # name of what it was priced with
    devices: int  # devices, batch, microbatches: of the plan
    batch: int
    microbatches: int
    step_seconds: float  # predicted
    samples_per_second: float  # of the whole cluster
    best_step_seconds: float | None  # of the fastest plan at the plan's budget, where it was looked for
    time: TimeAccount | None  # where the step's time goes; None where that cannot be said
    runs: tuple[RunChoice, ...]  # what was chosen for the layers
    memory: tuple[StageMemory, ...]  # of each group of devices
    bounds: tuple[Bound, ...]  # what keeps it from being faster, the dearest first
    price: MemoryPrice | None  # of memory; None where it was not asked for or cannot be said
    runners_up: tuple[RunnerUp, ...]  # the quickest other plan in each dimension
    what_ifs: tuple[WhatIf, ...]  # other memory, links, devices, batches
    trust: Trust  # how sure all this is
    left_out: tuple[str, ...] = ()  # what is not said here, and why
    notes: tuple[str, ...] = ()  # of the plan's prediction


@dataclass(frozen=True, slots=True)
class Compared(Strict):
    """One of several plans, priced on the common basis."""

    name: str  # of its file, or what it was given as
    headline: str  # the plan in a line
    devices: int  # devices, batch, microbatches: of the plan
    batch: int
    microbatches: int
    step_seconds: float  # predicted
    samples_per_second: float  # of it
    said_step_seconds: float | None  # what its own file predicts; None where it says nothing
    peak_bytes: int  # on its fullest device
    fits: bool | None  # whether that is within the budget
    memory: MemoryBreakdown  # by what it is for, bytes, on its fullest device
    time: dict[str, float]  # seconds by class; they add up to ``step_seconds``
    parts: TimeAccount | None  # the same in detail; None where that cannot be said
    made_from: str = ""  # the profile its own figures were made from; empty where it names none
    notes: tuple[str, ...] = ()  # of its prediction


@dataclass(frozen=True, slots=True)
class LayerDifference(Strict):
    """Consecutive layers that plans do otherwise."""

    first: str  # first, last: names of the layers
    last: str
    count: int
    strategies: tuple[str, ...]  # of each plan, in their order: ``stage 0: zero3x8``


@dataclass(frozen=True, slots=True)
class Buys(Strict):
    """What a plan buys over the first one."""

    name: str  # of the plan
    added_step_seconds: float  # than the first plan; negative: it is quicker
    added_bytes: int  # on the fullest device
    said: str  # in a line


@dataclass(frozen=True, slots=True)
class Comparison(Strict):
    """Plans of one model side by side."""

    model: str  # its name
    basis: str  # what all were priced with
    budget_bytes: int  # a device, that all are held against
    plans: tuple[Compared, ...]  # in the order they were given
    layers: tuple[LayerDifference, ...]  # where they differ
    buys: tuple[Buys, ...]  # each but the first against it
    # where a plan was made from something else, or for another batch or number of devices
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class ExpectedError:
    """The error of estimated step times."""

    models: str  # the kind of model that it was found of
    error: float | None  # mean absolute relative error; None where none was measured
    source: str = ""  # what it was found on


def expected_error(graph: ModelGraph, calibration: Calibration) -> ExpectedError:
    """The error of models like this one: with pixels, with attention and no pixels, or others, of which no published
    run is scored."""
    errors = calibration.expected_error
    if any(kind.dims.height for kind in graph.kinds.values()):
        source = "published runs, by some of which constants of convolutions were chosen"
        return ExpectedError("image networks", errors.get("images"), source)
    if any(op.kind is OperatorClass.ATTENTION for kind in graph.kinds.values() for op in kind.operators):
        return ExpectedError(
            "language models", errors.get("without_family"), "published runs of software not fitted to"
        )
    return ExpectedError("models with neither attention nor pixels", None)
