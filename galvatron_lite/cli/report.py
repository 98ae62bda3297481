"""``galvatron report``: write plans as one HTML file, and steps as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import check_folder, print_json
from galvatron_lite.errors import InputError

if TYPE_CHECKING:
    from galvatron_lite.analysis.report.page import PlanView


def report_command(
    plans: list[Path] = typer.Argument(..., help="Plan files. Several are shown side by side."),
    output: Path | None = typer.Option(None, "-o", "--output", help="HTML file to write. Default: report.html."),
    trace: Path | None = typer.Option(
        None, "--trace", help="Also write the steps as Trace Event JSON, for ui.perfetto.dev."
    ),
    run: Path | None = typer.Option(
        None, "--run", help="Folder of a training run, to show measured beside predicted times."
    ),
    search: float = typer.Option(
        30.0,
        "--search",
        min=0,
        max=1e6,
        help="Seconds of search per plan for the memory-time front and the cost of each choice. 0: none.",
    ),
    profile: options.Profile = None,
    model: options.Model = None,
    cluster: options.Cluster = None,
    gpus: options.Gpus = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    precision: options.Precision = None,
    trainable: options.Trainable = None,
    freeze: options.Freeze = None,
    mem: options.Memory = None,
    as_json: options.Json = False,
) -> None:
    """Write an HTML report of plans.

    Shows layers, the timeline of a step, memory, devices and other plans. Opens offline.
    """
    setup = options.arguments(locals())
    from galvatron_lite.analysis.report.page import PlanView, check_priced, with_answers, with_run, with_timeline
    from galvatron_lite.api_plans import read_priced
    from galvatron_lite.request import PlanRequest
    from galvatron_lite.runs.schema import read_run

    check_folder("-o", output)
    check_folder("--trace", trace)
    request = PlanRequest.parse(profile, setup)
    budget = None if mem is None else request.mem
    measured = None if run is None else read_run(run)
    views = [with_timeline(check_priced(PlanView(path.name, *read_priced(path, request, budget)))) for path in plans]
    if search > 0 and (trace is None or output is not None):
        views = [with_answers(view, search) for view in views]
    if measured is not None:
        views = [with_run(view, measured) for view in views]
    _print(views, _write(views, output, trace), as_json)


def _write(views: list[PlanView], output: Path | None, trace: Path | None) -> list[Path]:
    """Write the files and return their paths. A trace without an output is written alone."""
    from galvatron_lite.analysis.report.page import page
    from galvatron_lite.analysis.report.timeline_data import write_trace
    from galvatron_lite.files import write_text

    written = []
    if trace is not None:
        steps = [(view.name, view.timeline) for view in views if view.timeline is not None]
        if not steps:
            raise InputError("--trace", trace, " ".join(views[0].missing))
        write_trace(trace, steps)
        written.append(trace)
    if trace is None or output is not None:
        path = output or Path("report.html")
        write_text(path, page(views))
        written.append(path)
    return written


def _print(views: list[PlanView], written: list[Path], as_json: bool) -> None:
    if as_json:
        files = [{"file": str(path), "bytes": path.stat().st_size} for path in written]
        notes = [{"plan": view.name, "not_shown": list(view.missing)} for view in views]
        print_json({"written": files, "plans": notes})
        return
    for view in views:
        for line in view.missing:
            typer.echo(f"{view.name}: {line}")
    for path in written:
        typer.echo(f"Written to {path} ({path.stat().st_size / 1000:,.0f} kB).")
