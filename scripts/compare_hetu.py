"""Our plans beside Hetu-Galvatron's recorded ones; run by ``scripts/compare_hetu``."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from studies.hetu.compare import Comparison, Priced, compare
from studies.hetu.formulas import price
from studies.hetu.recorded import RecordedSearch, read_searches

FOLDER = Path(__file__).parents[1] / "profiles" / "hetu"
SLACK = 1e-9


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="profiles and searches.jsonl")
    return parser.parse_args()


def reproduced(search: RecordedSearch, folder: Path) -> tuple[float, int]:
    """How far its formulas as we have them are from what was recorded: relative seconds, MB of the worst stage."""
    cost = price(*search.profiles(folder), search.hetu_plan(), search.rules)
    kept = search.budget_gb * 1024 - search.usable
    pairs = zip(cost.memory, search.memory_mb, strict=True)
    return abs(cost.seconds / search.seconds - 1), max(abs(ours + kept - theirs) for ours, theirs in pairs)


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Ours over theirs; None where either is not known."""
    return None if ours is None or not theirs else ours / theirs


def row(case: Comparison) -> dict[str, Any]:
    """One case as plain data."""
    search, theirs, chosen = case.search, case.theirs, case.chosen
    return {
        "case": search.name,
        "status": search.status,
        "budget_mb": search.usable,
        "their_seconds": search.seconds or None,
        "their_cpu_seconds": search.search_cpu_seconds,
        "shipped_core": search.shipped_core,
        "their_plan_by_our_model": theirs and {"seconds": theirs.seconds, "mb": theirs.memory},
        "chosen": figures(chosen, theirs),
        "how": chosen and chosen.how.value,
        "chosen_mb": chosen and {"by_our_model": chosen.memory, "by_theirs": chosen.their_memory},
        "our_cpu_seconds": chosen and chosen.cpu,
        "whole_space": figures(case.ours, theirs),
        "whole_space_cpu_seconds": case.ours and case.ours.cpu,
        "best_by_their_formulas": figures(case.by_theirs, theirs),
        "its_cpu_seconds": case.by_theirs and case.by_theirs.cpu,
    }


