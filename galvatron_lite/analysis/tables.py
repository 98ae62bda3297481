"""Explanations and comparisons as lines and tables, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from galvatron_lite.analysis.explanation import Comparison, Explanation, MemoryPrice, TimeAccount, TimeClass, Trust
from galvatron_lite.units import format_budget, format_bytes, format_count, format_seconds

_UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kinds: str = ""  # one letter for each column: ``n`` for numbers


def signed_seconds(seconds: float) -> str:
    """A difference in seconds with its sign."""
    return "0" if abs(seconds) < 5e-8 else f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def step_line(explanation: Explanation) -> str:
    """Step time and throughput, and the loss against the fastest plan if that is known."""
    rate = format_count(explanation.samples_per_second)
    line = f"{format_seconds(explanation.step_seconds)} a step, {rate} samples/s"
    if explanation.best_step_seconds is None:
        return f"{line}."
    lost = explanation.step_seconds - explanation.best_step_seconds
    if lost <= 1e-6 * explanation.step_seconds:
        return f"{line}: the search finds no faster plan within its budget."
    return f"{line}: {format_seconds(lost)} more than the fastest plan within its budget."


def price_lines(price: MemoryPrice) -> Iterator[str]:
    """What more memory saves, each faster plan on the way there, and what less memory costs."""

    def against(seconds: float) -> str:
        return "as long" if seconds == price.step_seconds else signed_seconds(seconds - price.step_seconds)

    saved = price.step_seconds - price.then_step_seconds
    words = "nothing" if saved <= 0 else f"{format_seconds(saved)} a step"
    if saved > 0 and price.added_bytes != 2**30:
        words += f" ({format_seconds(price.seconds_per_gib)} a GiB)"
    among = ", among plans of this pipeline, micro-batches and schedule" if price.same_shape else ""
    sure = "" if price.proven else f" (not proven: either plan may be {price.gap:.2%} from the fastest)"
    yield (
        f"{format_budget(price.added_bytes)} more on every device saves {words}{among}; "
        f"now {format_seconds(price.step_seconds)} with {format_budget(price.budget_bytes)}{sure}"
    )
    for step in price.steps:
        yield f"from {format_budget(step.budget_bytes, up=True)}: {against(step.step_seconds)}  {step.summary}"
    if price.less_bytes:
        slower = price.less_step_seconds
        yield f"with {format_budget(price.less_bytes)} less: {'no plan fits' if slower is None else against(slower)}"


def tables(explanation: Explanation, most_runs: int | None = None) -> Iterator[Table]:
    """Where the step goes, what each choice gains, runners-up and what-ifs; those that the explanation has.

    Args:
        explanation: of a plan.
        most_runs: show only this many runs of layers, those that take most of the step; None: all.
    """
    if explanation.time is not None:
        note = "; classes of operation shared out by data sheets" * (explanation.time.operations == "shared out")
        title = f"Where the step goes (devices of group {explanation.time.group}, the busiest{note})"
        yield Table(title, ("", "", "", ""), tuple(_time_rows(explanation.time)), " nn")
    if explanation.runs:
        rows = tuple(_run_rows(explanation, most_runs))
        yield Table("What each choice gains (all else equal)", ("", "step", "a device", ""), rows, " nn")
    if explanation.runners_up:
        rows = tuple(
            (
                other.dimension, other.chosen, other.instead, signed_seconds(other.added_step_seconds),
                format_bytes(other.peak_bytes) + ("" if other.fits else ": does not fit"), other.summary,
            )
            for other in explanation.runners_up
        )  # fmt: skip
        quicker = any(other.fits and other.added_step_seconds < 0 for other in explanation.runners_up)
        title = f"Runner-up in each dimension (quick searches, not proven{'; negative: quicker' * quicker})"
        yield Table(title, ("", "here", "instead", "loses", "memory", "plan"), rows, "   nn")
    if explanation.what_ifs:
        yield _what_if_table(explanation)


def _time_rows(time: TimeAccount) -> Iterator[tuple[str, ...]]:
    for what in TimeClass:
        names = [
            f"{part.name} {format_seconds(part.seconds)}"
            + (f" + {format_seconds(part.hidden_seconds)} hidden" if part.hidden_seconds > 0 else "")
            for part in time.parts
            if part.what is what
        ]
        if names:
            seconds = time.seconds_of(what)
            yield what.value, format_seconds(seconds), f"{seconds / time.step_seconds:.1%}", ", ".join(names)


def _run_rows(explanation: Explanation, most: int | None) -> Iterator[tuple[str, ...]]:
    """A row for each run of layers, and one for each of its neighbours."""
    largest = sorted(explanation.runs, key=lambda run: -run.step_seconds * len(run.stages))[:most]
    for run in (run for run in explanation.runs if run in largest):
        layers = run.first if run.layers == 1 else f"{run.first} … {run.last} ({run.layers})"
        first, last, count = run.stages[0], run.stages[-1], len(run.stages)
        where = f"stage {first}" if count == 1 else f"stages {first} … {last} ({count})"
        where = "" if len(explanation.memory) == 1 else where
        yield f"{layers}: {run.strategy}", format_seconds(run.step_seconds), "", where
        for neighbour in run.neighbours:
            size = f"{'+' if neighbour.added_bytes > 0 else ''}{format_bytes(neighbour.added_bytes)}"
            yield (
                f"  {'without ' if neighbour.off else ''}{neighbour.dimension}: {neighbour.strategy}",
                signed_seconds(neighbour.added_step_seconds),
                size if neighbour.added_bytes else "0",
                "" if neighbour.fits else "does not fit",
            )


def _what_if_table(explanation: Explanation) -> Table:
    unproven, rows = any(other.gap for other in explanation.what_ifs), []
    for other in explanation.what_ifs:
        if other.step_seconds is None or other.samples_per_second is None or other.peak_bytes is None:
            rows.append((other.change, *[_UNKNOWN] * (3 + unproven), other.why))
            continue
        more = [f"{other.devices} devices"] * (other.devices != explanation.devices)
        more += [f"batch {other.batch}"] * (other.batch != explanation.batch)
        change = f"{other.change} ({', '.join(more)})" if more else other.change
        rate = format_count(other.samples_per_second) + ("" if other.gain is None else f" ({other.gain:+.1%})")
        gap = "0, proven" if not other.gap else f"{other.gap:.2%}" if other.gap >= 1e-4 else "under 0.01%"
        step, size = format_seconds(other.step_seconds), format_bytes(other.peak_bytes)
        rows.append((change, step, rate, size, *[gap] * unproven, other.summary))
    heads = ("", "step", "samples/s", "memory", *["may be quicker by"] * unproven, "plan")
    return Table("What if (a search for each)", heads, tuple(rows), " nnn" + "n" * unproven)


def trust_lines(trust: Trust) -> Iterator[str]:
    """How accurate the prediction is."""
    spread = f", spread of repetitions {trust.spread:.1%}" if trust.spread else ""
    yield f"layers: {trust.layers}, {trust.layers_source}{spread}"
    residual = "" if trust.links_residual is None else f", fitted lines off by {trust.links_residual:.0%} (median)"
    yield f"links: {trust.communication}, {trust.communication_source}{residual}"
    for constants in trust.constants:
        fit = f"fitted to {constants.rows} published runs, off by {constants.residual:.1%} on them"
        yield f"constants {constants.name}: {fit if constants.rows else 'not fitted'}"
    if trust.error is not None:
        yield f"off by {trust.error:.1%} on average: {trust.error_of}"
    for line in trust.missing:
        yield f"not known: {line}"


def comparison_tables(comparison: Comparison) -> Iterator[Table]:
    """The figures of plans side by side, then the layers that differ."""
    names = tuple(plan.name for plan in comparison.plans)
    yield Table("", ("", *names), tuple(_figure_rows(comparison)))
    rows = tuple(
        (row.first if row.count == 1 else f"{row.first} … {row.last} ({row.count})", *row.strategies)
        for row in comparison.layers
    )
    yield Table("" if rows else "All layers are split alike.", ("layers that differ", *names), rows)


def _figure_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    plans = comparison.plans
    yield ("step", *(format_seconds(plan.step_seconds) for plan in plans))
    yield ("samples/s", *(format_count(plan.samples_per_second) for plan in plans))
    stated = [plan.said_step_seconds for plan in plans]
    if any(file and abs(file / plan.step_seconds - 1.0) > 1e-6 for file, plan in zip(stated, plans, strict=True)):
        yield ("step, as its file says", *(_UNKNOWN if file is None else format_seconds(file) for file in stated))
    for part in plans[0].time:
        if any(plan.time[part] > 0 for plan in plans):
            yield (f"  {part}", *(format_seconds(plan.time[part]) for plan in plans))
    yield ("memory", *(format_bytes(plan.peak_bytes) + ("" if plan.fits else " (does not fit)") for plan in plans))
    for field in fields(plans[0].memory):
        sizes = [int(getattr(plan.memory, field.name)) for plan in plans]
        if any(sizes):
            yield (f"  {field.name}", *map(format_bytes, sizes))
