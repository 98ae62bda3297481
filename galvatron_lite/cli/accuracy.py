"""``galvatron validate`` and ``calibrate``: score the cost model against published runs, and correct it by your own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import plain_table, print_json, progress_bar, wide_console
from galvatron_lite.errors import InputError, unknown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from galvatron_lite.validate.calibrate import CalibrationResult
    from galvatron_lite.validate.results import Mean, Scores
    from galvatron_lite.validate.rows import PublishedRun

_GROUPINGS = ("family", "framework", "gpu", "model", "arch", "precision", "quality")


LEGEND = (
    "time %: mean of |predicted / measured - 1| of step times; median: of the same; bias: mean with sign (+: too slow)",
    "memory %, bias: the same of peak memory; over: runs that ran but are predicted not to fit their device",
    "rank: Spearman's correlation of predicted and measured times; in groups: among plans of one model, machine, batch",
    "regret %: by how much the plan predicted fastest in such a group is slower than its best; worst: of any group",
)
"""Explanations of the columns."""

EPILOG = "Columns. " + ". ".join(LEGEND) + ". Exit status: 0, or 1 where nothing is scored or a value is wrong."
POINTER = "What the columns mean: galvatron validate --help"

_COLUMNS = (
    ("time %", "time_mape"), ("median", "time_median"), ("bias", "time_bias"), ("memory %", "memory_mape"),
    ("bias", "memory_bias"), ("rank", "spearman"), ("in groups", "group_spearman"), ("regret %", "regret"),
    ("worst", "regret_max"),
)  # fmt: skip
_CORRELATIONS = ("spearman", "group_spearman")


def validate_command(
    runs: Path | None = typer.Argument(
        None, help="File of published runs, one JSON object a line, or - for standard input. Default: the shipped runs."
    ),
    by: str = typer.Option("family", "--by", help=f"Group scores by {', '.join(_GROUPINGS)}."),
    family: list[str] | None = typer.Option(None, "--family", help="Only runs of this family. Repeatable."),
    quality: str | None = typer.Option(
        None, "--quality", help="Only runs of these grades: A (with A-mem) or AB. C never counts."
    ),
    calibration: Path | None = typer.Option(
        None, "--calibration", help="Folder of calibrated constants to use instead of the shipped ones."
    ),
    worst: int = typer.Option(0, "--worst", min=0, help="Number of worst predictions to show."),
    plot: options.Plot = None,
    skipped: int = typer.Option(3, "--skipped", min=0, help="Number of unscored rows to show, with the reason."),
    transfer: bool = typer.Option(
        False, "--transfer", help="Score `profile transfer` on pairs of runs on two devices."
    ),
    scale_up: bool = typer.Option(
        False, "--scale-up", help="Score runs of 256 GPUs and more, predicted from runs of at most 64."
    ),
    as_json: options.Json = False,
) -> None:
    """Score the cost model against published training runs."""
    from galvatron_lite.calibration.store import load_calibration
    from galvatron_lite.files import write_text
    from galvatron_lite.folders import profile_folder
    from galvatron_lite.svg import check_target
    from galvatron_lite.validate import report
    from galvatron_lite.validate.predict import validate_runs
    from galvatron_lite.validate.results import macros, score_families

    if by not in _GROUPINGS:
        raise unknown("--by", by, _GROUPINGS)
    if plot is not None:
        check_target(plot)

    def key(run: PublishedRun) -> str:
        return str(getattr(run, by) or "not stated")

    runs = runs or profile_folder("published") / "runs.jsonl"
    all_runs, file_notes = report.read_file(runs)
    chosen = _filtered(all_runs, family or [], quality)
    if not chosen:
        raise InputError("runs", str(runs), "It holds no row to score.")
    if scale_up:
        _score_scale_up(chosen, calibration, as_json)
        return
    if transfer:
        _score_transfer(chosen, calibration, as_json)
        return
    with progress_bar("Predicting") as move:

        def progress(done: int, total: int, label: str) -> None:
            if done % 50 == 0 or done == total:  # drawing the bar takes longer than predicting
                move(done, total, label)

        judged = validate_runs(chosen, load_calibration(calibration), progress)
    notes = [*file_notes, *report.implausible(judged)]
    scores, means = score_families(judged, key), macros(judged, key)
    if as_json:
        more = {"unscored": report.unscored(judged), "assumed": report.assumed(judged), "notes": notes}
        print_json(report.as_data(scores, means, judged, worst) | more)
    else:
        print_scores(scores, means, by)
        for line in (*notes, *report.passed_over(judged), *report.unscored_rows(judged, skipped)):
            typer.echo(line)
        for worst_run in report.worst_runs(judged, worst):
            typer.echo("\n".join(("", *report.worst_lines(worst_run))))
    if not any(run.scored for run in judged):
        raise InputError("runs", str(runs), "None of its rows is scored; see why above.")
    if plot is not None:
        if all(run.time is None for run in judged):
            raise InputError("--plot", str(plot), "No step time is scored, so that there is nothing to draw.")
        write_text(plot, report.scatter(judged, key))


def _filtered(runs: tuple[PublishedRun, ...], families: list[str], quality: str | None) -> list[PublishedRun]:
    all_families = list(dict.fromkeys(run.family for run in runs))
    for name in families:
        if name not in all_families:
            raise unknown("--family", name, all_families)
    if quality is not None and (not quality or set(quality.upper()) - set("ABC")):
        raise InputError("--quality", quality, "Give grades: A, B or AB.")
    grades = set((quality or "").upper())
    runs = tuple(run for run in runs if not families or run.family in families)
    return [run for run in runs if not grades or (run.quality or "")[:1] in grades]


def print_scores(scores: Mapping[str, Scores], means: Mapping[str, Mean], by: str) -> None:
    """Print a table of families with the means below, what was not scored, and where the columns are explained."""
    from galvatron_lite.validate.report import unscored_lines

    table = plain_table()
    table.add_column(by, no_wrap=True)
    for title in ("rows", "scored", *(title for title, _ in _COLUMNS), "over"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, family in scores.items():
        figures = [_number(getattr(family, field), field) for _, field in _COLUMNS]
        table.add_row(name, str(family.rows), str(family.scored), *figures, str(family.overflowing or ""))
    table.add_section()
    # The means over a single family repeat its figures.
    for name, mean in means.items() if len(scores) > 1 else ():
        figures = [_number(mean.get(field), field) for _, field in _COLUMNS]
        totals = [str(mean.get(field, 0)) for field in ("rows", "scored")]
        table.add_row(name.replace("_", " "), *totals, *figures, str(mean.get("overflowing", 0)))
    console = wide_console(folded=False)
    console.print(table, "")
    missing = unscored_lines(scores)
    for line in (*missing, *([""] if missing else []), POINTER):
        console.print(line, style="dim")


def _number(value: float | int | None, field: str) -> str:
    """A percentage with one decimal, or a correlation with two; never ``-0.0``."""
    if value is None:
        return ""
    digits = 2 if field in _CORRELATIONS else 1
    return f"{round(value, digits) + 0.0:.{digits}f}"


def _score_transfer(runs: Sequence[PublishedRun], folder: Path | None, as_json: bool) -> None:
    from dataclasses import asdict

    from galvatron_lite.calibration.store import load_calibration
    from galvatron_lite.folders import config_folder
    from galvatron_lite.validate.transfer import pairs_of, score_pairs

    with progress_bar("Carrying") as move:
        pairs = pairs_of(runs, load_calibration(folder or config_folder("calibration") / "priors"), move)
    if not pairs:
        raise InputError("runs", f"{len(runs)} rows", "No two of one model and software are of two types of device.")
    scores = score_pairs(pairs)
    if as_json:
        print_json({"pairs": [asdict(pair) for pair in pairs], "scores": [asdict(score) for score in scores]})
        return
    table = plain_table("pairs of", "pairs", "same batch", "error %", "median", "same batch %", "by peak rates %")
    for score in scores:
        errors = (score.error, score.median, score.same_error, score.peak_error)
        table.add_row(score.name, str(score.pairs), str(score.same), *(_number(error, "") for error in errors))
    wide_console().print(table)
    typer.echo(
        "error: mean of |predicted / measured - 1| of steps there, both ways; same batch: pairs that agree in it, too"
    )


def _score_scale_up(runs: Sequence[PublishedRun], folder: Path | None, as_json: bool) -> None:
    from galvatron_lite.calibration.store import load_calibration
    from galvatron_lite.folders import config_folder
    from galvatron_lite.validate.transfer import LARGE, SMALL, scale_up_scores

    priors = load_calibration(folder or config_folder("calibration") / "priors")
    with progress_bar("Learning", quiet=as_json) as move:
        scores = scale_up_scores(runs, priors, move)
    if not scores:
        raise InputError("runs", f"{len(runs)} rows", f"No family has runs of {SMALL} devices or fewer and of {LARGE}.")
    if as_json:
        names = ("name", "small", "large", "most", "kind", "error", "seen_error", "prior_error", "errors")
        print_json({"scores": [{name: getattr(score, name) for name in names} for score in scores]})
        return
    titles = (f"runs to {SMALL} GPUs", "learnt", f"runs from {LARGE}", "largest", "error %", "same model %", "priors %")
    table = plain_table("family", *titles)
    for score in scores:
        shares = (score.error, score.seen_error, score.prior_error)
        figures = (_number(None if share is None else 100 * share, "") for share in shares)
        table.add_row(score.name, str(score.small), score.kind, str(score.large), f"{score.most:,}", *figures)
    wide_console().print(table)
    mean = sum(score.error for score in scores[:-1]) / (len(scores) - 1)
    typer.echo(f"error: mean of |predicted / measured - 1| of the large runs; mean over families {mean:.1%}")


_UNCHANGED = "Calibration does not help: runs that it did not see are predicted no better. The constants stay."


def calibrate_command(
    runs: list[Path] = typer.Argument(..., help="Files of runs, one JSON object a line, or folders that log= wrote."),
    output: Path = typer.Option(..., "-o", "--output", help="Folder to write the constants to."),
    calibration: options.Calibration = None,
    as_json: options.Json = False,
) -> None:
    """Correct the constants behind estimates with your own runs."""
    from galvatron_lite.calibration.store import load_calibration, write_calibration
    from galvatron_lite.validate.calibrate import calibrate, read_observations

    base = load_calibration(calibration)
    with progress_bar("Calibrating", quiet=as_json) as move:
        steps, skipped = read_observations(runs, base)
        source = f"{len(steps)} runs of {', '.join(path.name for path in runs)}"
        result = calibrate(steps, base, skipped=skipped, source=source, progress=move)
    write_calibration(result.calibration, output)
    if as_json:
        print_json(
            {
                "kind": result.kind, "runs": result.runs, "settings": result.settings, "before": result.before,
                "after": result.after, "left_out": result.left_out, "skipped": result.skipped, "folder": str(output),
                "constants": [
                    {name: getattr(constant, name) for name in ("name", "before", "value", "low", "high", "told")}
                    for constant in result.constants
                ],
            }
        )  # fmt: skip
    else:
        _print_calibration(result, output)


def _print_calibration(result: CalibrationResult, folder: Path) -> None:
    console = wide_console()
    for reason, count in result.skipped.items():
        console.print(f"{count} rows not used: {reason}")
    console.print(f"{result.runs} runs of {result.settings} settings", style="bold")
    table = plain_table("constants", "error on runs left out")
    for kind, error in result.left_out.items():
        table.add_row(kind + (" (taken)" if kind == result.kind else ""), f"{error:.1%}")
    console.print(table)
    if result.constants:
        table = plain_table("constant", "before", "now", "one deviation", "runs tell")
        for constant in result.constants:
            table.add_row(
                constant.name,
                f"{constant.before:.3g}",
                f"{constant.value:.3g}",
                f"{constant.low:.3g} to {constant.high:.3g}",
                f"{constant.told:.0%}",
            )
        console.print(table)
        console.print("runs tell: how much of the uncertainty of a constant the runs took away.", style="dim")
        console.print(f"On these runs themselves the error falls from {result.before:.1%} to {result.after:.1%}.")
    else:
        console.print(_UNCHANGED)
    if result.constants and len(result.models) == 1:
        console.print("All runs are of one model: for plans of others, keep the constants as they were.")
    console.print(f"Written to {folder}.")
