"""Records of a training run, a JSON line each, and their reading: strict and bounded. No torch here.

In its folder (``auto_parallelize(..., log=FOLDER)``):

    FOLDER/steps-00001.jsonl           by rank 0: a RunHeader, then a StepRecord of every step, and PlanRecords
    FOLDER/rank-00003-00001.jsonl      by every rank: a RankHeader, then a RankRecord every few seconds
    FOLDER/profile.yaml                what the plan was made from, where it is known
    FOLDER/traces/rank-00003-step-00010.json.gz    of ``torch.profiler``, where steps were profiled

Each file begins with a header, so that it can be read alone; of a long run the first file and the newest are kept. A
run that goes on behind a stop, in the same folder, begins files of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal, cast

from annotated_types import Ge

from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import STRICT, check_regular, parse_record
from galvatron_lite.plans.schema import Plan

if TYPE_CHECKING:
    from pydantic import ConfigDict


RUN_VERSION = 1
Count = Annotated[int, Ge(0)]
Seconds = Annotated[float, Ge(0)]


class Finite:
    """Base of records: an unknown key, or a figure that is not finite, is an error where one is read."""

    __slots__ = ()
    __pydantic_config__ = cast("ConfigDict", {**STRICT, "allow_inf_nan": False})


class StepPart(StrEnum):
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
class RunDevice(Finite):
    """A rank and what it runs on."""

    rank: Count  # in the world
    host: str  # name of its machine
    name: str  # of the device (``NVIDIA A100-SXM4-80GB``), or ``cpu``
    stage: Count = 0  # its group of devices in the pipeline
    memory: Count = 0  # bytes of the device; 0: not known
    # bytes that the process took before the first step, where ``RankRecord.resident`` is all that is known
    baseline: Count = 0


@dataclass(frozen=True, slots=True)
class RunHeader(Finite):
    """What a run began with, or went on with. Its prediction is the plan's."""

    version: Count  # of this schema
    plan: Plan  # under which it trains, with its prediction
    digest: str  # of the plan, the same for the same plan
    time: Seconds  # when it began, seconds since 1970 (UTC)
    devices: tuple[RunDevice, ...] = ()  # what the ranks run on
    versions: dict[str, str] = field(default_factory=dict)  # of galvatron, torch, Python and, where there is one, CUDA
    step: Count = 0  # steps that were trained before
    model: str = ""  # what trains: ``ParallelModel``, ``CyclicModel``, ``DeepSpeedModel``, ``BranchedModel``
    kind: Literal["header"] = "header"


@dataclass(frozen=True, slots=True)
class RankHeader(Finite):
    """A rank begins to train, goes on, or trains under another plan from here."""

    version: Count  # of this schema
    rank: Count  # in the world
    digest: str  # of the plan
    time: Seconds  # seconds since 1970 (UTC)
    step: Count = 0  # steps that were trained before
    kind: Literal["begin"] = "begin"


@dataclass(frozen=True, slots=True)
class StepRecord(Finite):
    """A step, as rank 0 saw it; all ranks take part in it, so that it takes about as long on all."""

    step: Count  # its number, 0 first; goes on where a run is resumed
    time: Seconds  # when it ended, seconds since 1970 (UTC)
    seconds: Seconds  # that it took
    between: Seconds = 0.0  # seconds since the step before it: data, printing, saving; not in ``seconds``
    samples: Count = 0  # of the global batch
    tokens: Count = 0  # of it; the samples where the model has none
    loss: float | None = None  # mean of the batch; None: not finite, or not known
    memory: Count = 0  # peak bytes of the fullest rank so far, as far as rank 0 knows; 0: not known
    profiled: bool = False  # whether the profiler ran, which makes it slower
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class RankRecord(Finite):
    """Some consecutive steps on one rank."""

    rank: Count  # in the world
    step: Count  # the last of them
    steps: Count
    seconds: Seconds  # mean of a step; those of steps that were profiled or changed the plan are left out
    between: Seconds = 0.0  # mean seconds before a step
    parts: dict[StepPart, Seconds] = field(default_factory=dict)  # mean seconds of a step, by where they went
    # seconds of one forward pass of a block, median, by its name; empty where they were not timed
    layers: dict[str, Seconds] = field(default_factory=dict)
    # peak bytes in tensors since the plan began, as the device's allocator tells; 0: it does not (CPUs)
    memory: Count = 0
    reserved: Count = 0  # peak bytes that the allocator held
    resident: Count = 0  # peak bytes of the process in the host's memory
    kind: Literal["rank"] = "rank"


