"""Writes the documentation's tables of errors from the scores that lie beside the published runs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.files import read_data, write_data, write_text
from galvatron_lite.validate.predict import validate_runs
from galvatron_lite.validate.report import as_data, scatter
from galvatron_lite.validate.results import ScoredRun, macro, macros, score_families
from galvatron_lite.validate.rows import read_runs

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "profiles" / "published" / "runs.jsonl"
SCORES = ROOT / "profiles" / "published" / "scores.json"
IMAGES = "timm-train-rtx3090"
CONSTANTS = ROOT / "configs" / "calibration" / "stacks.json"
FIGURE = ROOT / "docs" / "predicted-vs-measured.svg"

SHIPPED, SAMPLE, MODEL, FAMILY = "shipped", "in sample", "without model", "without family"
"""All scored rows with the constants that ship, and the ways of ``scripts/calibrate --cross-validate``."""

COLUMNS = (
    ("rows", SHIPPED, "rows", 0), ("scored", SHIPPED, "scored", 0), ("time %", SHIPPED, "time_mape", 1),
    ("median", SHIPPED, "time_median", 1), ("bias", SHIPPED, "time_bias", 1), ("without model", MODEL, "time_mape", 1),
    ("without family", FAMILY, "time_mape", 1), ("memory %", SHIPPED, "memory_mape", 1),
    ("rank in groups", SHIPPED, "group_spearman", 2), ("regret %", SHIPPED, "regret", 1),
)  # fmt: skip
"""Heading, way, field of ``Scores``, digits."""

Ways = Mapping[str, Mapping[str, Mapping[str, Any]]]  # scores by way and family


def ways_of(data: Mapping[str, Any]) -> Ways:
    """The scores of a scores file by way and family."""
    folds = {
        way: {family: one[way] for family, one in data["families"].items() if way in one}
        for way in (SAMPLE, MODEL, FAMILY)
    }
    return {SHIPPED: data[SHIPPED]} | folds


def judged() -> list[ScoredRun]:
    return validate_runs(read_runs(RUNS), load_calibration())


def shipped_scores(runs: list[ScoredRun]) -> dict[str, Any]:
    """Of each family, and the means of those of language models."""
    found = as_data(score_families(runs), macros(runs), runs, 0)
    families = found["families"]
    assert isinstance(families, dict)
    return families


def image_error(runs: list[ScoredRun]) -> float:
    """Mean over families of the mean absolute error of image networks' step times, as a share."""
    images = [one for one in runs if one.run.image_size is not None and one.run.seq_len is None]
    return round((macro(score_families(images).values())["time_mape"] or 0.0) / 100, 4)


def tell_image_error(runs: list[ScoredRun]) -> None:
    """Note it beside the constants, where plans of such models find it."""
    told = dict(read_data(CONSTANTS))
    write_data(CONSTANTS, told | {"expected_error": told["expected_error"] | {"images": image_error(runs)}})


def figure(ways: Ways, way: str, family: str, field: str, digits: int) -> str:
    value = ways[way].get(family, {}).get(field)
    return "" if value is None else f"{round(value, digits) + 0.0:,.{digits}f}"


def scores_table(data: Mapping[str, Any]) -> str:
    """A row a family in the order of the runs, then the plain means over families."""
    ways = ways_of(data)
    lines = ["| family | " + " | ".join(heading for heading, *_ in COLUMNS) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for family in ways[SHIPPED]:
        figures = (figure(ways, way, family, field, digits) for _, way, field, digits in COLUMNS)
        lines.append(f"| {family} | " + " | ".join(figures) + " |")
    for name, members in (
        ("**mean of all families**", list(ways[SHIPPED])),
        ("**of language models, grade A**", best_of(data)),
    ):
        figures = (average(ways, way, members, field, digits) for _, way, field, digits in COLUMNS)
        lines.append(f"| {name} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def best_of(data: Mapping[str, Any]) -> list[str]:
    """Families of language models with rows of grade A: those of the headline."""
    return [name for name, one in data["families"].items() if one["grade"] == "A"]


def average(ways: Ways, way: str, families: Sequence[str], field: str, digits: int) -> str:
    """Sum of counts, plain mean of everything else; nothing where only a part of the families was left out in turn."""
    known = [scores for family in families if (scores := ways[way].get(family)) is not None]
    values = [scores[field] for scores in known if scores.get(field) is not None]
    if not values or (way != SHIPPED and len(known) < len(families)):
        return ""
    return f"{sum(values):,}" if digits == 0 else f"{round(fmean(values), digits) + 0.0:.{digits}f}"


def headline_table(data: Mapping[str, Any]) -> str:
    """What the README says: of models and software that were not fitted to."""
    lines = summary_table(data).splitlines()
    return "\n".join(
        [*lines[:2], lines[4].replace("… fitted", "| step time of language models, fitted", 1)[2:], *lines[6:]]
    )


def summary_table(data: Mapping[str, Any]) -> str:
    """Means over families."""
    ways, best = ways_of(data), best_of(data)
    weighed = [family for family, scores in data[SHIPPED].items() if scores["memory_mape"] is not None]
    images = data[SHIPPED][IMAGES]
    macro = {way: f"{value:.1f}" for way, value in data["macro"]["grade A"].items()}
    rows = (
        (f"step time, {len(best)} families of language models, constants fitted to all of them", macro[SAMPLE]),
        ("… fitted without the model that is predicted", macro[MODEL]),
        ("… fitted without its family, and with no constants of its software", macro[FAMILY]),
        ("regret: the plan we would pick beside the best one published", average(ways, MODEL, best, "regret", 1)),
        (f"peak memory, {len(weighed)} families that measured it", average(ways, SHIPPED, weighed, "memory_mape", 1)),
        (f"step time of {images['timed']} image networks on one GPU, median", f"{images['time_median']:.1f}"),
    )
    return "\n".join(["| mean error over families | % |", "|---|---:|", *(f"| {a} | {b} |" for a, b in rows)])


def replaced(text: str, name: str, content: str) -> str:
    """A page with what stands between two markers replaced."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{start} … {end} is missing")
    return pattern.sub(lambda _: f"{start}\n\n{content}\n\n{end}", text)


PAGES = (
    (ROOT / "docs" / "costs.md", "scores", scores_table),
    (ROOT / "docs" / "accuracy.md", "scores", summary_table),
    (ROOT / "README.md", "scores", headline_table),
)
"""Pages, the marker in each, and what is written there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refresh", action="store_true", help="price all runs anew and draw the figure first")
    if parser.parse_args().refresh:
        runs = judged()
        write_data(SCORES, read_data(SCORES) | {SHIPPED: shipped_scores(runs)})
        write_text(FIGURE, scatter(runs))
        tell_image_error(runs)
    data = read_data(SCORES)
    for page, name, table in PAGES:
        write_text(page, replaced(page.read_text(encoding="utf-8"), name, table(data)))


if __name__ == "__main__":
    main()
