"""The points a profile is made of, as tasks that can be finished one by one, kept, and left out in a rerun."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeAlias

import torch.distributed as dist

from galvatron_lite.profiler.store_journal import Journal
from galvatron_lite.profiler.timing import launched
from galvatron_lite.saying import say

Results: TypeAlias = dict[str, Any]
"""Plain data of finished tasks by key."""

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


EVERY = 15.0
"""Seconds between lines."""


def notices(title: str) -> Progress:
    """A function (done, total, label) that says a line at the start, and every so often (``saying.say``).

    Training scripts have no place of their own for it, and minutes of silence look like a hang.
    """
    told = [float("-inf")]

    def tell(done: int, total: int, label: str) -> None:
        if monotonic() - told[0] >= EVERY:
            told[0] = monotonic()
            say(f"{title}: {done} of {total} ({label})")

    return tell
