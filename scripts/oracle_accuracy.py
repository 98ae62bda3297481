"""Accuracy by strategy over all measured convolutional networks: ParaDL's rows and the published runs."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pulp
from docs_scores import replaced

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.files import write_text
from galvatron_lite.oracle.measured import MeasuredRow, check_rows, measured_rows, rankings
from galvatron_lite.oracle.request import network_named
from galvatron_lite.oracle.rows import Method
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
    predicted: float = 0.0  # seconds of a step
    measured: float = 0.0
    setting: tuple[object, ...] = ()  # equal for rows of data parallelism that differ in the number of devices alone
    devices: int = 1
    paper: bool = False  # fp32 and classification of ImageNet, as the paper's own measurements


IMAGENET = re.compile("resnet50v|resnext|efficientnet|vgg16")


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
        seconds = (check.predicted["galvatron"] or 0.0, row.seconds)
        setting = (row.origin, row.model, row.batch) if row.strategy in (Method.SERIAL, Method.DATA) else ()
        accuracies = check.accuracy("galvatron"), check.accuracy("paradl")
        yield Scored(row.origin, row.strategy.value, name, *accuracies, *seconds, setting, row.devices)
    for one in validate_runs([run for run in read_runs(path) if run.family in FAMILIES], load_calibration()):
        if one.time is not None:
            run = one.run
            name = f"{run.run_id}: {run.model}, {run.n_gpus} GPUs, {run.precision}"
            strategy, seconds = strategy_of(run), one.measured.step_seconds if one.measured else 0.0
            fields = (
                run.family,
                run.framework,
                run.model,
                run.gpu,
                run.precision,
                run.micro_batch,
                run.source,
                "XLA" in (run.notes or ""),
            )
            yield Scored(
                run.family, strategy, name, 1 - abs(one.time - 1), None, one.time * (seconds or 0.0), seconds or 0.0,
                fields if strategy in ("serial", "data") else (), run.n_gpus or 1,
                run.precision == "fp32" and IMAGENET.search(run.model or "") is not None,
            )  # fmt: skip


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


def by_devices(rows: Iterable[Scored]) -> list[list[Scored]]:
    """Rows of one setting on numbers of devices, ascending."""
    groups = defaultdict[tuple[object, ...], list[Scored]](list)
    for one in rows:
        if one.setting:
            groups[one.setting].append(one)
    return [sorted(group, key=lambda one: one.devices) for group in groups.values() if len(group) > 1]


def ordered_bound(group: list[Scored]) -> list[float]:
    """Accuracies of the best predictions that say of more devices, with as many samples each, no less.

    Least sum of |p - m| / m over ascending p, which some p among the measured values reach; by the largest p so far.
    """
    values = sorted({one.measured for one in group})
    best: dict[float, tuple[float, list[float]]] = dict.fromkeys(values, (0.0, []))
    for one in group:
        lost = {value: abs(value - one.measured) / one.measured for value in values}
        before = {
            value: min((best[less] for less in values if less <= value), key=lambda way: way[0]) for value in values
        }
        best = {value: (way[0] + lost[value], [*way[1], 1 - lost[value]]) for value, way in before.items()}
    return min(best.values(), key=lambda way: way[0])[1]


def measured_alone(rows: Iterable[Scored]) -> Iterator[tuple[Scored, float, bool]]:
    """Rows of data parallelism, their accuracy where one device's seconds are the measured ones, as in the paper, and
    whether they took less than four fifths of that, which no sum of gradients explains."""
    for first, *others in by_devices(rows):
        if first.devices == 1:
            for one in others:
                predicted = one.predicted * first.measured / first.predicted
                yield one, 1 - abs(predicted / one.measured - 1), one.measured < 0.8 * first.measured


def costs_of(row: MeasuredRow) -> tuple[float, list[float]]:
    """Seconds of compute of an iteration, and what one constant each is multiplied with: messages and bytes of layers
    or borders, bytes of gradients within a node and between nodes."""
    network, width = network_named(row.model), 4 if "+" in row.strategy.value else row.devices
    item, spatial = network.item_bytes, row.strategy is Method.DATA_SPATIAL
    if spatial:
        split = [layer for layer in network.layers if layer.exchanges and "spatial" in layer.split]
        calls, size = 2.0 * len(split), row.batch * item * sum(layer.halo(layer.x) for layer in split)
    else:
        split = [layer for layer in network.layers[:-1] if "filter" in layer.split]
        calls, size = (
            3.0 * (width - 1) * len(split),
            3 * (width - 1) / width * row.batch * item * sum(y.outputs for y in split),
        )
    weights, nodes = network.weights * item, row.devices // 4
    between = 2 * (1 - 1 / nodes) * weights if width == 4 else 0.0  # whole weights: see ``software`` of the rows
    return row.batch * network.seconds / width, [calls, size, weights * spatial, between]


def constants_bound(rows: Sequence[MeasuredRow]) -> float:
    """The best mean accuracy on some rows of the closed forms' terms with any constants, none below nought."""
    task, sums = pulp.LpProblem(), list[pulp.LpVariable]()
    constants = [pulp.LpVariable(f"k{number}", 0) for number in range(4)]
    each = [replace(row, per="iteration").epoch(1.0) if row.per == "epoch" else 1.0 for row in rows]  # iterations
    known = [(costs_of(row), row.seconds / count) for row, count in zip(rows, each, strict=True)]
    scale = np.array([costs for (_, costs), _ in known]).max(axis=0)
    for number, ((compute, costs), seconds) in enumerate(known):
        error = pulp.LpVariable(f"e{number}", 0)
        terms = pulp.lpSum(k * cost / most for k, cost, most in zip(constants, costs, scale, strict=True) if most)
        task += error >= (terms + compute) / seconds - 1
        task += error >= 1 - (terms + compute) / seconds
        sums.append(error)
    task += pulp.lpSum(sums)
    task.solve(pulp.HiGHS(msg=False))
    return 1 - pulp.value(task.objective) / len(sums)


