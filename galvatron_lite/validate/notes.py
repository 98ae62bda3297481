"""What a reader of scores should know of the rows: those not scored, fields passed over, units that look wrong.

No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from galvatron_lite.validate.outcome import Skipped
from galvatron_lite.validate.ranges import NOT_USED
from galvatron_lite.validate.rows import KINDS, PublishedRun, parse_lines, read_lines, readable
from galvatron_lite.validate.scores import Judged
from galvatron_lite.validate.understood import assumptions, taken_otherwise

IMPLAUSIBLE = 20.0
"""Factor between prediction and measurement beyond which a unit is the likelier reason."""

FAILED = "ran out of memory, so that there is no figure"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file of runs.

    Attributes:
        runs: in order.
        notes: about the file as a whole, for people: lines that hold no run, names that repeat, fields passed over.
    """

    runs: tuple[PublishedRun, ...]
    notes: tuple[str, ...]


def read_file(path: Path) -> RunFile:
    """All runs of a file (``-``: standard input), and what is odd about it; see ``rows.read_runs``.

    Raises:
        FileFormatError: no such file, or not text.
    """
    runs: list[PublishedRun] = []
    passed: Counter[str] = Counter()
    broken = []
    for number, data in parse_lines(read_lines(path), str(path)):
        if isinstance(data, PublishedRun):
            broken.append(str(number))
            runs.append(data)
        else:
            passed.update(data.keys() - KINDS.keys())
            runs.append(readable(data, number, str(path)))
    return RunFile(tuple(runs), (*_broken(broken), *_repeated(runs), *_passed(passed)))


def _broken(lines: Sequence[str]) -> list[str]:
    return [f"lines that are no JSON object, each counted as a row not scored: {_some(lines)}"] if lines else []


def _repeated(runs: Iterable[PublishedRun]) -> list[str]:
    names = [name for name, count in Counter(run.run_id for run in runs).items() if count > 1]
    return [f"run_id given more than once, all of them counted: {_some(names)}"] if names else []


def _passed(fields: Mapping[str, int]) -> list[str]:
    """Fields that nothing reads, with the known name that each may have been meant as."""
    said = []
    for name in sorted(fields.keys() - set(NOT_USED)):
        near = get_close_matches(name.lower(), KINDS, 1, 0.75)
        said.append(f"{name} (meant {near[0]}?)" if near else name)
    return [f"fields passed over: {_some(said)}"] if said else []


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name[:60] for name in names[:_SHOWN]) + more


def implausible(judged: Iterable[Judged]) -> list[str]:
    """A hint about units where predictions are off by more than ``IMPLAUSIBLE`` times."""
    odd = [one for one in judged if any(_far(ratio) for ratio in (one.time, one.memory))]
    if not odd:
        return []
    names = _some([one.run.run_id for one in odd])
    units = "iter_time_s is in seconds, peak_mem_gb in GiB, throughputs a second"
    return [f"off by more than {IMPLAUSIBLE:.0f} times, check the units ({units}): {names}"]


def _far(ratio: float | None) -> bool:
    return ratio is not None and not 1 / IMPLAUSIBLE <= ratio <= IMPLAUSIBLE


def unscored(judged: Iterable[Judged]) -> list[dict[str, object]]:
    """Every row that is not scored, in order: ``run_id``, ``line``, ``reason``, ``detail``."""
    return [
        {"run_id": one.run.run_id, "line": one.run.line, "reason": reason, "detail": detail}
        for one in judged
        if not one.scored
        for reason, detail in [_why(one)]
    ]


def _why(one: Judged) -> tuple[str, str]:
    if isinstance(one.outcome, Skipped):
        return one.outcome.reason, one.outcome.detail
    return FAILED, "oom: True, and neither time nor memory measured."


def unscored_rows(judged: Iterable[Judged], count: int) -> list[str]:
    """Lines for people on the first rows that are not scored."""
    # Of those that were graded so on purpose nothing can be mended: they come last.
    rows = sorted(unscored(judged), key=lambda row: "grade C" in str(row["reason"]))
    lines = [f"not scored: line {row['line']}, {row['run_id']}: {row['reason']}. {row['detail']}" for row in rows]
    more = f"... and {len(rows) - count} more not scored (--skipped N, --json)"
    return [*lines[:count], more] if len(rows) > count else lines


def assumed(judged: Iterable[Judged]) -> dict[str, int]:
    """What was taken for scored rows without their saying so, with the number of rows, most frequent first."""
    return dict(Counter(text for one in judged if one.scored for text in assumptions(one.run)).most_common())


def passed_over(judged: Iterable[Judged]) -> list[str]:
    """Lines for people: what scored rows state and is passed over, most frequent first."""
    every = Counter(text for one in judged if one.scored for text in taken_otherwise(one.run)).most_common()
    lines = [f"{text} ({count} row{'s' * (count > 1)})" for text, count in every[:_SHOWN]]
    return [*lines, *([f"... and {len(every) - _SHOWN} more such (--json)"] if len(every) > _SHOWN else [])]
