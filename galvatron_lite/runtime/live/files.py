"""Files of lines that grow: whole lines are added, and files that became large are followed by new ones. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO

from galvatron_lite.files import to_data
from galvatron_lite.runs.schema import PlanRecord, Record, RunHeader

LARGEST = 4 * 2**20
"""Bytes after which a new file is begun."""
KEPT = 16
"""Files of a kind that are kept: the first and the newest."""


class LineFiles:
    """Files ``NAME-00001.jsonl`` of a folder, the numbers going on where earlier ones end.

    Args:
        folder: of the run.
        name: what they begin with.
        head: what each file begins with.
        largest, kept: see ``LARGEST`` and ``KEPT``.
    """

    def __init__(
        self, folder: Path, name: str, head: Sequence[Record], largest: int = LARGEST, kept: int = KEPT
    ) -> None:
        self._folder, self._name, self._largest, self._kept = folder, name, largest, kept
        self.head, self._size = list(head), 0
        folder.mkdir(parents=True, exist_ok=True)
        self._stream: IO[str]
        self._open()

    def write(self, records: Sequence[Record]) -> None:
        """Add lines, and hand them to the system."""
        if self._size > self._largest:
            self._stream.close()
            self._open()
        self._put(records)

    def close(self) -> None:
        """No more lines come."""
        self._stream.close()

    def _put(self, records: Sequence[Record]) -> None:
        text = "".join(line_of(record) for record in records)
        self._stream.write(text)
        self._stream.flush()
        self._size += len(text)

    def _open(self) -> None:
        pattern = re.compile(rf"{re.escape(self._name)}-(\d+)\.jsonl")
        found = sorted(path for path in self._folder.iterdir() if pattern.fullmatch(path.name))
        for old in found[1 : max(len(found) - self._kept + 2, 1)]:
            old.unlink(missing_ok=True)
        last = pattern.fullmatch(found[-1].name) if found else None
        number = 1 if last is None else int(last[1]) + 1
        self._stream, self._size = (self._folder / f"{self._name}-{number:05d}.jsonl").open("x", encoding="utf-8"), 0
        self._put(self.head)


def line_of(record: Record) -> str:
    """A record as a line."""
    data = to_data(record) if isinstance(record, (RunHeader, PlanRecord)) else _flat(record)
    return json.dumps({"kind": record.kind, **data}, allow_nan=False) + "\n"


def _flat(record: Record) -> dict[str, object]:
    """Plain data of a record that holds no others, in a few microseconds: it is made while training goes on."""
    return {item.name: value for item in fields(record) if (value := getattr(record, item.name)) != item.default}
