"""``galvatron oracle``: forecast how data, spatial, pipeline, filter and channel parallelism scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import plain_table, print_json
from galvatron_lite.errors import InputError
from galvatron_lite.units import format_bytes, format_duration, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from galvatron_lite.oracle.measured import RowCheck
    from galvatron_lite.oracle.rows import Forecast, ForecastRow

_WIDE = 150  # columns of a table
_STRATEGIES = "serial, data, spatial, layer, pipeline, filter, channel, data+filter, data+spatial"


def oracle_command(
    model: str | None = typer.Argument(
        None, help="Model name (resnet50, vgg16, cosmoflow-512), model file or table of layers."
    ),
    cluster: str | None = typer.Option(
        None, "--cluster", help="Cluster name (abci, v100) or YAML file. Not with --check."
    ),
    gpus: str = typer.Option("1..1024", "--gpus", help="Numbers of GPUs: 64, or 4,8,12, or 1..1024 (doubling)."),
    formulas: str = typer.Option(
        "galvatron",
        "--formulas",
        help="Formulas: galvatron (the planner's cost model) or paradl (closed forms of the paper).",
    ),
    strategies: str | None = typer.Option(
        None, "--strategies", help=f"Comma-separated strategies, out of {_STRATEGIES}."
    ),
    strategy: list[str] | None = typer.Option(
        None, "--strategy", help="A strategy, such as 'data8 spatial2x1'. Repeatable."
    ),
    batch: int | None = typer.Option(
        None,
        "--batch",
        help="Samples per replica: a GPU (data), a group (hybrids) or all GPUs (others). Default: from the table of "
        "layers, else 32.",
    ),
    samples: int | None = typer.Option(None, "--samples", help="Samples per epoch."),
    group: int = typer.Option(0, "--group", help="GPUs per group of a hybrid strategy. Default: those of a node."),
    segments: int = typer.Option(0, "--segments", help="Micro-batches of a pipeline. Default: the number of stages."),
    precision: str | None = typer.Option(None, "--precision", help="Compute precision (default formulas only)."),
    image: str | None = typer.Option(None, "--image", help="Image size in pixels: 512x1024."),
    network: str | None = typer.Option(
        None, "--network", help="Link parameters for --formulas paradl: plx-15us or plx-20us."
    ),
    quirk: list[str] | None = typer.Option(
        None, "--quirk", help="Reproduce a deviation of the released oracle (or all), with --formulas paradl."
    ),
    contention: bool = typer.Option(
        True, "--contention/--no-contention", help="Let flows share links, with --formulas paradl."
    ),
    check: bool = typer.Option(False, "--check", help="Compare both formulas with measured epochs."),
    as_json: options.Json = False,
    plot: options.Plot = None,
) -> None:
    """Forecast how a convolutional network scales under each way to split it."""
    if check:
        from galvatron_lite.oracle.measured import check_rows, checks_data, measured_rows

        checks = check_rows(measured_rows())
        if as_json:
            print_json(checks_data(checks))
        else:
            _print_checks(checks)
        return
    from galvatron_lite.oracle.request import OracleOptions, counts_of, forecast
    from galvatron_lite.svg import check_target

    if model is None:
        raise InputError("model", None, "Name one, such as resnet50; or give --check alone.")
    if cluster is None:
        raise InputError("--cluster", None, "Say where the model is to run: abci, v100, or a YAML file.")
    if plot is not None:
        check_target(plot)
    request = OracleOptions(
        counts_of(gpus), formulas, tuple(strategies.replace(" ", "").split(",")) if strategies else (),
        tuple(strategy or ()), batch, samples, group, segments, precision, image, network, tuple(quirk or ()),
        contention,
    )  # fmt: skip
    table = forecast(model, cluster, request)
    if plot is not None:
        from galvatron_lite.files import write_text
        from galvatron_lite.oracle.plot import figure

        write_text(plot, figure(table))
    if as_json:
        from galvatron_lite.oracle.measured import as_data

        print_json(as_data(table))
        return
    _print_table(table)
    _print_findings(table)


def _console() -> Console:
    from rich.console import Console

    return Console(markup=False, highlight=False, soft_wrap=True, width=max(Console().width, _WIDE))


def _print_table(forecast: Forecast) -> None:
    console = _console()
    console.print(f"{forecast.model} on {forecast.cluster}, an epoch of {forecast.samples:,} samples", style="bold")
    console.print(f"Formulas: {forecast.formulas}. Seconds {forecast.origin}")
    for note in forecast.notes:
        console.print(f"Note: {note}.")
    table = plain_table()
    table.add_column("strategy")
    figures = ("compute", "communication", "update", "waiting, host", "epoch", "iteration", "memory")
    for name in ("GPUs", "batch", *figures):
        table.add_column(name, justify="right")
    table.add_column("")
    for line in forecast.lines:
        names = [line.strategy, *[""] * len(line.rows)]
        for row, name in zip(line.complete, names, strict=False):
            table.add_row(name, *_cells(row))
        # One row for each reason why there is no forecast, with all its numbers of GPUs.
        missing = [row for row in line.rows if row.problem]
        for problem in dict.fromkeys(row.problem for row in missing):
            counts = ", ".join(f"{row.devices:,}" for row in missing if row.problem == problem)
            table.add_row("" if line.complete else line.strategy, counts, *[""] * 8, problem)
        table.add_section()
    console.print(table)
    console.print()


def _cells(row: ForecastRow) -> list[str]:
    seconds = (row.compute, row.moved.total, row.update, row.waiting + row.other)
    return [
        f"{row.devices:,}",
        f"{row.batch:,}",
        *("-" if not part else f"{part:,.3g} s" if part < 1000 else f"{part:,.0f} s" for part in seconds),
        format_duration(row.epoch),
        format_seconds(row.iteration),
        format_bytes(row.memory),
        "" if row.fits else f"does not fit {format_bytes(row.capacity)}",
    ]


def _print_findings(forecast: Forecast) -> None:
    from galvatron_lite.oracle.rows import findings, gpus

    typer.echo("Limits (L) and bottlenecks (B)")
    limits = findings(forecast)
    for finding in limits:
        mark = "L" if finding.sort.value == "limitation" else "B"
        typer.echo(f"{mark} {finding.strategy}: {finding.name}: {finding.words}")
    typer.echo("" if limits else "none passes its threshold\n")
    for line in forecast.lines:
        if line.limit.devices is not None:
            typer.echo(f"{line.strategy} scales to {gpus(line.limit.devices)}: {line.limit.reason}")


def _print_checks(checks: tuple[RowCheck, ...]) -> None:
    from galvatron_lite.oracle.measured import FORMULAS, mean_accuracy, rankings, scores, software_notes

    table = plain_table("row", "measured")
    for formulas in FORMULAS:
        table.add_column(formulas, justify="right")
    for check in checks:
        row = check.row
        name = f"{row.origin}: {row.model} {row.strategy.value}, {row.devices:,} GPUs, {row.batch} a replica"
        cells = [_accuracy(check.predicted.get(formulas), check.accuracy(formulas)) for formulas in FORMULAS]
        table.add_row(name, f"{row.seconds:,.4g} s/{row.per}", *cells)
    _console().print(table)
    typer.echo("\nMean accuracy, 1 - |error| / measured")
    for score in scores(checks, lambda row: f"{row.origin}: {row.strategy.value} {row.model}"):
        typer.echo(f"{score.name} ({score.rows}): {_means(score.accuracy)}")
    typer.echo(f"all: {_means({formulas: mean_accuracy(checks, formulas) for formulas in FORMULAS})}\n")
    for name, note in software_notes().items():
        typer.echo(f"{name}: {note}")
    typer.echo()
    groups = rankings(checks)
    for formulas in FORMULAS[:2]:
        wrong = [group for group in groups if not group.right[formulas]]
        right = len(groups) - len(wrong)
        typer.echo(f"{formulas}: strategies in the right order in {right} of {len(groups)} groups")
        for group in wrong:
            predicted = " < ".join(group.predicted[formulas])
            typer.echo(f"  {group.name}: measured {' < '.join(group.measured)}; {predicted}")


def _accuracy(predicted: float | None, accuracy: float | None) -> str:
    return "-" if predicted is None or accuracy is None else f"{predicted:,.4g} ({100 * accuracy:.0f} %)"


def _means(accuracy: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {100 * mean:.1f} %" for name, mean in accuracy.items() if mean is not None)
