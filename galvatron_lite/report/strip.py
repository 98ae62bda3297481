"""The model's layers in order, in the look of their strategies, stage by stage. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import LayerRun, Plan
from galvatron_lite.report.looks import Look
from galvatron_lite.report.svg import element, figure, rectangle, text

WIDTH, _HEIGHT, _GAP = 1000.0, 30.0, 4.0
_LETTER, _LABEL = 13.0, 26.0
"""The least width that a letter, or the number of a stage, is written into."""
Part = tuple[str, Sequence[LayerRun]]


def layer_strip(plan: Plan, looks: Mapping[Strategy, Look]) -> Markup:
    """The layers of a plan, first to last; of branches on devices of their own each one behind the other layers."""
    parts = parts_of(plan)
    gap = min(_GAP, WIDTH / (4 * len(parts)))
    layers = sum(run.count for _, runs in parts for run in runs)
    each = (WIDTH - gap * (len(parts) - 1)) / max(layers, 1)
    drawn: list[Markup] = []
    place = 0.0
    for name, runs in parts:
        width = each * sum(run.count for run in runs)
        drawn += _part(name, runs, looks, place, each, width)
        place += width + gap
    label = (
        f"{layers} layers of {plan.model} in {len(parts)} parts, coloured by strategy; the table below says the same."
    )
    return figure(WIDTH, _HEIGHT + 18, label, *drawn, class_="strip")


def parts_of(plan: Plan) -> list[Part]:
    """Stages, then branches, with their names."""
    found: list[Part] = [(str(number), stage.runs) for number, stage in enumerate(plan.stages)]
    return found + [(branch.name, branch.runs) for branch in plan.branches]


def _part(
    name: str, runs: Sequence[LayerRun], looks: Mapping[Strategy, Look], place: float, each: float, whole: float
) -> list[Markup]:
    drawn = []
    if whole >= _LABEL:
        drawn.append(text(place, 11, f"stage {name}" if whole >= 3 * _LABEL and name.isdigit() else name))
    for run in runs:
        drawn += _run(name, run, looks[run.strategy], place, each * run.count)
        place += each * run.count
    return drawn


def _run(name: str, run: LayerRun, look: Look, place: float, width: float) -> list[Markup]:
    """A run of layers, its pattern over it, its letter in the middle."""
    layers = run.first if run.count == 1 else f"{run.first} … {run.last} ({run.count} layers)"
    title = f"{name}: {layers}: {look.letter}, {look.strategy}: {look.words}"
    drawn = [rectangle(place, 18, width, _HEIGHT, f"cell {look.fill}", title)]
    if look.pattern:
        drawn.append(element("rect", x=place, y=18, width=width, height=_HEIGHT, fill=f"url(#{look.pattern})",
                             pointer_events="none"))  # fmt: skip
    if width >= _LETTER * max(len(look.letter), 1):
        drawn.append(
            text(place + width / 2, 18 + _HEIGHT / 2 + 5, look.letter, anchor="middle", class_=f"on-{look.fill}")
        )
    return drawn
