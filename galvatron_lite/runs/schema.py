"""Records of a training run, one JSON line each, and their reader. No torch here.

The folder of a run (``auto_parallelize(..., log=FOLDER)``):

    FOLDER/steps-00001.jsonl           of rank 0: a RunHeader, then a StepRecord of every step, and PlanRecords
    FOLDER/rank-00003-00001.jsonl      of every rank: a RankHeader, then a RankRecord every few seconds
    FOLDER/profile.yaml                the profile that the plan was made from, if known
    FOLDER/traces/rank-00003-step-00010.json.gz    of ``torch.profiler``, for profiled steps

Each file begins with a header, so that it can be read alone. Of a long run the first file and the newest ones are kept.
A run that is resumed in the same folder begins new files.
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
    """Base of records: unknown keys and numbers that are not finite are errors when a record is read."""

    __slots__ = ()
    __pydantic_config__ = cast("ConfigDict", {**STRICT, "allow_inf_nan": False})


class StepPart(StrEnum):
    """The parts of a step on a rank; they add up to its seconds."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    """Passes of a zero-bubble schedule that compute gradients of weights."""
    WAITING = "waiting"
    """For other stages of a pipeline."""
    GRADIENTS = "gradients"
    """Reduction of gradients over ranks after backward."""
    CHECK = "check"
    """The message after every step with the loss and the norm; it waits for the slowest rank."""
    OPTIMIZER = "optimizer"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RunDevice(Finite):
    """A rank and its device."""

    rank: Count
    host: str  # name of its machine
    name: str  # of the device (``NVIDIA A100-SXM4-80GB``), or ``cpu``
    stage: Count = 0  # number of its group of devices in the pipeline
    memory: Count = 0  # bytes of the device; 0: not known
    baseline: Count = 0  # bytes of the process before the first step, to compare with ``RankRecord.resident``


@dataclass(frozen=True, slots=True)
class RunHeader(Finite):
    """The start of a run, or of its resumption."""

    version: Count  # of this schema
    plan: Plan  # with its prediction
    digest: str  # of the plan
    time: Seconds  # of the start, seconds since 1970 (UTC)
    devices: tuple[RunDevice, ...] = ()  # of the ranks
    versions: dict[str, str] = field(default_factory=dict)  # of galvatron, torch, Python, and CUDA if there is one
    step: Count = 0  # steps trained before
    model: str = ""  # class that trains: ``ParallelModel``, ``CyclicModel``, ``DeepSpeedModel``, ``BranchedModel``
    kind: Literal["header"] = "header"


@dataclass(frozen=True, slots=True)
class RankHeader(Finite):
    """The start of a rank, its resumption, or its switch to another plan."""

    version: Count  # of this schema
    rank: Count
    digest: str  # of the plan
    time: Seconds  # seconds since 1970 (UTC)
    step: Count = 0  # steps trained before
    kind: Literal["begin"] = "begin"


@dataclass(frozen=True, slots=True)
class StepRecord(Finite):
    """A step on rank 0; it takes about as long on all ranks, as they wait for each other."""

    step: Count  # its number, from 0, over all resumptions
    time: Seconds  # of its end, seconds since 1970 (UTC)
    seconds: Seconds
    between: Seconds = 0.0  # seconds since the step before it (data, printing, saving), not in ``seconds``
    samples: Count = 0  # of the global batch
    tokens: Count = 0  # of the global batch; its samples if the model has no tokens
    loss: float | None = None  # mean over the batch; None: not finite, or not known
    memory: Count = 0  # peak bytes so far of the fullest rank that rank 0 knows of; 0: not known
    profiled: bool = False  # whether the profiler ran, which slows the step
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class RankRecord(Finite):
    """Some consecutive steps on one rank."""

    rank: Count
    step: Count  # number of the last step
    steps: Count
    seconds: Seconds  # mean of a step, without steps that were profiled or changed the plan
    between: Seconds = 0.0  # mean seconds before a step
    parts: dict[StepPart, Seconds] = field(default_factory=dict)  # mean seconds of each part of a step
    layers: dict[str, Seconds] = field(default_factory=dict)  # median seconds of a forward pass, by name of the block
    memory: Count = 0  # peak bytes of tensors under the plan, from the device's allocator; 0 on CPUs
    reserved: Count = 0  # peak bytes that the allocator reserved
    resident: Count = 0  # peak bytes of the process in host memory
    kind: Literal["rank"] = "rank"


@dataclass(frozen=True, slots=True)
class CollectiveRecord(Finite):
    """Collectives of one kind and group on one rank, in profiled steps."""

    rank: Count
    step: Count  # number of the last step
    steps: Count
    collective: str  # ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``
    ranks: tuple[Count, ...]  # of the group
    calls: Count
    bytes: Count  # of the global tensors: the output of an all-gather, the input of a reduce-scatter
    seconds: Seconds  # from call to completion, waiting for the last rank included
    kind: Literal["collective"] = "collective"


@dataclass(frozen=True, slots=True)
class PlanRecord(Finite):
    """A switch to another plan, which trains from this step on."""

    step: Count
    plan: Plan
    digest: str
    kind: Literal["plan"] = "plan"


@dataclass(frozen=True, slots=True)
class EndRecord(Finite):
    """The end of the process; ``reason`` names the error of a step that failed."""

    step: Count
    time: Seconds
    reason: str = ""
    kind: Literal["end"] = "end"


Record = RunHeader | RankHeader | StepRecord | RankRecord | CollectiveRecord | PlanRecord | EndRecord

KINDS: dict[str, type[Record]] = {
    "header": RunHeader, "begin": RankHeader, "step": StepRecord, "rank": RankRecord, "plan": PlanRecord,
    "collective": CollectiveRecord,
    "end": EndRecord,
}  # fmt: skip


RECENT = 20  # steps over which medians are taken


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Measured or predicted figures of a step; 0: not known."""

    seconds: float = 0.0
    samples: float = 0.0  # a second, time between steps included
    tokens: float = 0.0  # a second; 0 if the model has no tokens
    mfu: float = 0.0  # model FLOPs utilisation, 0..1
    memory: int = 0  # bytes on the fullest device, without the driver's context


