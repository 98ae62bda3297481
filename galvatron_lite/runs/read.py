"""Reading a run's folder: strict and bounded; a last line that was cut off is skipped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import check_regular, from_data, parse_line
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runs.schema import (
    KINDS,
    RUN_VERSION,
    CollectiveRecord,
    EndRecord,
    PlanRecord,
    RankHeader,
    RankRecord,
    Record,
    RunHeader,
    StepRecord,
)

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
            yield _record(line, f"{path}, line {number}")


def _record(line: bytes, field: str) -> Record:
    data = parse_line(line, field)
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise FileFormatError(f"{field}, kind", kind, f"Give one of {', '.join(KINDS)}.")
    version = data.get("version", RUN_VERSION)
    if version != RUN_VERSION:
        raise FileFormatError(f"{field}, version", version, f"This release reads runs of version {RUN_VERSION}.")
    record: Record = from_data(KINDS[kind], data, field)
    return record
