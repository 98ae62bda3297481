"""``galvatron validate``: the cost model held against published training runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from galvatron_lite.validate.rows import PublishedRun

_GROUPINGS = ("family", "framework", "gpu", "model", "arch", "precision", "quality")


def validate_command(
    runs: Annotated[Path, typer.Argument(help="Published runs, one JSON object a line.")],
    by: Annotated[str, typer.Option("--by", help=f"Score by: {', '.join(_GROUPINGS)}.")] = "family",
    family: Annotated[
        list[str] | None, typer.Option("--family", help="Only runs of this family; may be given again.")
    ] = None,
    quality: Annotated[
        str | None, typer.Option("--quality", help="Only these grades: A, or AB; A brings A-mem. C never counts.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", help="Folder of calibrated constants in place of the shipped one.")
    ] = None,
    worst: Annotated[int, typer.Option("--worst", min=0, help="Show so many runs predicted worst.")] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw predicted against measured step times (SVG).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Predict every published run with the planner's cost model and say how far off it is."""
    from galvatron_lite.calibration.store import load_calibration
    from galvatron_lite.cli.progress import progress_bar
    from galvatron_lite.validate.rows import read_runs
    from galvatron_lite.validate.run import validate_runs
    from galvatron_lite.validate.scores import macros, score_families

    key = _grouping(by)
    chosen = _chosen(read_runs(runs), family or [], quality)
    with progress_bar("Predicting") as move:
        judged = validate_runs(chosen, load_calibration(calibration), _sparing(move))
    scores = score_families(judged, key)
    if plot is not None:
        from galvatron_lite.files import write_text
        from galvatron_lite.validate.plot import scatter

        write_text(plot, scatter(judged, key))
    if as_json:
        from galvatron_lite.validate.report import as_data

        _print_json(as_data(scores, macros(judged, key), judged, worst))
    else:
        from galvatron_lite.validate.report import print_scores, print_worst

        print_scores(scores, macros(judged, key), by)
        print_worst(judged, worst)


def _grouping(by: str) -> Callable[[PublishedRun], str]:
    from galvatron_lite.errors import InputError

    if by not in _GROUPINGS:
        raise InputError("--by", by, f"Choose one of {', '.join(_GROUPINGS)}.")
    return lambda run: str(getattr(run, by) or "not stated")


def _chosen(every: tuple[PublishedRun, ...], families: list[str], quality: str | None) -> list[PublishedRun]:
    """The runs asked for.

    Raises:
        InputError: a family that the file does not hold, or an unknown grade.
    """
    from galvatron_lite.errors import InputError

    known = list(dict.fromkeys(run.family for run in every))
    for name in families:
        if name not in known:
            raise InputError("--family", name, f"The file holds {', '.join(known)}.")
    if quality is not None and (not quality or set(quality.upper()) - set("ABC")):
        raise InputError("--quality", quality, "Give grades: A, B or AB.")
    grades = set((quality or "").upper())
    return [
        run
        for run in every
        if (not families or run.family in families) and (not grades or (run.quality or "")[:1] in grades)
    ]


def _sparing(move: Callable[[int, int, str], None]) -> Callable[[int, int, str], None]:
    """Moves the bar now and then: drawing costs more than predicting."""

    def progress(done: int, total: int, label: str) -> None:
        if done % 50 == 0 or done == total:
            move(done, total, label)

    return progress


def _print_json(data: object) -> None:
    import json

    typer.echo(json.dumps(data))
