"""The report of plans: one HTML file with everything in it, which opens without a network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from galvatron_lite import __version__
from galvatron_lite.analysis.report.gather import Shown, check_priced
from galvatron_lite.analysis.report.plan_figures import looks_of
from galvatron_lite.analysis.report.view import ReportView, TableRow, cards_of, view_of
from galvatron_lite.svg import change, percent, signed
from galvatron_lite.units import format_budget, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from jinja2 import Environment


def page(shown: Sequence[Shown]) -> str:
    """The HTML of a report."""
    plans = [check_priced(one).plan for one in shown]
    looks = looks_of(plans)
    views = [view_of(one, number, looks) for number, one in enumerate(shown)]
    environment = _environment()
    source = environment.loader.get_source if environment.loader is not None else None
    assert source is not None
    return environment.get_template("report.html").render(
        title=title_of(views), version=__version__, views=views, looks=list(looks.values()), compared=compared(shown),
        style=source(environment, "report.css")[0], script=source(environment, "report.js")[0],
    )  # fmt: skip


def title_of(views: Sequence[ReportView]) -> str:
    """What the page is called."""
    return views[0].title.partition(":")[0] if len(views) == 1 else f"{len(views)} plans"


def compared(shown: Sequence[Shown]) -> list[TableRow]:
    """The figures of the summary, a column for each plan; none for a single plan."""
    if len(shown) == 1:
        return []
    columns = [cards_of(one) for one in shown]
    rows = [
        TableRow((cards[0].name, *(f"{card.value}\n{card.note}" for card in cards)))
        for cards in zip(*columns, strict=True)
    ]
    return [*rows, *_against(shown)]


def _against(shown: Sequence[Shown]) -> list[TableRow]:
    """Throughput against the first plan's, where all are of one model."""
    rates = [one.plan.prediction.samples_per_second for one in shown if one.plan.prediction is not None]
    if len({one.plan.model for one in shown}) > 1:
        return []
    shares = [change(rate / rates[0] - 1.0) for rate in rates[1:]]
    return [TableRow(("Samples a second against the first", "–", *shares))]


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("galvatron_lite.analysis.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters |= {
        "bytes": format_bytes,
        "budget": format_budget,
        "seconds": format_seconds,
        "count": format_count,
        "percent": percent,
        "change": change,
        "signed_bytes": signed(format_bytes),
        "signed_seconds": signed(format_seconds),
        "capfirst": capitalised,
    }
    return found


def capitalised(words: str) -> str:
    """The same with its first letter in upper case, the others as they are."""
    return words[:1].upper() + words[1:]
