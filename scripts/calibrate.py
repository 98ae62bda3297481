"""Fit the calibrated constants to published runs, cross-validate them, and write them with their provenance.

Fits start from the priors of configs/calibration/priors. Cross-validation fits anew, from the priors, without the rows
whose scores it gives: without a model, all rows of its name in every family (several models at once, one of a family
where possible); without a family, all its rows and all rows of its stacks, which are then predicted as stacks that were
never seen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

import numpy as np
from rich.console import Console

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.calibration.store import load_calibration, write_calibration
from galvatron_lite.cli.terminal import progress_bar
from galvatron_lite.errors import GalvatronError
from galvatron_lite.folders import config_folder
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.validate.results import ScoredRun
from studies.calibration.options import check_places, parsed, wanted_runs
from studies.calibration.report import (
    changes_table,
    expected_error,
    families_of_grade_a,
    scores_file,
    scores_table,
    with_origins,
)
from studies.calibration.rows import Fold, Rows, Workers, judged_again, model_folds, model_of, rows_of, workers
from studies.calibration.stages import Mask, Setup, Staged, calibrated, setup_of

MODEL_FOLDS = 12  # fits that leave models out


def folds_by_model(rows: Rows) -> list[Fold]:
    """Rows left out by their models' names."""
    names = np.array([model_of(run) for run in rows.runs])
    masks = [np.isin(names, models) for models in model_folds(rows.runs, MODEL_FOLDS)]
    return [Fold(tuple(np.flatnonzero(mask).tolist()), mask, unseen=False) for mask in masks]


def folds_by_family(rows: Rows, seen: bool) -> list[Fold]:
    """Rows left out by their family (of those with rows of grade A), and with it all rows of its stacks; or the family
    alone, its stacks being known where other families have them."""
    families = np.array([run.family for run in rows.runs])
    best = families_of_grade_a(rows.judged)
    stacks = np.array([match_stack(run.framework).name for run in rows.runs])
    folds = []
    for family in (name for name in dict.fromkeys(families.tolist()) if name in best):
        own = families == family
        same: Mask = np.isin(stacks, stacks[own])
        if not seen or bool((same & ~own).any()):
            folds.append(Fold(tuple(np.flatnonzero(own).tolist()), own if seen else same, unseen=not seen))
    return folds


def cross_validated(
    rows: Rows, folds: Sequence[Fold], setup: Setup, whole: Staged, machine: Workers
) -> list[ScoredRun]:
    """Every row of the folds, predicted by the fit that leaves it out."""
    judged = []
    for fold, seconds in zip(folds, machine.folds(folds, rows.problem, setup, whole), strict=True):
        judged += [judged_again(rows.judged[row], second) for row, second in zip(fold.rows, seconds, strict=True)]
    return judged


def calibrate(options: argparse.Namespace, console: Console) -> None:
    """Fit, cross-validate, print and write."""
    priors = load_calibration(options.priors or config_folder("calibration") / "priors")
    runs = wanted_runs(options)
    check_places(options)
    with progress_bar("Predicting") as move:
        rows = rows_of(runs, priors, options.most, move)
    setup = setup_of(rows.problem, priors)
    begun = monotonic()

    def say(text: str) -> None:
        console.print(f"{monotonic() - begun:5.0f} s  {text}")

    console.print(
        f"{len(rows.judged)} of {len(runs)} rows scored, {len(rows.problem.fitted)} fitted to; "
        f"{len(setup.common.parameters)} common constants, {len(setup.own)} of stacks"
    )
    with progress_bar("Fitting") as move, workers(rows.runs, options.processes, move) as machine:
        whole = calibrated(rows.problem, setup, machine.predict, steps=options.steps, report=say)
        seconds = machine.predict([(whole.calibration, range(len(rows.judged)))])[0].tolist()
        ways = {"in sample": [judged_again(one, second) for one, second in zip(rows.judged, seconds, strict=True)]}
        if options.cross_validate:
            fitted = (setup, whole, machine)
            say("leaving models out")
            ways["without model"] = cross_validated(rows, folds_by_model(rows), *fitted)
            say("leaving families out")
            ways["without family"] = cross_validated(rows, folds_by_family(rows, seen=False), *fitted)
            if options.seen:
                say("leaving families out, whose stacks others have")
                ways["without family, stack seen"] = cross_validated(rows, folds_by_family(rows, seen=True), *fitted)
    console.print(changes_table(setup, whole), scores_table(ways))
    finish(options, ways, with_origins(whole, setup, rows, options.rows, options.keep), console)


def finish(options: argparse.Namespace, ways: dict[str, list[ScoredRun]], made: Calibration, console: Console) -> None:
    """Write what was asked for."""
    if options.json is not None:
        scores_file(ways, options.json)
        console.print(f"Wrote {options.json}")
    folder = options.output or (config_folder("calibration") if options.write else None)
    if folder is not None:
        write_calibration(replace(made, expected_error=expected_error(ways)), folder)
        console.print(f"Wrote {folder}")


def main() -> None:
    """Calibrate; errors of ours end in one line and exit status 1."""
    try:
        calibrate(parsed(__doc__), Console(highlight=False))
    except (GalvatronError, OSError) as error:
        sys.exit(f"calibrate: {error}")


if __name__ == "__main__":
    main()
