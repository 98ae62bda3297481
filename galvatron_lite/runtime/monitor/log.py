"""The log of decisions: a JSON line each, flushed as it is written; and its replay."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import check_regular, parse_record, to_data
from galvatron_lite.runtime.monitor.decide import begin, decide
from galvatron_lite.runtime.monitor.planning import answer
from galvatron_lite.runtime.monitor.schema import (
    LOG_VERSION,
    Decided,
    Decision,
    Done,
    Exhausted,
    PlannedRecord,
    Record,
    Started,
    WindowRecord,
)

_KINDS: dict[str, type[Record]] = {
    "started": Started, "seen": WindowRecord, "planned": PlannedRecord, "decided": Decided, "done": Done,
    "exhausted": Exhausted,
}  # fmt: skip


def write_record(path: str, record: Record) -> None:
    """Add a line to a log; do nothing where the path is empty."""
    if not path:
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"kind": record.kind, **to_data(record)}, allow_nan=False) + "\n")


def read_log(path: Path) -> list[Record]:
    """Read the records of a log; raises ``FileFormatError`` naming the first line that is no record."""
    try:
        lines = check_regular(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError("file", str(path), "There is no such log, or it is no text.") from error
    records = [
        parse_record(line, f"{path}, line {number}", _KINDS, "logs", LOG_VERSION)
        for number, line in enumerate(lines, start=1)
    ]
    if not records or not isinstance(records[0], Started):
        raise FileFormatError(str(path), "its first line", "A log begins with what training started from.")
    return records


@dataclass(frozen=True, slots=True)
class Replayed:
    """A decision as it was logged, and as it is taken again."""

    logged: Decision | None  # None where the log has none
    again: Decision  # from the same events

    @property
    def same(self) -> bool:
        """Whether they are equal."""
        return self.logged == self.again


def replay(records: Sequence[Record]) -> list[Replayed]:
    """Take all decisions of a log again; plans are made again too, from the corrected profile."""
    logged = iter([record.decision for record in records if isinstance(record, Decided)])
    return [Replayed(next(logged, None), decision) for decision in _again(records)]


def _again(records: Sequence[Record]) -> Iterator[Decision]:
    first, *events = records
    assert isinstance(first, Started)
    state = begin(first)
    for event in events:
        if isinstance(event, (Started, Decided)):
            continue
        again = answer(state.query(event.step)) if isinstance(event, PlannedRecord) else event
        state, decision = decide(state, again)
        if decision is not None:
            yield decision
