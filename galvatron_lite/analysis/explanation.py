"""What an explanation and a comparison of plans hold.

Names of quantities end in their unit. Numbers without a unit are counts or shares (0 to 1). ``left_out`` lists what
could not be explained, and why.
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
    """What can keep a plan from being faster."""

    MEMORY = "memory"
    LINK = "link"
    BATCH = "batch"
    BALANCE = "balance"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class TimePart(Strict):
    """A part of the step time of the busiest group of devices."""

    what: TimeClass
    name: str  # of compute, the class of operation; of communication, its cause; of waiting, what is waited for
    seconds: float  # by which it delays the step
    hidden_seconds: float = 0.0  # of communication that runs behind compute, in addition


@dataclass(frozen=True, slots=True)
class TimeAccount(Strict):
    """Where the time of a step goes on the busiest group of devices; the parts add up to ``step_seconds``."""

    step_seconds: float
    group: int  # number of the busiest group of devices
    parts: tuple[TimePart, ...]  # largest first
    # ``estimated`` if classes of operation come from data sheets, ``shared out`` if measured layers are divided into
    # classes by data sheets, or empty
    operations: str = ""

    def seconds_of(self, what: TimeClass) -> float:
        """Seconds of all parts of a class."""
        return sum(part.seconds for part in self.parts if part.what is what)


@dataclass(frozen=True, slots=True)
class Neighbour(Strict):
    """The plan with one run of layers changed in one dimension."""

    dimension: str
    strategy: str  # of the changed run
    off: bool  # whether the change removes the dimension from the run
    added_step_seconds: float  # negative: the neighbour is quicker
    added_bytes: int  # at the worst moment of a device of the run; negative: the neighbour needs less
    fits: bool  # whether it is within the budget


@dataclass(frozen=True, slots=True)
class RunChoice(Strict):
    """The strategy of a run of layers, and what changing it would cost."""

    stages: tuple[int, ...]  # numbers of the stages that have this run
    first: str  # name of the first layer
    last: str  # name of the last layer
    layers: int  # number of layers, over all these stages
    kinds: tuple[str, ...]  # names of the kinds of layers
    strategy: str
    step_seconds: float  # that the layers take on their devices in a step, mean over the stages
    neighbours: tuple[Neighbour, ...] = ()


@dataclass(frozen=True, slots=True)
class StageMemory(Strict):
    """Memory of the devices of a group at their worst moment."""

    group: int  # number of the group of devices
    stages: tuple[int, ...]  # numbers of the stages that it runs
    used_bytes: int  # on one of its devices
    budget_bytes: int
    moment: str  # when that is, in words
    layer: str  # whose pass it is; empty for the optimizer's update
    microbatch: int  # of that pass, from 0; -1 for the optimizer's update
    memory: MemoryBreakdown  # bytes by purpose


@dataclass(frozen=True, slots=True)
class Bound(Strict):
    """A constraint on the step time."""

    constraint: Constraint
    said: str  # a sentence
    seconds: float | None  # of a step that would be saved without it, or at most; None if not known
    binds: bool  # whether it keeps the plan from being faster


@dataclass(frozen=True, slots=True)
class MemoryStep(Strict):
    """The fastest plan from a budget on."""

    budget_bytes: int  # a device, that the plan needs
    step_seconds: float
    summary: str  # of the plan


@dataclass(frozen=True, slots=True)
class MemoryPrice(Strict):
    """What more memory on each device gains: the difference between the fastest plans of two budgets."""

    budget_bytes: int  # a device, now
    added_bytes: int  # on each device
    step_seconds: float  # of the fastest plan now
    then_step_seconds: float  # of the fastest plan with the added memory
    seconds_per_gib: float  # seconds a step that each added GiB saves
    steps: tuple[MemoryStep, ...]  # the fastest plans between the two budgets, least budget first
    # groups of devices that exceed the budget in the plan with the added memory; none if its groups are others
    wanted_groups: tuple[int, ...] = ()
    less_bytes: int = 0  # removed from each device in another search; 0: not searched
    less_step_seconds: float | None = None  # of the fastest plan then; None if none fits, or it was not searched
    proven: bool = True  # whether both plans are proven to be the fastest
    gap: float = 0.0  # share by which either plan may be slower than the fastest
    same_shape: bool = False  # whether only plans of the same pipeline, micro-batches and schedule were searched


@dataclass(frozen=True, slots=True)
class RunnerUp(Strict):
    """The best plan of a search that makes another choice in one dimension."""

    dimension: str
    chosen: str  # value in the plan
    instead: str  # value in the runner-up
    summary: str  # of the runner-up
    step_seconds: float
    added_step_seconds: float
    peak_bytes: int  # on its fullest device
    fits: bool  # whether it is within the budget
    proven: bool = False  # whether no plan with that choice is faster


@dataclass(frozen=True, slots=True)
class WhatIf(Strict):
    """The fastest plan after a change."""

    name: str  # of the change: ``memory_more``
    change: str  # in words
    devices: int
    batch: int
    step_seconds: float | None = None  # of the fastest plan; None if there is none, or it was not searched
    samples_per_second: float | None = None
    gain: float | None = None  # samples a second over those of the plan now, minus 1
    summary: str = ""  # of the fastest plan
    peak_bytes: int | None = None  # on its fullest device
    gap: float = 0.0  # share of the step by which it may be slower than the fastest; 0 if it is proven
    why: str = ""  # why there is no plan


@dataclass(frozen=True, slots=True)
class Constants(Strict):
    """Calibrated constants of a device or of links."""

    name: str  # of the entry
    rows: int  # published runs that it was fitted to; 0: it is taken from its source
    residual: float  # mean absolute relative error of the step times of these runs after the fit
    source: str


@dataclass(frozen=True, slots=True)
class Trust(Strict):
    """How accurate the prediction is."""

    layers: str  # ``measured`` or ``estimated``: the seconds of layers
    layers_source: str  # device and date, or data sheet
    communication: str  # ``measured`` or ``estimated``: the seconds of collectives
    communication_source: str
    spread: float = 0.0  # of repetitions of measured layers (see ``profiler.schema.Origin``); 0 for estimates
    links_residual: float | None = None  # median relative residual of fitted collectives; None if none were measured
    constants: tuple[Constants, ...] = ()  # calibrated constants of the devices, for estimates
    error: float | None = None  # mean absolute relative error of such step times; None if not known
    error_of: str = ""  # what the error was measured on
    missing: tuple[str, ...] = ()  # errors that are not known


@dataclass(frozen=True, slots=True)
class Explanation(Strict):
    """An explanation of a plan."""

    model: str  # its name
    headline: str  # the plan in a line
    profile: str  # name of the profile that it is priced with
    devices: int
    batch: int
    microbatches: int
    step_seconds: float  # predicted
    samples_per_second: float  # of the whole cluster
    best_step_seconds: float | None  # of the fastest plan within the plan's budget; None if not searched
    time: TimeAccount | None  # None if the plan cannot be explained in parts
    runs: tuple[RunChoice, ...]
    memory: tuple[StageMemory, ...]  # of each group of devices
    bounds: tuple[Bound, ...]  # the most expensive first
    price: MemoryPrice | None  # of memory; None if it was not wanted or is not known
    runners_up: tuple[RunnerUp, ...]  # one for each dimension
    what_ifs: tuple[WhatIf, ...]
    trust: Trust
    left_out: tuple[str, ...] = ()  # what is not explained, and why
    notes: tuple[str, ...] = ()  # of the plan's prediction


@dataclass(frozen=True, slots=True)
class Compared(Strict):
    """One of the plans of a comparison, priced with the common profile."""

    name: str  # of its file, or its key
    headline: str  # the plan in a line
    devices: int
    batch: int
    microbatches: int
    step_seconds: float  # predicted
    samples_per_second: float
    said_step_seconds: float | None  # predicted in the plan's own file; None if it has no prediction
    peak_bytes: int  # on its fullest device
    fits: bool | None  # whether it is within the budget
    memory: MemoryBreakdown  # bytes by purpose, on its fullest device
    time: dict[str, float]  # seconds by class; they add up to ``step_seconds``
    parts: TimeAccount | None  # the same in detail; None if the plan cannot be explained in parts
    made_from: str = ""  # the profile of its own prediction; empty if it names none
    notes: tuple[str, ...] = ()  # of its prediction


@dataclass(frozen=True, slots=True)
class LayerDifference(Strict):
    """Consecutive layers that have different strategies in the plans."""

    first: str  # name of the first layer
    last: str  # name of the last layer
    count: int
    strategies: tuple[str, ...]  # of each plan, in their order: ``stage 0: zero3x8``


@dataclass(frozen=True, slots=True)
class Buys(Strict):
    """What a plan gains and costs compared with the first one."""

    name: str  # of the plan
    added_step_seconds: float  # negative: it is quicker
    added_bytes: int  # on the fullest device
    said: str  # in a line


@dataclass(frozen=True, slots=True)
class Comparison(Strict):
    """Plans of one model side by side."""

    model: str  # its name
    basis: str  # the profile that all are priced with
    budget_bytes: int  # a device, that all are compared with
    plans: tuple[Compared, ...]
    layers: tuple[LayerDifference, ...]  # where they differ
    buys: tuple[Buys, ...]  # of each plan but the first
    notes: tuple[str, ...] = field(default=())  # on plans made from other profiles, or for other batches or devices


@dataclass(frozen=True, slots=True)
class ExpectedError:
    """The error of estimated step times."""

    models: str  # the kind of model
    error: float | None  # mean absolute relative error; None if no runs of such models were scored
    source: str = ""  # the runs that were scored


def expected_error(graph: ModelGraph, calibration: Calibration) -> ExpectedError:
    """The error of estimated step times of models like this: with pixels, with attention, or with neither."""
    errors = calibration.expected_error
    if any(kind.dims.height for kind in graph.kinds.values()):
        source = "published runs, by some of which constants of convolutions were chosen"
        return ExpectedError("image networks", errors.get("images"), source)
    if any(op.kind is OperatorClass.ATTENTION for kind in graph.kinds.values() for op in kind.operators):
        return ExpectedError(
            "language models", errors.get("without_family"), "published runs of software not fitted to"
        )
    return ExpectedError("models with neither attention nor pixels", None)
