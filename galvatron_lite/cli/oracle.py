"""``galvatron oracle``: how far data, spatial, pipeline, filter and channel parallelism scale, and what stops them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli.terminal import plain_table, print_json
from galvatron_lite.errors import InputError
from galvatron_lite.units import format_bytes, format_duration, format_seconds

if TYPE_CHECKING:
    from galvatron_lite.oracle.measured import RowCheck
    from galvatron_lite.oracle.rows import Forecast, ForecastRow, StrategyLine

_WIDE = 150  # columns that a table takes; lines are not broken
_WORDS = "serial, data, spatial, layer, pipeline, filter, channel, data+filter, data+spatial"


def oracle_command(
    model: Annotated[
        str | None, typer.Argument(help="Name (resnet50, vgg16, cosmoflow-512), model file or table of layers.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Name (abci, v100) or YAML file; not with --check.")
    ] = None,
    gpus: Annotated[str, typer.Option("--gpus", help="64, or 4,8,12, or 1..1024 (doubling).")] = "1..1024",
    formulas: Annotated[
        str, typer.Option("--formulas", help="galvatron: the planner's cost model; paradl: the paper's closed forms.")
    ] = "galvatron",
    strategies: Annotated[str | None, typer.Option("--strategies", help=f"Some of {_WORDS}, with commas.")] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", help="Any strategy, such as 'data8 spatial2x1'; may be given again."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            help="Samples of a replica: a GPU (data), a group (hybrids), all GPUs (others); those of the model's table "
            "of layers, or 32, if not given.",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="Samples of an epoch.")] = None,
    group: Annotated[int, typer.Option("--group", help="GPUs of a group of a hybrid; a node's if not given.")] = 0,
    segments: Annotated[
        int, typer.Option("--segments", help="Micro-batches of a pipeline; as many as stages if not given.")
    ] = 0,
    precision: Annotated[str | None, typer.Option("--precision", help="Of compute, of the default formulas.")] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Pixels of a picture, of models of the planner: 512x1024.")
    ] = None,
    network: Annotated[
        str | None, typer.Option("--network", help="Setting of the links with --formulas paradl: plx-15us, plx-20us.")
    ] = None,
    quirk: Annotated[
        list[str] | None,
        typer.Option("--quirk", help="What the released oracle does otherwise, with --formulas paradl; or all."),
    ] = None,
    contention: Annotated[
        bool, typer.Option("--contention/--no-contention", help="With --formulas paradl: flows share links.")
    ] = True,
    check: Annotated[bool, typer.Option("--check", help="Hold both formulas against measured epochs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it to this file (SVG).")] = None,
) -> None:
    """Forecast how ways to split a convolutional network scale."""
    if check:
        _check(as_json)
        return
    from galvatron_lite.oracle.request import OracleOptions, counts_of, forecast
    from galvatron_lite.svg import check_target

    if model is None:
        raise InputError("model", None, "Name one, such as resnet50; or give --check alone.")
    if cluster is None:
        raise InputError("--cluster", None, "Say where the model is to run: abci, v100, or a YAML file.")
    if plot is not None:
        check_target(plot)
    options = OracleOptions(
        counts_of(gpus), formulas, tuple(strategies.replace(" ", "").split(",")) if strategies else (),
        tuple(strategy or ()), batch, samples, group, segments, precision, image, network, tuple(quirk or ()),
        contention,
    )  # fmt: skip
    found = forecast(model, cluster, options)
    if plot is not None:
        _draw(found, plot)
    _print(found, as_json)


def _draw(forecast: Forecast, path: Path) -> None:
    from galvatron_lite.files import write_text
    from galvatron_lite.oracle.plot import figure

    write_text(path, figure(forecast))


def _print(forecast: Forecast, as_json: bool) -> None:
    from galvatron_lite.oracle.measured import as_data

    if as_json:
        print_json(as_data(forecast))
        return
    _print_table(forecast)
    _print_findings(forecast)


def _print_table(forecast: Forecast) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, soft_wrap=True, width=max(Console().width, _WIDE))
    console.print(f"{forecast.model} on {forecast.cluster}, an epoch of {forecast.samples:,} samples", style="bold")
    console.print(f"Formulas: {forecast.formulas}. Seconds {forecast.origin}")
    for note in forecast.notes:
        console.print(f"Note: {note}.")
    table = plain_table()
    table.add_column("strategy")
    for name in (
        "GPUs",
        "batch",
        "compute",
        "communication",
        "update",
        "waiting, host",
        "epoch",
        "iteration",
        "memory",
    ):
        table.add_column(name, justify="right")
    table.add_column("")
    for line in forecast.lines:
        for cells in _cells(line):
            table.add_row(*cells)
        table.add_section()
    console.print(table)
    console.print()


def _cells(line: StrategyLine) -> list[list[str]]:
    """Rows of a strategy; those beyond its limit are one line."""
    rows = [_figures(line.strategy if number == 0 else "", row) for number, row in enumerate(line.complete)]
    out = [row for row in line.rows if row.problem]
    for problem in dict.fromkeys(row.problem for row in out):
        counts = ", ".join(f"{row.devices:,}" for row in out if row.problem == problem)
        rows.append(["" if rows else line.strategy, counts, *[""] * 8, problem])
    return rows


def _figures(name: str, row: ForecastRow) -> list[str]:
    waiting = row.waiting + row.other
    return [
        name,
        f"{row.devices:,}",
        f"{row.batch:,}",
        _seconds(row.compute),
        _seconds(row.moved.total),
        _seconds(row.update),
        _seconds(waiting),
        format_duration(row.epoch),
        format_seconds(row.iteration),
        format_bytes(row.memory),
        "" if row.fits else f"does not fit {format_bytes(row.capacity)}",
    ]


def _seconds(value: float) -> str:
    return "-" if value == 0 else f"{value:,.3g} s" if value < 1000 else f"{value:,.0f} s"


def _print_findings(forecast: Forecast) -> None:
    from rich.console import Console

    from galvatron_lite.oracle.rows import findings, gpus

    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print("Limits (L) and bottlenecks (B)", style="bold")
    every = findings(forecast)
    if not every:
        console.print("none passes its threshold")
    for one in every:
        mark = "L" if one.sort.value == "limitation" else "B"
        console.print(f"{mark} {one.strategy}: {one.name}: {one.words}")
    console.print()
    for line in forecast.lines:
        if line.limit.devices is not None:
            console.print(f"{line.strategy} scales to {gpus(line.limit.devices)}: {line.limit.reason}")


def _check(as_json: bool) -> None:
    from galvatron_lite.oracle.measured import check_rows, checks_data, measured_rows

    checks = check_rows(measured_rows())
    if as_json:
        print_json(checks_data(checks))
        return
    _print_checks(checks)


def _print_checks(checks: tuple[RowCheck, ...]) -> None:
    from rich.console import Console

    from galvatron_lite.oracle.measured import FORMULAS, mean_accuracy, rankings, scores, software_notes

    console = Console(markup=False, highlight=False, soft_wrap=True, width=max(Console().width, _WIDE))
    table = plain_table("row", "measured")
    for way in FORMULAS:
        table.add_column(way, justify="right")
    for check in checks:
        row = check.row
        name = f"{row.origin}: {row.model} {row.strategy.value}, {row.devices:,} GPUs, {row.batch} a replica"
        told = [_judged(check.predicted.get(way), check.accuracy(way)) for way in FORMULAS]
        table.add_row(name, f"{row.seconds:,.4g} s/{row.per}", *told)
    console.print(table)
    console.print("\nMean accuracy, 1 - |error| / measured", style="bold")
    groups = scores(checks, lambda row: f"{row.origin}: {row.strategy.value} {row.model}")
    for score in groups:
        console.print(f"{score.name} ({score.rows}): {_means(score.accuracy)}")
    console.print(f"all: {_means({way: mean_accuracy(checks, way) for way in FORMULAS})}\n")
    for name, note in software_notes().items():
        console.print(f"{name}: {note}")
    console.print()
    every = rankings(checks)
    for way in FORMULAS[:2]:
        right = sum(one.right[way] for one in every)
        console.print(f"{way}: strategies in the right order in {right} of {len(every)} groups")
        for one in every:
            if not one.right[way]:
                console.print(f"  {one.name}: measured {' < '.join(one.measured)}; {' < '.join(one.predicted[way])}")


def _judged(predicted: float | None, accuracy: float | None) -> str:
    return "-" if predicted is None or accuracy is None else f"{predicted:,.4g} ({100 * accuracy:.0f} %)"


def _means(accuracy: dict[str, float | None]) -> str:
    return ", ".join(f"{way} {100 * found:.1f} %" for way, found in accuracy.items() if found is not None)
