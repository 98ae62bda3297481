"""Options of scripts/calibrate, and what is refused before anything is fitted."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path

from galvatron_lite.calibration.store import KINDS, load_calibration
from galvatron_lite.errors import InputError
from galvatron_lite.validate.rows import PublishedRun, read_runs

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
