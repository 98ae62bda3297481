"""Fit the calibrated constants to published runs, cross-validate them, and write them with their provenance.

Fits start from the priors of configs/calibration/priors. Cross-validation fits anew, from the priors, without the rows
whose scores it gives: without a model, all rows of its name in every family (several models at once, one of a family
where possible); without a family, all its rows and all rows of its stacks, which are then predicted as stacks that were
never seen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
from rich.console import Console

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.calibration.store import KINDS, load_calibration, write_calibration
from galvatron_lite.cli.terminal import progress_bar
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.folders import config_folder
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.validate.results import ScoredRun
from galvatron_lite.validate.rows import PublishedRun, read_runs
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


FINE_TUNING = "lambda-bench"
"""Fine-tuning on consumer devices, whose constants image models calibrate."""


def chosen(runs: Sequence[PublishedRun], families: Collection[str], without: Collection[str]) -> list[PublishedRun]:
    """Language models' runs of grades A and B."""
    language = [run for run in runs if run.seq_len is not None and run.quality in ("A", "B")]
    return [run for run in language if (not families or run.family in families) and run.family not in without]


def parsed(description: str | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="scripts/calibrate", description=description)
    rows = "published runs, a line of JSON each (docs/validate.md) (default: %(default)s)"
    parser.add_argument("--rows", type=Path, default=Path("profiles/published/runs.jsonl"), help=rows)
    priors = "folder of constants before any fit (default: configs/calibration/priors)"
    parser.add_argument("--priors", type=Path, default=None, help=priors)
    parser.add_argument("--families", nargs="*", default=[], help="only these families of runs (default: all)")
    without = f"not these families of runs (default: {FINE_TUNING})"
    parser.add_argument("--without", nargs="*", default=[FINE_TUNING], help=without)
    steps = "steps of a fit at most; it ends before, where none helps (default: %(default)s)"
    parser.add_argument("--steps", type=_positive, default=8, help=steps)
    most = "rows of a family in the fit; of n more the root of n times as many, all being scored (default: %(default)s)"
    parser.add_argument("--most", type=_positive, default=30, help=most)
    processes = "how many predict runs at once (default: %(default)s)"
    parser.add_argument("--processes", type=_positive, default=2, help=processes)
    cross = "also score fits that leave models out, then families (default: score the fit to all rows only)"
    parser.add_argument("--cross-validate", action="store_true", help=cross)
    seen = "with --cross-validate: leave families out once more, keeping their stacks (default: no)"
    parser.add_argument("--seen", action="store_true", help=seen)
    parser.add_argument("--json", type=Path, default=None, help="file to write the scores to (default: none)")
    parser.add_argument("--write", action="store_true", help="replace the package's constants (default: print only)")
    keep = "entries (stacks/mxnet) to leave as they are shipped (default: none)"
    parser.add_argument("--keep", nargs="*", default=[], help=keep)
    output = "existing folder to write the constants to in place of the package's (default: none)"
    parser.add_argument("--output", type=Path, default=None, help=output)
    return parser.parse_args()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used. Give a whole number, 1 or more.")
    return int(text)


def wanted_runs(options: argparse.Namespace) -> list[PublishedRun]:
    """The runs that the options ask for."""
    runs = read_runs(options.rows)
    known = sorted({run.family for run in runs if run.family})
    for option, names in (("--families", options.families), ("--without", {*options.without} - {FINE_TUNING})):
        for name in names:
            if name not in known:
                raise InputError(option, name, f"Families of {options.rows}: {', '.join(known) or 'none'}.")
    found = chosen(runs, options.families, options.without)
    if not found:
        raise InputError("--rows", str(options.rows), "These options leave no language model's run of grade A or B.")
    return found


def check_places(options: argparse.Namespace) -> None:
    """Refuse what could not be written to or kept, before hours of fitting."""
    for option, folder in (("--json", options.json and options.json.parent), ("--output", options.output)):
        if folder is not None and not folder.is_dir():
            raise InputError(option, str(folder), "There is no such folder.")
    shipped = load_calibration()
    known = [f"{kind}/{name}" for kind in KINDS for name in getattr(shipped, kind)] + [*shipped.like]
    for entry in options.keep:
        if entry not in known:
            raise InputError("--keep", entry, f"Entries: {', '.join(known)}.")


if __name__ == "__main__":
    main()
