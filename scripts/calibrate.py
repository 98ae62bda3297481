"""Fit the calibrated constants to published runs, cross-validate them, and write them with their provenance."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

import numpy as np
from calibrate_rows import Rows, judged_again, predictor, rows_of
from rich.console import Console
from rich.table import Table

from galvatron_lite.calibration.fit import (
    Array,
    Fit,
    PredictMany,
    Unknowns,
    fit,
    jacobian_of,
    refit_without,
    unknowns_of,
    with_prior,
)
from galvatron_lite.calibration.parameters import (
    parameter_named,
    parameters_of,
    places_of,
    value_of,
    with_default,
    with_places,
)
from galvatron_lite.calibration.schema import Calibration, Origin
from galvatron_lite.calibration.store import DEFAULT, load_calibration, write_calibration
from galvatron_lite.cli.progress import progress_bar
from galvatron_lite.configs_path import config_folder
from galvatron_lite.files import read_data, write_data
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.validate.rows import PublishedRun, read_runs
from galvatron_lite.validate.scores import Judged, Scores, macro, score_families

LEAST_ROWS = 3
"""Rows that must use an entry for its constants to be fitted."""

Progress = Callable[[int, int, str], None]


def chosen(runs: Sequence[PublishedRun], families: Collection[str], without: Collection[str]) -> list[PublishedRun]:
    return [run for run in runs if (not families or run.family in families) and run.family not in without]


def fitted_entries(rows: Rows) -> set[str]:
    """Entries that enough rows use."""
    owners = {owner for used in rows.problem.uses for owner in used}
    return {owner for owner in owners if len(rows.problem.rows_of(owner)) >= LEAST_ROWS} - {f"stacks/{DEFAULT}"}


def stacks_seen(rows: Rows, apart: Collection[str] = ()) -> list[str]:
    """Stacks that rows have, but for those of ``apart``, which names rows' families."""
    return sorted({match_stack(run.framework).name for run in rows.runs if run.family not in apart})


def resumed(start: Calibration, state: Path) -> Calibration:
    """A calibration with the numbers that an earlier, unfinished fit had reached."""
    if not state.exists():
        return start
    saved = {parameter_named(name): place for name, place in read_data(state)["places"].items()}
    known = {p: place for p, place in saved.items() if p.entry in getattr(start, p.kind)}
    return with_places(start, tuple(known), tuple(known.values()))


def fit_in_rounds(
    rows: Rows, start: Calibration, predict: PredictMany, options: argparse.Namespace, say: Callable[[str], None]
) -> tuple[Calibration, Unknowns, Fit]:
    """Fit with sourced priors; then again with the stacks' priors at the default that the stacks seen make.

    The second round draws stacks of few rows towards what stacks have in common.
    """
    unknowns = unknowns_of(start, parameters_of(start, fitted_entries(rows)))
    calibration, seen = resumed(start, options.state), stacks_seen(rows)
    for number in range(1, options.rounds + 1):

        def report(step: int, found: Fit, number: int = number, unknowns: Unknowns = unknowns) -> None:
            error = np.abs(np.expm1(found.residuals[rows.problem.fitted])).mean()
            say(f"round {number}, step {step}: objective {found.objective:.2f}, mean error {error:.1%}")
            names = [parameter.name for parameter in unknowns.parameters]
            write_data(options.state, {"places": dict(zip(names, found.places.tolist(), strict=True))})

        found = fit(rows.problem, unknowns, calibration, predict, steps=options.steps, report=report)
        calibration = with_places(calibration, unknowns.parameters, found.places.tolist())
        calibration = with_default(calibration, "stacks", seen)
        if number < options.rounds:
            unknowns = with_common_prior(unknowns, start, calibration)
    residuals = found.residuals
    jacobian = jacobian_of(rows.problem, unknowns, calibration, found.places, residuals, predict)
    return calibration, unknowns, replace(found, jacobian=jacobian)


def with_common_prior(unknowns: Unknowns, start: Calibration, fitted: Calibration) -> Unknowns:
    """Priors of all stacks at the default; those of devices and links at their sources."""
    common = dict.fromkeys(start.stacks, fitted.stacks[DEFAULT])
    return with_prior(unknowns, replace(start, stacks=common))


def cross_validated(
    rows: Rows,
    calibration: Calibration,
    unknowns: Unknowns,
    found: Fit,
    predict: PredictMany,
    key: Callable[[PublishedRun], str],
    unseen: bool,
) -> list[Judged]:
    """Every row predicted with constants refitted without the rows of equal key.

    Args:
        rows, calibration, unknowns, found: the fit to all rows.
        predict: the cost model.
        key: what is left out together.
        unseen: whether the rows left out are predicted with the default stack, made without their stack.
    """
    keys = np.array([key(run) for run in rows.runs])
    folds = list(dict.fromkeys(keys.tolist()))
    tasks = []
    for fold in folds:
        left = np.flatnonzero(keys == fold)
        places = refit_without(rows.problem, unknowns, found, keys != fold)
        tasks.append((_fold(rows, calibration, unknowns, places, left.tolist() if unseen else []), left.tolist()))
    judged = list(rows.judged)
    for (_, left), seconds in zip(tasks, predict(tasks), strict=True):
        for row, second in zip(left, seconds, strict=True):
            judged[row] = judged_again(rows.judged[row], float(second))
    return judged


def _fold(
    rows: Rows, calibration: Calibration, unknowns: Unknowns, places: Array, unseen: Sequence[int]
) -> Calibration:
    made = with_places(calibration, unknowns.parameters, places.tolist())
    if not unseen:
        return made
    families = {rows.runs[row].family for row in unseen}
    apart = {match_stack(rows.runs[row].framework).name for row in unseen}
    return with_default(made, "stacks", stacks_seen(rows, families), apart)


