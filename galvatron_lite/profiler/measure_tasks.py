"""Tasks of a measurement, run one after the other on all ranks; the journal that an interrupted one resumes from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

import torch.distributed as dist

from galvatron_lite.errors import LOG
from galvatron_lite.profiler.timing import launched

_IDENTITY = "identity"


class Journal:
    """One JSON object a line: first what is being measured, then one finished point each.

    A line that a crash cut short is dropped. A journal of something else is begun anew.

    Args:
        path: of the file; made when first written to.
        identity: what tells this measurement from another (a hash of model, machine and settings).
        resume: False begins anew whatever the file holds.
    """

    def __init__(self, path: Path, identity: str, resume: bool = True) -> None:
        self.path = path
        lines = _whole_lines(path) if resume else []
        same = bool(lines) and lines[0].get(_IDENTITY) == identity
        self.finished: dict[str, Any] = {line["key"]: line["value"] for line in lines[1:] if "key" in line and same}
        path.parent.mkdir(parents=True, exist_ok=True)
        if not same:
            path.write_text("", encoding="utf-8")
            self._append({_IDENTITY: identity})

    def add(self, key: str, value: Any) -> None:
        """Keep a finished point; it is on disk when this returns."""
        self.finished[key] = value
        self._append({"key": key, "value": value})

    def remove(self) -> None:
        """Delete the file: the profile is written."""
        self.path.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines that can be read; what follows the last line break is cut off the file."""
    try:
        raw = path.read_bytes()
    except OSError:
        return []
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        with path.open("r+b") as stream:
            stream.truncate(len(whole))
    parsed = [_parse(line) for line in whole.splitlines()]
    return [line for line in parsed if line is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


Results: TypeAlias = dict[str, Any]  # plain data of finished tasks by key

Progress: TypeAlias = Callable[[int, int, str], object]
"""Called with tasks done, tasks in all, and the label of the one that comes next."""


@dataclass(frozen=True, slots=True)
class MeasureTask:
    """One thing to measure."""

    key: str  # tells it from every other task of the profile
    label: str  # for people
    # measures it, on every rank at once; gets what is finished so far; gives plain data (JSON)
    run: Callable[[Mapping[str, Any]], Any]


def run_tasks(tasks: Sequence[MeasureTask], journal: Journal | None, progress: Progress | None = None) -> Results:
    """Run what is not finished yet, in order, and keep each result at once.

    Returns:
        Plain data by key, the same (rank 0's) on every rank.
    """
    results: Results = agree(dict(journal.finished) if journal else {})
    for place, task in enumerate(tasks):
        _tell(journal, progress, place, len(tasks), task.label)
        if task.key not in results:
            results[task.key] = agree(task.run(results))
            if journal:
                journal.add(task.key, results[task.key])
    _tell(journal, progress, len(tasks), len(tasks), "done")
    return results


def agree(value: Any) -> Any:
    """Rank 0's value on every rank."""
    if not launched():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def first_rank() -> bool:
    """Whether this process is the one that writes files."""
    return not launched() or dist.get_rank() == 0


def _tell(journal: Journal | None, progress: Progress | None, done: int, total: int, label: str) -> None:
    if progress is not None and journal is not None:
        progress(done, total, label)


EVERY = 15.0  # seconds between lines


def notices(title: str) -> Progress:
    """A function (done, total, label) that says a line at the start, and every so often to the log.

    Training scripts have no place of their own for it, and minutes of silence look like a hang.
    """
    told = [float("-inf")]

    def tell(done: int, total: int, label: str) -> None:
        if monotonic() - told[0] >= EVERY:
            told[0] = monotonic()
            LOG.info(f"{title}: {done} of {total} ({label})")

    return tell