@dataclass(frozen=True, slots=True)
class CollectiveRecord(Finite):
    """Collectives of one kind and group on one rank, in steps that were profiled."""

    rank: Count  # in the world
    step: Count  # the last of the steps
    steps: Count
    collective: str  # its kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``
    ranks: tuple[Count, ...]  # that take part
    calls: Count
    bytes: Count  # of the tensors that all have together: what an all-gather yields, a reduce-scatter takes
    seconds: Seconds  # from each call until it had completed: with the wait for the last to come
    kind: Literal["collective"] = "collective"


@dataclass(frozen=True, slots=True)
class PlanRecord(Finite):
    """Training goes on under another plan, from this step on (phases, adapting, ``switch``)."""

    step: Count
    plan: Plan
    digest: str
    kind: Literal["plan"] = "plan"


@dataclass(frozen=True, slots=True)
class EndRecord(Finite):
    """The process ended in order; or a step was not done, for the error that ``reason`` names."""

    step: Count
    time: Seconds
    reason: str = ""
    kind: Literal["end"] = "end"


Record = RunHeader | RankHeader | StepRecord | RankRecord | CollectiveRecord | PlanRecord | EndRecord
"""A line."""

KINDS: dict[str, type[Record]] = {
    "header": RunHeader, "begin": RankHeader, "step": StepRecord, "rank": RankRecord, "plan": PlanRecord,
    "collective": CollectiveRecord,
    "end": EndRecord,
}  # fmt: skip


RECENT = 20
"""Steps that a figure is of, at most."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of some steps, or of a prediction; 0 where one is not known."""

    seconds: float = 0.0  # of a step
    samples: float = 0.0  # a second, with what lies between steps
    tokens: float = 0.0  # a second; 0 where the model has none
    mfu: float = 0.0  # model FLOPs utilisation, 0..1
    memory: int = 0  # bytes on the fullest device, without its driver's context


def predicted(plan: Plan) -> StepFigures:
    """What a plan is predicted to do; nothing of one written by hand."""
    prediction = plan.prediction
    if prediction is None:
        return StepFigures()
    tokens = prediction.tokens_per_second if prediction.tokens_per_second != prediction.samples_per_second else 0.0
    memory = max((stage.memory.tensors for stage in plan.stages), default=0)
    return StepFigures(prediction.step_seconds, prediction.samples_per_second, tokens, prediction.mfu, max(memory, 0))


def measured(steps: Sequence[StepRecord], plan: Plan) -> StepFigures:
    """What the last of some steps came to: medians, so that single slow ones do not count.

    MFU counts the FLOPs that the plan was made for: those of its prediction, a sample.
    """
    recent = [step for step in steps if not step.profiled][-RECENT:]
    if not recent:
        return StepFigures()
    seconds, period = median(step.seconds for step in recent), median(step.seconds + step.between for step in recent)
    samples = median(step.samples for step in recent) / period if period else 0.0
    tokens = median(step.tokens for step in recent) / period if period else 0.0
    wanted = predicted(plan)
    mfu = wanted.mfu * samples / wanted.samples if wanted.samples else 0.0
    return StepFigures(seconds, samples, tokens if wanted.tokens else 0.0, mfu, recent[-1].memory)


def tokens_of_sample(plan: Plan) -> float:
    """Tokens of a sample that a plan was made for; 1 where the model has none, or nothing was predicted."""
    prediction = plan.prediction
    if prediction is None or not prediction.samples_per_second:
        return 1.0
    return prediction.tokens_per_second / prediction.samples_per_second


STEP = "galvatron.step "
"""Before the number of a step."""
PART = "galvatron.part "
"""Before a part of a step (``StepPart``)."""
LAYER = "galvatron.layer "
"""Before the name of a layer: around its forward pass, and again where it is computed again in backward."""
METADATA = "galvatron"
"""Key of what a trace says of the run: rank, stage, layers, plan."""


