"""Accuracy by strategy over all measured convolutional networks: ParaDL's rows and the published runs."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from docs_scores import replaced

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.files import write_text
from galvatron_lite.oracle.measured import check_rows, measured_rows, rankings
from galvatron_lite.validate.predict import validate_runs
from galvatron_lite.validate.rows import PublishedRun, read_runs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "oracle-accuracy.md"
FAMILIES = ("paradl", "torchgpipe", "dle-cnn")
PUBLISHED = {"data": 0.976, "all": 0.867}
"""What the authors of ParaDL say of their oracle (HPDC 2021, abstract): its best, of data parallelism, and its mean."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A measured row and the accuracy of each kind of formulas; None where one has no figure."""

    source: str  # the table or logs it is from
    strategy: str  # the oracle's word
    name: str  # for people
    galvatron: float | None
    paradl: float | None = None


def strategy_of(run: PublishedRun) -> str:
    """The oracle's word for a published run."""
    if (run.pp or 1) > 1:
        return "pipeline"
    for degree, name in ((run.spatial, "data+spatial"), (run.filter, "data+filter")):
        if (degree or 1) > 1:
            return name
    return "serial" if (run.n_gpus or 1) == 1 else "data"


def scored(path: Path) -> Iterator[Scored]:
    """Rows of the report and of the logs, then published runs that ``galvatron validate`` scores."""
    for check in check_rows(measured_rows()):
        row = check.row
        name = f"{row.model} {row.strategy.value}, {row.devices} GPUs, {row.batch} a replica"
        yield Scored(row.origin, row.strategy.value, name, check.accuracy("galvatron"), check.accuracy("paradl"))
    for one in validate_runs([run for run in read_runs(path) if run.family in FAMILIES], load_calibration()):
        if one.time is not None:
            run = one.run
            name = f"{run.run_id}: {run.model}, {run.n_gpus} GPUs, {run.precision}"
            yield Scored(run.family, strategy_of(run), name, 1 - abs(one.time - 1))


def means_table(rows: Iterable[Scored]) -> str:
    """The table of docs/oracle-accuracy.md: means by strategy, and which come out in the wrong order."""
    groups = defaultdict[str, list[Scored]](list)
    for one in rows:
        for name in (f"{one.strategy}, {one.source}", one.strategy, "all"):
            groups[name].append(one)
    lines = ["| rows | how many | accuracy, default | closed forms | published |", "|---|---:|---:|---:|---:|"]
    for name in sorted(groups, key=lambda name: (name != "all", name)):
        ours, theirs = (mean(getattr(one, way) for one in groups[name]) for way in ("galvatron", "paradl"))
        published = f"{100 * PUBLISHED[name]:.1f} %" if name in PUBLISHED else ""
        lines.append(f"| {name} | {len(groups[name])} | {ours} | {theirs} | {published} |")
    orders = rankings(check_rows(measured_rows()))
    wrong = [f"{one.name}: measured {' < '.join(one.measured)}" for one in orders if not one.right["galvatron"]]
    right = len(orders) - len(wrong)
    lines += ["", f"Strategies are in the right order in {right} of {len(orders)} groups. Not in: {'; '.join(wrong)}."]
    return "\n".join(lines)


def mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * fmean(known):.1f} %" if known else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("profiles/published/runs.jsonl"), help="published runs")
    parser.add_argument("--rows", action="store_true", help="show every row, worst first")
    parser.add_argument("--write", action="store_true", help="write the table of docs/oracle-accuracy.md")
    chosen = parser.parse_args()
    rows = list(scored(chosen.runs))
    if chosen.write:
        write_text(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "accuracy", means_table(rows)))
    print(means_table(rows))
    for one in sorted(rows, key=lambda one: one.galvatron or 0.0) if chosen.rows else ():
        print(f"{mean([one.galvatron]):>8}  {one.source}: {one.name}")


if __name__ == "__main__":
    main()