def graded(judged: Sequence[Judged]) -> list[Judged]:
    """Of each family the rows of grade A, or all where it has none."""
    best = {one.run.family for one in judged if one.run.quality == "A"}
    return [one for one in judged if one.run.quality == "A" or one.run.family not in best]


def scores_table(columns: dict[str, dict[str, Scores]], families: Sequence[str]) -> Table:
    """Mean errors by family, one column a way of leaving rows out; regret and rank of the second way."""
    names = list(columns)
    table = Table("family", "rows", *(f"{name} %" for name in names), "bias %", "regret %", "rank in groups")
    judge = columns[names[min(1, len(names) - 1)]]
    for family in families:
        scores = judge[family]
        errors = [f"{columns[name][family].time_mape:.1f}" for name in names]
        extra = (scores.time_bias, scores.regret, scores.group_spearman)
        shown = [
            f"{value:.{digits}f}" if value is not None else "" for value, digits in zip(extra, (1, 1, 3), strict=True)
        ]
        table.add_row(family, str(scores.timed), *errors, *shown)
    every = [macro(columns[name].values()) for name in names]
    table.add_section()
    table.add_row("macro", "", *(f"{one['time_mape']:.1f}" for one in every))
    return table


def moved(start: Calibration, calibration: Calibration, unknowns: Unknowns) -> Table:
    """What the fit changed most, in standard deviations of the prior."""
    before, after = (
        np.array(places_of(start, unknowns.parameters)),
        np.array(places_of(calibration, unknowns.parameters)),
    )
    table = Table("constant", "before", "after", "prior deviations")
    change = (after - before) / unknowns.deviation
    for index in np.argsort(-np.abs(change)):
        parameter = unknowns.parameters[index]
        if abs(change[index]) > 0.1:
            values = (f"{value_of(one, parameter):.4g}" for one in (start, calibration))
            table.add_row(parameter.name, *values, f"{change[index]:+.1f}")
    return table


def with_origins(calibration: Calibration, rows: Rows, found: Fit, source: str) -> Calibration:
    """The provenance of every entry that was fitted."""
    today, origins = date.today().isoformat(), dict(calibration.origins)
    for owner in fitted_entries(rows):
        used = rows.problem.rows_of(owner)
        residual = float(np.abs(np.expm1(found.residuals[used])).mean())
        before = origins[owner].source.split("; fitted to")[0] if owner in origins else "prior: default"
        text = f"{before}; fitted to step times of {source}, leaving nothing out"
        origins[owner] = Origin(text, today, len(used), round(residual, 4))
    origins[f"stacks/{DEFAULT}"] = Origin(
        "Median over the stacks fitted, constant by constant", today, len(rows.judged)
    )
    whole = f"{today}: {len(rows.judged)} rows of {source}"
    return replace(calibration, origins=origins, provenance=(whole,))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=Path("profiles/published/runs.jsonl"))
    parser.add_argument("--start", type=Path, default=None, help="folder of constants to start from")
    parser.add_argument("--families", nargs="*", default=[], help="only these families of runs")
    parser.add_argument("--without", nargs="*", default=[], help="not these families of runs")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6, help="Gauss-Newton steps a round, at most")
    parser.add_argument("--most", type=int, default=150, help="rows of a family in the fit; all are scored")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--state", type=Path, default=Path(".galvatron/calibrate.json"), help="where a fit resumes")
    parser.add_argument("--cross-validate", action="store_true")
    parser.add_argument("--json", type=Path, default=None, help="write the scores here")
    parser.add_argument("--write", action="store_true", help="replace the package's constants")
    parser.add_argument("--output", type=Path, default=None, help="write the constants to this folder instead")
    return parser.parse_args()


def calibrate(options: argparse.Namespace, console: Console) -> None:
    start = load_calibration(options.start)
    runs = chosen(read_runs(options.rows), options.families, options.without)
    with progress_bar("Predicting") as move:
        rows = rows_of(runs, start, options.most, move)
    console.print(f"{len(rows.judged)} of {len(runs)} rows, {len(fitted_entries(rows))} entries")
    with progress_bar("Fitting") as move, predictor(rows.runs, options.processes, move) as predict:
        calibration, unknowns, found = fit_in_rounds(rows, start, predict, options, console.print)
        seconds = predict([(calibration, range(len(rows.judged)))])[0].tolist()
        columns = {"in sample": [judged_again(one, second) for one, second in zip(rows.judged, seconds, strict=True)]}
        if options.cross_validate:
            without = (rows, calibration, unknowns, found, predict)
            columns["without model"] = cross_validated(*without, lambda run: f"{run.model}", unseen=False)
            columns["without family"] = cross_validated(*without, lambda run: run.family, unseen=True)
    scores = {name: score_families(graded(judged)) for name, judged in columns.items()}
    console.print(moved(start, calibration, unknowns), scores_table(scores, list(scores["in sample"])))
    finish(options, scores, with_origins(calibration, rows, found, f"{options.rows}"), console)


def finish(
    options: argparse.Namespace, scores: dict[str, dict[str, Scores]], calibration: Calibration, console: Console
) -> None:
    """Write what was asked for."""
    if options.json is not None:
        plain = {way: {family: asdict(one) for family, one in found.items()} for way, found in scores.items()}
        options.json.write_text(json.dumps(plain, indent=1) + "\n")
    folder = options.output or (config_folder("calibration") if options.write else None)
    if folder is not None:
        write_calibration(calibration, folder)
        options.state.unlink(missing_ok=True)
        console.print(f"Wrote {folder}")


if __name__ == "__main__":
    calibrate(parsed(), Console(highlight=False))