_LONGEST = 64 * 2**20
"""Bytes of a line, at most: a header holds a plan."""
_STEPS, _RANK = re.compile(r"steps-(\d+)\.jsonl"), re.compile(r"rank-(\d+)-(\d+)\.jsonl")
TRACES = "traces"
PROFILE = "profile.yaml"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The records of a run."""

    folder: Path
    starts: tuple[RunHeader, ...]  # of the run, and of each time it was resumed
    steps: tuple[StepRecord, ...] = ()  # each once, in order: where a resumed run trained steps again, the later ones
    plans: tuple[PlanRecord, ...] = ()  # changes of plan since the last start
    ranks: tuple[tuple[RankRecord, ...], ...] = ()  # records of each rank under the last plan
    ends: tuple[EndRecord, ...] = ()
    collectives: tuple[CollectiveRecord, ...] = ()  # of all ranks, under the last plan
    torn: tuple[str, ...] = ()  # files whose last line is cut off: the process, or its machine, was killed
    traces: tuple[Path, ...] = ()

    @property
    def header(self) -> RunHeader:
        """Of the last start."""
        return self.starts[-1]

    @property
    def plan(self) -> Plan:
        """The last plan."""
        return self.plans[-1].plan if self.plans else self.header.plan

    @property
    def since(self) -> int:
        """The first step under the last plan."""
        return self.plans[-1].step if self.plans else self.header.step

    @property
    def plan_steps(self) -> tuple[StepRecord, ...]:
        """The steps under the last plan."""
        return tuple(step for step in self.steps if step.step >= self.since)


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run's files."""
    return folder.is_dir() and any(_STEPS.fullmatch(path.name) for path in folder.iterdir())


def read_run(folder: Path) -> RecordedRun:
    """Read the records of a run; raises ``FileFormatError`` for what is damaged."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise FileFormatError("run", str(folder), "There is no such folder.") from error
    torn: list[str] = []
    files = [name for name in names if _STEPS.fullmatch(name)]
    if not files:
        remedy = "It holds no run: give the folder that auto_parallelize(..., log=FOLDER) was given."
        raise FileFormatError("run", str(folder), remedy)
    records = [record for name in files for record in _records(folder / name, torn)]
    starts: dict[float, RunHeader] = {}  # later files of a start repeat its header, with the plan of then
    for header in (record for record in records if isinstance(record, RunHeader)):
        starts.setdefault(header.time, header)
    if not starts or not isinstance(records[0], RunHeader):
        raise FileFormatError("run", str(folder), "Its first file does not begin with a header: it is damaged.")
    digest = next(record.digest for record in reversed(records) if isinstance(record, (PlanRecord, RunHeader)))
    by_rank: dict[int, list[RankRecord]] = {}
    collectives: list[CollectiveRecord] = []
    for name in (name for name in names if _RANK.fullmatch(name)):
        current = ""
        for record in _records(folder / name, torn):
            if isinstance(record, RankHeader):
                current = record.digest
            elif isinstance(record, RankRecord) and current == digest:
                by_rank.setdefault(record.rank, []).append(record)
            elif isinstance(record, CollectiveRecord) and current == digest:
                collectives.append(record)
    steps = {record.step: record for record in records if isinstance(record, StepRecord)}
    last = records.index(list(starts.values())[-1])
    return RecordedRun(
        folder,
        tuple(starts.values()),
        tuple(steps[number] for number in sorted(steps)),
        tuple({record.step: record for record in records[last:] if isinstance(record, PlanRecord)}.values()),
        tuple(tuple(by_rank[rank]) for rank in sorted(by_rank)),
        tuple(record for record in records if isinstance(record, EndRecord)),
        tuple(collectives),
        tuple(torn),
        tuple(sorted((folder / TRACES).glob("*.json*"))),
    )


def _records(path: Path, torn: list[str]) -> Iterator[Record]:
    with check_regular(path).open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_LONGEST), b""), start=1):
            if not line.endswith(b"\n"):
                if len(line) == _LONGEST:
                    raise FileFormatError(f"{path}, line {number}", f"{_LONGEST} bytes", "No record is that long.")
                torn.append(path.name)
                return
            yield parse_record(line, f"{path}, line {number}", KINDS, "runs", RUN_VERSION)
