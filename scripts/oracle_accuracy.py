"""Accuracy by strategy over all measured convolutional networks: ParaDL's rows and the published runs."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.oracle.measured import check_rows, measured_rows
from galvatron_lite.validate.rows import PublishedRun, read_runs
from galvatron_lite.validate.run import validate_runs

FAMILIES = ("paradl", "torchgpipe", "dle-cnn")
PUBLISHED = {"data": 0.976, "all": 0.867}
"""What the authors of ParaDL say of their oracle (HPDC 2021, abstract): its best, of data parallelism, and its mean."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A measured row and how near each kind of formulas comes; None where one has no figure."""

    source: str
    strategy: str
    name: str
    galvatron: float | None
    paradl: float | None
    why: str = ""


def strategy_of(run: PublishedRun) -> str:
    """The oracle's word for a published run."""
    if (run.pp or 1) > 1:
        return "pipeline"
    return "serial" if (run.n_gpus or 1) == 1 else "data"


def published(path: Path) -> Iterable[Scored]:
    """Published runs that the planner's validation scores."""
    runs = [run for run in read_runs(path) if run.family in FAMILIES]
    for one in validate_runs(runs, load_calibration()):
        if one.time is not None:
            name = f"{one.run.run_id}: {one.run.model}, {one.run.n_gpus} GPUs, {one.run.precision}"
            yield Scored(one.run.family, strategy_of(one.run), name, 1 - abs(one.time - 1), None)


def measured() -> Iterable[Scored]:
    """Rows of the report, and of the logs."""
    for check in check_rows(measured_rows()):
        row = check.row
        name = f"{row.model} {row.strategy.value}, {row.devices} GPUs, {row.batch} a replica"
        why = "; ".join(check.problems.values()) or row.note
        yield Scored(
            row.origin, row.strategy.value, name, check.accuracy("galvatron"), check.accuracy("paradl"), why
        )  # fmt: skip


def shown(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * fmean(known):.1f} % (median {100 * median(known):.1f}, {len(known)} rows)" if known else "-"


def means(rows: list[Scored], console: Console) -> None:
    groups = defaultdict[str, list[Scored]](list)
    for one in rows:
        groups[f"{one.strategy}, {one.source}"].append(one)
        groups[one.strategy].append(one)
        groups["all"].append(one)
    table = Table("rows", "galvatron", "paradl", "published", box=None, pad_edge=False, header_style="bold")
    for name in sorted(groups):
        told = f"{100 * PUBLISHED[name]:.1f} %" if name in PUBLISHED else ""
        group = groups[name]
        table.add_row(name, shown(one.galvatron for one in group), shown(one.paradl for one in group), told)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("profiles/published/runs.jsonl"), help="published runs")
    parser.add_argument("--rows", action="store_true", help="show every row, worst first")
    parser.add_argument("--below", type=float, default=1.0, help="of those, the ones of less accuracy")
    given = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True, width=150)
    rows = [*measured(), *published(given.runs)]
    means(rows, console)
    if given.rows:
        for one in sorted(rows, key=lambda one: -9.0 if one.galvatron is None else one.galvatron):
            if one.galvatron is None or one.galvatron < given.below:
                console.print(f"{shown([one.galvatron]).split(' (')[0]:>8}  {one.source}: {one.name}  {one.why}")


if __name__ == "__main__":
    main()
