"""Lines that are alike but for the rank or the stage they tell of, as one line. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_RANK = re.compile(r"^Rank (\d+) \(stage (\d+)\)(.*)$", re.DOTALL)
_STAGE = re.compile(r"^([Ss])tage (\d+)(: .*)$", re.DOTALL)


def folded(lines: Iterable[str]) -> list[str]:
    """The lines in order; ranks, or stages, of which the same is said are named together in the first of them."""
    groups: dict[tuple[str, str], list[re.Match[str] | str]] = {}
    for line in lines:
        match = _RANK.match(line) or _STAGE.match(line)
        key = (line, "") if match is None else (match[3], "" if match.re is _RANK else match[1])
        groups.setdefault(key, []).append(line if match is None else match)
    return [_line(found) for found in groups.values()]


def _line(found: Sequence[re.Match[str] | str]) -> str:
    matches = [one for one in found if not isinstance(one, str)]
    if len(matches) < 2:
        return found[0] if isinstance(found[0], str) else found[0][0]
    stages = _numbers(sorted({int(one[2]) for one in matches}))
    if matches[0].re is _STAGE:
        return f"{matches[0][1]}tages {stages}{matches[0][3]}"
    many = "stages" if len({one[2] for one in matches}) > 1 else "stage"
    return f"Ranks {_numbers(sorted(int(one[1]) for one in matches))} ({many} {stages}){matches[0][3]}"


def _numbers(numbers: Sequence[int]) -> str:
    """``0 to 2, 5`` for 0, 1, 2 and 5; ``0, 1`` for two."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts)
