"""Words for messages, ranks and stages, shared by the checks of a dry run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from galvatron_lite.verify.schema import NOBODY, During, Message

MOST = 8  # ranks, or lines of a kind, that are shown


def where(stage: int, message: Message) -> str:
    """Return where in its step a rank sends a message: ``stage 1, backward of micro-batch 2, layer h.3``."""
    during = "before the step" if message.phase is During.SETUP else str(message.phase)
    of = f" of micro-batch {message.microbatch}" if message.microbatch != NOBODY else ""
    layer = f", layer {message.layer}" if message.layer else ""
    return f"stage {stage}, {during}{of}{layer}"


def rank_list(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2``; of many only the first, with their number."""
    shown = ", ".join(map(str, ranks[:MOST]))
    more = f" and {len(ranks) - MOST} more" if len(ranks) > MOST else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def first_of(lines: Sequence[str]) -> str:
    """Return the first line, with the number of lines if there are more."""
    return lines[0] + (f" ({len(lines)} in all)" if len(lines) > 1 else "")


_RANK = re.compile(r"^Rank (\d+) \(stage (\d+)\)(.*)$", re.DOTALL)
_STAGE = re.compile(r"^([Ss])tage (\d+)(: .*)$", re.DOTALL)


def folded(lines: Iterable[str]) -> list[str]:
    """Merge lines that differ only in their rank or stage into the first of them; the order stays."""
    groups: dict[str, list[re.Match[str]]] = {}
    for line in lines:
        match = _RANK.match(line) or _STAGE.match(line)
        if match is None:
            groups.setdefault(line, [])
        else:
            groups.setdefault(match.expand(r"Rank\3" if match.re is _RANK else r"\1tage\3"), []).append(match)
    return [_merge(matches) if matches else line for line, matches in groups.items()]


def _merge(matches: Sequence[re.Match[str]]) -> str:
    first = matches[0]
    if len(matches) == 1:
        return first[0]
    stages = {int(match[2]) for match in matches}
    if first.re is _STAGE:
        return f"{first[1]}tages {_format_numbers(stages)}{first[3]}"
    ranks = _format_numbers({int(match[1]) for match in matches})
    return f"Ranks {ranks} (stage{'s' * (len(stages) > 1)} {_format_numbers(stages)}){first[3]}"


def _format_numbers(numbers: Iterable[int]) -> str:
    """Return ``0 to 2, 5`` for 0, 1, 2 and 5; ``0, 1`` for two."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