def bounds_table(rows: list[Scored]) -> str:
    """What no formula of these kinds can pass, beside what the default formulas reach."""
    lines = ["| rows | how many | accuracy, default | at most | by which argument |", "|---|---:|---:|---:|---|"]
    turned = [(group, bound) for group in by_devices(rows) if mean(bound := ordered_bound(group)) != "100.0 %"]
    for group, bound in turned:
        name = " ".join(str(one) for one in group[0].setting[:6])
        argument = "more GPUs with as many samples each take no less"
        lines.append(f"| {name} | {len(group)} | {mean(one.galvatron for one in group)} | {mean(bound)} | {argument} |")
    sets, alone_sets = defaultdict[str, list[MeasuredRow]](list), defaultdict[str, list[MeasuredRow]](list)
    split = [row for row in measured_rows() if row.strategy not in (Method.SERIAL, Method.DATA)]
    for row in split:
        sets[f"{row.strategy.value}, {row.origin}"].append(row)
        alone_sets[f"{row.strategy.value} {row.model} {row.origin}"].append(row)
    best = {name: constants_bound(members) for name, members in sets.items()}
    for name, members in sets.items():
        reached = mean(one.galvatron for one in rows if f"{one.strategy}, {one.source}" == name)
        bound = f"{100 * best[name]:.1f} %"
        models = len({row.model for row in members})
        argument = f"one set of constants for {models} network{'s' * (models > 1)}: any values of them"
        lines.append(f"| {name} | {len(members)} | {reached} | {bound} | {argument} |")
    least = min(constants_bound(members) for members in alone_sets.values())
    strategies = {row.strategy.value for row in split}
    others = [one.galvatron for one in rows if one.strategy not in strategies and one.galvatron is not None]
    every = (sum(len(sets[name]) * bound for name, bound in best.items()) + sum(others)) / (len(split) + len(others))
    alone = list(measured_alone(rows))
    paper = [accuracy for one, accuracy, odd in alone if one.paper and not odd]
    plain = [accuracy for one, accuracy, odd in alone if not odd]
    odd = [one.name for one, _, odd in alone if odd]
    return "\n".join([
        *lines, "",
        f"Each network of one source by itself is met to {100 * least:.1f} % and more by some values of the constants: "
        f"two networks need two values of one constant. With {4 * len(sets)} constants chosen on the {len(split)} rows "
        f"that split layers, and all else as it is, all would come to {100 * every:.1f} %.",
        "",
        f"With one GPU's seconds as measured, the paper's own condition, data parallelism comes to {mean(paper)} on "
        f"the {len(paper)} rows that classify ImageNet in fp32 as the paper does, to {mean(plain)} on all "
        f"{len(plain)}. Left out are {len(odd)} whose GPUs are each faster by a quarter and more than one alone: "
        f"{'; '.join(odd)}.",
    ])  # fmt: skip


def mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * fmean(known):.1f} %" if known else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("profiles/published/runs.jsonl"), help="published runs")
    parser.add_argument("--rows", action="store_true", help="show every row, worst first")
    parser.add_argument("--bounds", action="store_true", help="show what no formula can pass on these rows")
    parser.add_argument("--write", action="store_true", help="write the table of docs/oracle-accuracy.md")
    chosen = parser.parse_args()
    rows = list(scored(chosen.runs))
    if chosen.write:
        write_text(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "accuracy", means_table(rows)))
        write_text(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "bounds", bounds_table(rows)))
    print(means_table(rows))
    if chosen.bounds:
        print(bounds_table(rows))
    for one in sorted(rows, key=lambda one: one.galvatron or 0.0) if chosen.rows else ():
        print(f"{mean([one.galvatron]):>8}  {one.source}: {one.name}")


if __name__ == "__main__":
    main()
