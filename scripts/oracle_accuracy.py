"""Accuracy by strategy over all measured convolutional networks: ParaDL's rows and the published runs."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from docs_scores import replaced
from oracle_reasons import Scored, reason_of
from rich.console import Console
from rich.table import Table

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.files import write_text
from galvatron_lite.oracle.measured import check_rows, measured_rows, rankings
from galvatron_lite.validate.predict import validate_runs
from galvatron_lite.validate.results import Judged
from galvatron_lite.validate.rows import PublishedRun, read_runs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "oracle-accuracy.md"
FAMILIES = ("paradl", "torchgpipe", "dle-cnn")
PUBLISHED = {"data": 0.976, "all": 0.867}
"""What the authors of ParaDL say of their oracle (HPDC 2021, abstract): its best, of data parallelism, and its mean."""


GOAL = PUBLISHED["all"]


def strategy_of(run: PublishedRun) -> str:
    """The oracle's word for a published run."""
    if (run.pp or 1) > 1:
        return "pipeline"
    for degree, name in ((run.spatial, "data+spatial"), (run.filter, "data+filter")):
        if (degree or 1) > 1:
            return name
    return "serial" if (run.n_gpus or 1) == 1 else "data"


def published(path: Path, grades: str = "AB") -> Iterable[Scored]:
    """Published runs that the planner's validation scores; those of grade C too where asked for."""
    runs = [run for run in read_runs(path) if run.family in FAMILIES]
    if "C" in grades:
        runs = [replace(run, quality="B") for run in runs if run.quality == "C" and run.micro_batch]
    for one in validate_runs(runs, load_calibration()):
        if one.time is not None:
            yield _scored(one, one.time)


def _scored(one: Judged, ratio: float) -> Scored:
    run, seconds = one.run, one.measured.step_seconds if one.measured else None
    name = f"{run.run_id}: {run.model}, {run.n_gpus} GPUs, {run.precision}"
    setting = (run.framework, run.model, run.gpu, run.gpu_mem_gb, run.precision, run.micro_batch)
    return Scored(
        run.family, strategy_of(run), name, 1 - abs(ratio - 1), None, setting, run.n_gpus or 1, seconds or 0.0,
        run.micro_batch or 0, ratio,
    )  # fmt: skip


def measured() -> Iterable[Scored]:
    """Rows of the report, and of the logs."""
    for check in check_rows(measured_rows()):
        row, found = check.row, check.predicted["galvatron"] or 0.0
        name = f"{row.model} {row.strategy.value}, {row.devices} GPUs, {row.batch} a replica"
        yield Scored(
            row.origin, row.strategy.value, name, check.accuracy("galvatron"), check.accuracy("paradl"),
            (row.model, row.batch), row.devices, row.seconds, row.batch if row.per == "iteration" else 0,
            found / row.seconds, "; ".join(check.problems.values()) or row.note,
        )  # fmt: skip


def shown(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * fmean(known):.1f} % (median {100 * median(known):.1f}, {len(known)} rows)" if known else "-"


def grouped(rows: Iterable[Scored]) -> dict[str, list[Scored]]:
    """Rows by strategy, by strategy and source, and all."""
    groups = defaultdict[str, list[Scored]](list)
    for one in rows:
        for name in (f"{one.strategy}, {one.source}", one.strategy, "all"):
            groups[name].append(one)
    return groups


def means(rows: list[Scored], console: Console) -> None:
    groups = grouped(rows)
    table = Table("rows", "galvatron", "paradl", "published", box=None, pad_edge=False, header_style="bold")
    for name in sorted(groups):
        told = f"{100 * PUBLISHED[name]:.1f} %" if name in PUBLISHED else ""
        group = groups[name]
        table.add_row(name, shown(one.galvatron for one in group), shown(one.paradl for one in group), told)
    console.print(table)


def told(one: Scored, rows: Sequence[Scored]) -> str:
    """What a row says of itself; where it is below the goal, why."""
    return one.note or (reason_of(one, rows) if (one.galvatron or 0.0) < GOAL else "")


def means_table(rows: Sequence[Scored]) -> str:
    """The first table of docs/oracle-accuracy.md: means by strategy, and which come out in the wrong order."""
    lines = ["| rows | how many | accuracy, default | closed forms | published |", "|---|---:|---:|---:|---:|"]
    groups = grouped(rows)
    for name in sorted(groups, key=lambda name: (name != "all", name)):
        ours, theirs = ([getattr(one, way) for one in groups[name]] for way in ("galvatron", "paradl"))
        told = f"{100 * PUBLISHED[name]:.1f} %" if name in PUBLISHED else ""
        lines.append(f"| {name} | {len(ours)} | {_mean(ours)} | {_mean(theirs)} | {told} |")
    orders = rankings(check_rows(measured_rows()))
    right = sum(one.right["galvatron"] for one in orders)
    wrong = "; ".join(
        f"{one.name}: measured {' < '.join(one.measured)}" for one in orders if not one.right["galvatron"]
    )
    lines += ["", f"Strategies are in the right order in {right} of {len(orders)} groups. Not in: {wrong}."]
    return "\n".join(lines)


def rows_table(rows: Sequence[Scored]) -> str:
    """The second table of docs/oracle-accuracy.md: rows below the goal, worst first."""
    lines = [f"Rows below {100 * GOAL:.1f} %, worst first:", "", "| accuracy | row | why |", "|---:|---|---|"]
    below = [one for one in rows if (one.galvatron or 0.0) < GOAL]
    for one in sorted(below, key=lambda one: one.galvatron or 0.0):
        lines.append(f"| {_mean([one.galvatron])} | {one.source}: {one.name} | {reason_of(one, rows)} |")
    return "\n".join(lines)


def _mean(values: Iterable[float | None]) -> str:
    return shown(values).split(" (")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("profiles/published/runs.jsonl"), help="published runs")
    parser.add_argument("--rows", action="store_true", help="show every row, worst first")
    parser.add_argument("--below", type=float, default=1.0, help="of those, the ones of less accuracy")
    parser.add_argument("--grade-c", action="store_true", help="published runs of grade C only, which are not scored")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/oracle-accuracy.md")
    given = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True, width=150)
    rows = [*published(given.runs, "C")] if given.grade_c else [*measured(), *published(given.runs)]
    if given.write:
        text = PAGE.read_text(encoding="utf-8")
        write_text(PAGE, replaced(replaced(text, "accuracy", means_table(rows)), "rows", rows_table(rows)))
    means(rows, console)
    if given.rows:
        for one in sorted(rows, key=lambda one: -9.0 if one.galvatron is None else one.galvatron):
            if one.galvatron is None or one.galvatron < given.below:
                console.print(f"{_mean([one.galvatron]):>8}  {one.source}: {one.name}  {told(one, rows)}")


if __name__ == "__main__":
    main()
