"""Records of a training run, a JSON line each, in its folder (``auto_parallelize(..., log=FOLDER)``). No torch here.

    FOLDER/steps-00001.jsonl           by rank 0: a RunHeader, then a StepRecord of every step, and PlanRecords
    FOLDER/rank-00003-00001.jsonl      by every rank: a RankHeader, then a RankRecord every few seconds
    FOLDER/profile.yaml                what the plan was made from, where it is known
    FOLDER/traces/rank-00003-step-00010.json.gz    of ``torch.profiler``, where steps were profiled

Each file begins with a header, so that it can be read alone; of a long run the first file and the newest are kept. A
run that goes on behind a stop, in the same folder, begins files of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast

from annotated_types import Ge

from galvatron_lite.files import STRICT
from galvatron_lite.plans.schema import Plan

if TYPE_CHECKING:
    from pydantic import ConfigDict

RUN_VERSION = 1
FINITE = cast("ConfigDict", {**STRICT, "allow_inf_nan": False})
"""What is read is shown and reckoned with."""
Count = Annotated[int, Ge(0)]
Seconds = Annotated[float, Ge(0)]


class Part(StrEnum):
    """Where the time of a step on a rank goes; the parts of a step add up to its seconds."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    """Passes of a zero-bubble schedule that make gradients of weights."""
    WAITING = "waiting"
    """For other stages of a pipeline."""
    GRADIENTS = "gradients"
    """Sums of gradients over ranks, once backward has ended."""
    CHECK = "check"
    """The one message behind every step: the loss, the norm; waits for the slowest rank."""
    OPTIMIZER = "optimizer"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RunDevice:
    """A rank and what it runs on.

    Attributes:
        rank: in the world.
        host: name of its machine.
        name: of the device (``NVIDIA A100-SXM4-80GB``), or ``cpu``.
        stage: its group of devices in the pipeline.
        memory: bytes of the device; 0: not known.
        baseline: bytes that the process took before the first step, where ``RankRecord.resident`` is all that is known.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FINITE
    rank: Count
    host: str
    name: str
    stage: Count = 0
    memory: Count = 0
    baseline: Count = 0


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What a run began with, or went on with. Its prediction is the plan's.

    Attributes:
        version: of this schema.
        plan: under which it trains, with its prediction.
        digest: of the plan, the same for the same plan.
        time: when it began, seconds since 1970 (UTC).
        devices: what the ranks run on.
        versions: of galvatron, torch, Python and, where there is one, CUDA.
        step: steps that were trained before.
        model: what trains: ``ParallelModel``, ``CyclicModel``, ``DeepSpeedModel``, ``BranchedModel``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FINITE
    version: Count
    plan: Plan
    digest: str
    time: Seconds
    devices: tuple[RunDevice, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    step: Count = 0
    model: str = ""
    kind: Literal["header"] = "header"


@dataclass(frozen=True, slots=True)
class RankHeader:
    """A rank begins to train, goes on, or trains under another plan from here.

    Attributes:
        version: of this schema.
        rank: in the world.
        digest: of the plan.
        time: seconds since 1970 (UTC).
        step: steps that were trained before.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FINITE
    version: Count
    rank: Count
    digest: str
    time: Seconds
    step: Count = 0
    kind: Literal["begin"] = "begin"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step, as rank 0 saw it; all ranks take part in it, so that it takes about as long on all.

    Attributes:
        step: its number, 0 first; goes on where a run is resumed.
        time: when it ended, seconds since 1970 (UTC).
        seconds: that it took.
        between: seconds since the step before it: data, printing, saving; not in ``seconds``.
        samples: of the global batch.
        tokens: of it; the samples where the model has none.
        loss: mean of the batch; None: not finite, or not known.
        memory: peak bytes of the fullest rank so far, as far as rank 0 knows; 0: not known.
        profiled: whether the profiler ran, which makes it slower.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FINITE
    step: Count
    time: Seconds
    seconds: Seconds
    between: Seconds = 0.0
    samples: Count = 0
    tokens: Count = 0
    loss: float | None = None
    memory: Count = 0
    profiled: bool = False
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Some consecutive steps on one rank.

    Attributes:
        rank: in the world.
        step: the last of them.
        steps: how many.
        seconds: mean of a step; those of steps that were profiled or changed the plan are left out.
        between: mean seconds before a step.
        parts: mean seconds of a step, by where they went.
        layers: seconds of one forward pass of a block, median, by its name; empty where they were not timed.
        memory: peak bytes in tensors since the plan began, as the device's allocator tells; 0: it does not (CPUs).
        reserved: peak bytes that the allocator held.
        resident: peak bytes of the process in the host's memory.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FINITE
    rank: Count
    step: Count
    steps: Count
    seconds: Seconds
    between: Seconds = 0.0
    parts: dict[Part, Seconds] = field(default_factory=dict)
    layers: dict[str, Seconds] = field(default_factory=dict)
    memory: Count = 0
    reserved: Count = 0
    resident: Count = 0
    kind: Literal["rank"] = "rank"


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """Training goes on under another plan, from this step on (phases, adapting, ``switch``)."""

    __pydantic_config__: ClassVar[ConfigDict] = FINITE
    step: Count
    plan: Plan
    digest: str
    kind: Literal["plan"] = "plan"


@dataclass(frozen=True, slots=True)
class EndRecord:
    """The process ended in order; or a step was not done, for the error that ``reason`` names."""

    __pydantic_config__: ClassVar[ConfigDict] = FINITE
    step: Count
    time: Seconds
    reason: str = ""
    kind: Literal["end"] = "end"


Record = RunHeader | RankHeader | StepRecord | RankRecord | PlanRecord | EndRecord
"""A line."""

KINDS: dict[str, type[Record]] = {
    "header": RunHeader, "begin": RankHeader, "step": StepRecord, "rank": RankRecord, "plan": PlanRecord,
    "end": EndRecord,
}  # fmt: skip
