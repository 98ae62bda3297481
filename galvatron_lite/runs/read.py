"""Reading a run's folder. What is in it is data: strict, bounded, and a last line that was torn off is passed over."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import check_regular, from_data, parse_line
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runs.schema import (
    KINDS,
    RUN_VERSION,
    EndRecord,
    PlanRecord,
    RankHeader,
    RankRecord,
    Record,
    RunHeader,
    StepRecord,
)

_LONGEST = 64 * 2**20
"""Bytes of a line, at most: a header holds the whole plan."""
_STEPS, _RANK = re.compile(r"steps-(\d+)\.jsonl"), re.compile(r"rank-(\d+)-(\d+)\.jsonl")
_PATTERNS = {"steps": _STEPS, "rank": _RANK}
TRACES = "traces"
PROFILE = "profile.yaml"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a folder tells of a run."""

    folder: Path  # it
    starts: tuple[RunHeader, ...]  # of the run, and of each time it went on behind a stop
    steps: tuple[StepRecord, ...] = ()  # each once, in order: where a resumed run trained steps again, the later ones
    plans: tuple[PlanRecord, ...] = ()  # changes of plan since the last start
    ranks: tuple[tuple[RankRecord, ...], ...] = ()  # records of each rank under the plan that was last in force
    ends: tuple[EndRecord, ...] = ()  # how it ended, each time that it could tell
    torn: tuple[str, ...] = ()  # files whose last line is cut off: the process, or its machine, was killed
    traces: tuple[Path, ...] = ()  # of the profiler

    @property
    def header(self) -> RunHeader:
        """Of the last start."""
        return self.starts[-1]

    @property
    def plan(self) -> Plan:
        """That was last in force."""
        return self.plans[-1].plan if self.plans else self.header.plan

    @property
    def since(self) -> int:
        """The first step under that plan."""
        return self.plans[-1].step if self.plans else self.header.step

    @property
    def own_steps(self) -> tuple[StepRecord, ...]:
        """The steps under that plan."""
        return tuple(step for step in self.steps if step.step >= self.since)


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run's files."""
    return folder.is_dir() and any(_STEPS.fullmatch(path.name) for path in folder.iterdir())


def read_run(folder: Path) -> RecordedRun:
    """What a folder tells of a run."""
    files = _files(folder)
    torn: list[str] = []
    records = [one for path in files["steps"] for one in _records(path, torn)]
    starts = _starts(records, folder)
    digest = next((one.digest for one in reversed(records) if isinstance(one, (PlanRecord, RunHeader))), "")
    by_rank: dict[int, list[RankRecord]] = {}
    for path in files["rank"]:
        for one in _under(digest, _records(path, torn)):
            by_rank.setdefault(one.rank, []).append(one)
    last = records.index(starts[-1])
    return RecordedRun(
        folder,
        starts,
        _steps(records),
        tuple({one.step: one for one in records[last:] if isinstance(one, PlanRecord)}.values()),
        tuple(tuple(by_rank[rank]) for rank in sorted(by_rank)),
        tuple(one for one in records if isinstance(one, EndRecord)),
        tuple(torn),
        tuple(sorted((folder / TRACES).glob("*.json*"))),
    )


def _files(folder: Path) -> dict[str, list[Path]]:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise FileFormatError("run", str(folder), "There is no such folder.") from error
    found = {kind: [folder / name for name in names if own.fullmatch(name)] for kind, own in _PATTERNS.items()}
    if not found["steps"]:
        remedy = "It holds no run: give the folder that auto_parallelize(..., log=FOLDER) was given."
        raise FileFormatError("run", str(folder), remedy)
    return found


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


def _starts(records: Sequence[Record], folder: Path) -> tuple[RunHeader, ...]:
    """The first header of each start: later files of it repeat it, and the plan that is in force by then."""
    found: dict[float, RunHeader] = {}
    for one in records:
        if isinstance(one, RunHeader):
            found.setdefault(one.time, one)
    if not found or not isinstance(records[0], RunHeader):
        raise FileFormatError("run", str(folder), "Its first file does not begin with a header: it is damaged.")
    return tuple(found.values())


def _steps(records: Sequence[Record]) -> tuple[StepRecord, ...]:
    found: dict[int, StepRecord] = {}
    for one in records:
        if isinstance(one, StepRecord):
            found[one.step] = one
    return tuple(found[number] for number in sorted(found))


def _under(digest: str, records: Iterator[Record]) -> Iterator[RankRecord]:
    """Those of a rank's records that were made under a plan."""
    own = ""
    for one in records:
        if isinstance(one, RankHeader):
            own = one.digest
        elif isinstance(one, RankRecord) and own == digest:
            yield one