def predicted(plan: Plan) -> StepFigures:
    """The predicted figures of a plan; all 0 for a plan written by hand."""
    prediction = plan.prediction
    if prediction is None:
        return StepFigures()
    tokens = prediction.tokens_per_second if prediction.tokens_per_second != prediction.samples_per_second else 0.0
    memory = max((stage.memory.tensors for stage in plan.stages), default=0)
    return StepFigures(prediction.step_seconds, prediction.samples_per_second, tokens, prediction.mfu, max(memory, 0))


def measured(steps: Sequence[StepRecord], plan: Plan) -> StepFigures:
    """The figures of the last steps, as medians, so that single slow steps do not count.

    MFU counts the FLOPs of a sample in the plan's prediction.
    """
    recent = [step for step in steps if not step.profiled][-RECENT:]
    if not recent:
        return StepFigures()
    seconds, period = median(step.seconds for step in recent), median(step.seconds + step.between for step in recent)
    samples = median(step.samples for step in recent) / period if period else 0.0
    tokens = median(step.tokens for step in recent) / period if period else 0.0
    expected = predicted(plan)
    mfu = expected.mfu * samples / expected.samples if expected.samples else 0.0
    return StepFigures(seconds, samples, tokens if expected.tokens else 0.0, mfu, recent[-1].memory)


def tokens_of_sample(plan: Plan) -> float:
    """Tokens a sample in a plan's prediction; 1 if the model has none, or there is no prediction."""
    prediction = plan.prediction
    if prediction is None or not prediction.samples_per_second:
        return 1.0
    return prediction.tokens_per_second / prediction.samples_per_second


STEP = "galvatron.step "  # in traces, before the number of a step
PART = "galvatron.part "  # in traces, before a ``StepPart``
LAYER = "galvatron.layer "  # in traces, before the name of a layer, for its forward pass and its recomputation
METADATA = "galvatron"  # key of a trace's metadata on the run: rank, stage, layers, plan

_MOST_BYTES = 64 * 2**20  # of a line; a header holds a plan
_STEPS, _RANK = re.compile(r"steps-(\d+)\.jsonl"), re.compile(r"rank-(\d+)-(\d+)\.jsonl")
TRACES = "traces"
PROFILE = "profile.yaml"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The records of a run."""

    folder: Path
    starts: tuple[RunHeader, ...]  # of the run and its resumptions
    steps: tuple[StepRecord, ...] = ()  # in order; of steps that were trained again, the later records
    plans: tuple[PlanRecord, ...] = ()  # switches since the last start
    ranks: tuple[tuple[RankRecord, ...], ...] = ()  # of each rank under the last plan
    ends: tuple[EndRecord, ...] = ()
    collectives: tuple[CollectiveRecord, ...] = ()  # of all ranks under the last plan
    torn: tuple[str, ...] = ()  # files whose last line is cut off, because the process or machine was killed
    traces: tuple[Path, ...] = ()

    @property
    def header(self) -> RunHeader:
        """The header of the last start."""
        return self.starts[-1]

    @property
    def plan(self) -> Plan:
        """The last plan."""
        return self.plans[-1].plan if self.plans else self.header.plan

    @property
    def since(self) -> int:
        """Number of the first step under the last plan."""
        return self.plans[-1].step if self.plans else self.header.step

    @property
    def plan_steps(self) -> tuple[StepRecord, ...]:
        """The steps under the last plan."""
        return tuple(step for step in self.steps if step.step >= self.since)


def is_run(folder: Path) -> bool:
    """Whether a folder holds the files of a run."""
    return folder.is_dir() and any(_STEPS.fullmatch(path.name) for path in folder.iterdir())


def read_run(folder: Path) -> RecordedRun:
    """Read the records of a run.

    Raises:
        FileFormatError: no such folder, no run in it, or a damaged file.
    """
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
    starts: dict[float, RunHeader] = {}  # later files of a start repeat its header with the plan of that time
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
        for number, line in enumerate(iter(lambda: stream.readline(_MOST_BYTES), b""), start=1):
            if not line.endswith(b"\n"):
                if len(line) == _MOST_BYTES:
                    raise FileFormatError(f"{path}, line {number}", f"{_MOST_BYTES} bytes", "No record is that long.")
                torn.append(path.name)
                return
            yield parse_record(line, f"{path}, line {number}", KINDS, "runs", RUN_VERSION)