def rows_of(searches: Sequence[RecordedSearch], folder: Path, told: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One row a search; searches that differ in their recorded CPU time alone are compared once."""
    known: dict[str, Comparison] = {}
    for number, search in enumerate(searches, 1):
        key = str(replace(search, search_cpu_seconds=None, shipped_core=False))
        if key not in known:
            told(f"{number} of {len(searches)}: {search.name}")
            known[key] = compare(search, folder)
        yield row(replace(known[key], search=search))


def figures(plan: Priced | None, theirs: Priced | None) -> dict[str, float | None]:
    """Step times of a plan of ours over theirs, by both models."""
    if plan is None or theirs is None:
        return {"by_our_model": None, "by_theirs": None}
    return {
        "by_our_model": ratio(plan.seconds, theirs.seconds),
        "by_theirs": ratio(plan.their_seconds, theirs.their_seconds),
    }


def show(rows: Sequence[dict[str, Any]]) -> Table:
    """The table of all cases that found a plan."""
    table = Table(
        "case", "their step", "ours/theirs: our model", "their formulas", "how it was found", "whole space: our model",
        "their CPU s", "our CPU s", "times", box=None, pad_edge=False,
    )  # fmt: skip
    for one in rows:
        if one["status"] == "ok":
            chosen, cpu = one["chosen"], (one["their_cpu_seconds"], one["our_cpu_seconds"])
            table.add_row(
                one["case"], f"{one['their_seconds']:.3f}", said(chosen["by_our_model"]), said(chosen["by_theirs"]),
                one["how"], said(one["whole_space"]["by_our_model"]), f"{cpu[0]:.1f}" + "*" * one["shipped_core"],
                f"{cpu[1]:.2f}", f"{cpu[0] / cpu[1]:.0f}",
            )  # fmt: skip
    return table


def said(value: float | None) -> str:
    """A ratio, or a dash."""
    return "-" if value is None else f"{value:.4f}"


def summary(rows: Sequence[dict[str, Any]], errors: Sequence[tuple[float, int]]) -> Iterator[str]:
    """What the table comes to."""
    found = [one for one in rows if one["status"] == "ok"]
    if found:
        yield (
            f"{len(found)} plans; its formulas as we have them give the recorded step time to "
            f"{max(error for error, _ in errors):.0e} and its memory to {max(gap for _, gap in errors)} MB."
        )
        yield from counts(found)
    yield from speeds(rows, "our_cpu_seconds", "ours (all that was tried for the plan)")
    yield from speeds(rows, "whole_space_cpu_seconds", "our search of the whole space")
    yield from speeds(rows, "its_cpu_seconds", "the exact search by their formulas")
    none = [one for one in rows if one["status"] == "infeasible"]
    agreed = sum(one["its_cpu_seconds"] is None for one in none)
    yield f"{len(none)} searches found nothing; the exact search by their formulas agrees in {agreed}."


def counts(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How often our plans are no slower and fit."""
    for text, key, model in (
        ("The plan, by our model", "chosen", "by_our_model"),
        ("The plan, by their formulas", "chosen", "by_theirs"),
        ("Best of the whole space, by our model", "whole_space", "by_our_model"),
        ("Exact search of their space by their formulas", "best_by_their_formulas", "by_theirs"),
    ):
        ratios = [one[key][model] for one in found if one[key][model] is not None]
        never = sum(value <= 1 + SLACK for value in ratios)
        quicker = sum(value < 1 - SLACK for value in ratios)
        yield (
            f"{text}: never slower in {never} of {len(ratios)}, quicker in {quicker}, worst {max(ratios):.4f}, "
            f"best {min(ratios):.4f}."
        )
    fits = [max(one["chosen_mb"].values()) <= one["budget_mb"] for one in found]
    ways = Counter(one["how"] for one in found)
    yield (
        f"The plan fits the budget by both memory models in {sum(fits)} of {len(found)}; found by "
        f"{', '.join(f'{way} ({number})' for way, number in ways.most_common())}."
    )


def speeds(rows: Sequence[dict[str, Any]], key: str, name: str) -> Iterator[str]:
    """Their CPU seconds over ours, for the engine as shipped and for the faster core of the recordings."""
    kinds: tuple[tuple[str, Callable[[dict[str, Any]], bool]], ...] = (
        ("its engine as shipped (*)", lambda one: one["shipped_core"]),
        ("its engine with a faster core", lambda one: not one["shipped_core"]),
    )
    for text, wanted in kinds:
        pairs = [(one["their_cpu_seconds"], one[key]) for one in rows if wanted(one) and one[key]]
        quotients = sorted(theirs / ours for theirs, ours in pairs)
        if quotients:
            middle = quotients[len(quotients) // 2]
            yield (
                f"CPU time, {text} over {name}: {quotients[0]:.0f} to {quotients[-1]:.0f} times, median {middle:.0f} "
                f"({sum(one >= 100 for one in quotients)} of {len(quotients)} at least 100)."
            )


def main() -> None:
    """Compare every recorded search whose engine was not modified."""
    chosen = options()
    searches = [
        search
        for search in read_searches(chosen.folder / "searches.jsonl")
        if not search.modified and search.status != "error" and chosen.only in search.name
    ]
    progress = Console(stderr=True, highlight=False)
    rows = list(rows_of(searches, chosen.folder, progress.print))
    errors = [reproduced(search, chosen.folder) for search in searches if search.status == "ok"]
    lines = list(summary(rows, errors))
    if chosen.json:
        print(json.dumps({"cases": rows, "summary": lines}, indent=1))
        return
    console = Console(highlight=False, width=200)
    console.print(show(rows))
    for line in lines:
        console.print(line)


if __name__ == "__main__":
    main()
