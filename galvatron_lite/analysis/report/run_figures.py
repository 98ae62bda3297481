"""Figures of memory against step time, and of what a run measured beside what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import mean, median

from markupsafe import Markup

from galvatron_lite.plans.schema import Plan
from galvatron_lite.runs.schema import RecordedRun, StepRecord
from galvatron_lite.svg import Frame, byte_marks, byte_words, element, figure, marks, path, percent, second_words, text
from galvatron_lite.units import format_bytes, format_count, format_seconds

WIDTH, HEIGHT, MARGINS = 640.0, 330.0, (76.0, 20.0, 16.0, 46.0)
_FAR = 1.6, 2.5
"""Factors on the budget and on the plan's step time beyond which others are left to the table."""
_SIZES = {"front": 4.0, "plan": 7.0, "other": 4.0, "overfull": 4.0}


@dataclass(frozen=True, slots=True)
class PlanMark:
    """A plan in the figure."""

    memory: int  # bytes on its fullest device
    seconds: float  # of a step
    kind: str  # ``plan``, ``front``, ``other`` (a runner-up that fits) or ``overfull``
    words: str  # told where the reader points at it, and in the table


def front_figure(shown: Sequence[PlanMark], budget: int) -> Markup:
    """The figure; marks far beyond the others are left to the table."""
    plan = next(mark for mark in shown if mark.kind == "plan")
    far, slowest = _FAR[0] * max(budget, plan.memory), _FAR[1] * plan.seconds
    near = [
        mark for mark in shown
        if mark.kind in ("plan", "front") or (mark.memory <= far and mark.seconds <= slowest)
    ]  # fmt: skip
    quick, slow = _range([mark.seconds for mark in near])
    most = 1.1 * max(budget, *(mark.memory for mark in near))
    frame = Frame(WIDTH, HEIGHT, MARGINS, most, slow, y_start=quick)
    line = [frame.at(mark.memory, mark.seconds) for mark in sorted(near, key=lambda mark: -mark.memory)
            if mark.kind in ("front", "plan")]  # fmt: skip
    drawn = [element("path", d=path(_stairs(line)), class_="front-line")] if len(line) > 1 else []
    if budget:
        (x, low), (_, top) = frame.at(budget, quick), frame.at(budget, slow)
        drawn += [element("path", d=f"M{x:.1f} {top}V{low}", class_="limit"),
                  text(x - 5, top + 10, "budget", anchor="end", class_="limit-word")]  # fmt: skip
    order = sorted(near, key=lambda mark: mark.kind == "plan")
    drawn += [_mark(mark, *frame.at(mark.memory, mark.seconds)) for mark in order]
    label = f"Step time against memory of {len(near)} plans; the table beside it says the same."
    sizes, unit = byte_marks(most, 5), marks(slow - quick, 5)[1]
    seconds = [unit * number for number in range(ceil(quick / unit - 1e-9), int(slow / unit) + 1)]
    left, right = MARGINS[:2]
    middle = left + (WIDTH - left - right) / 2
    words = [text(middle, HEIGHT - 8, "memory of the fullest device", anchor="middle", class_="axis-word"),
             text(left, 10, "step time", anchor="end", class_="axis-word")]  # fmt: skip
    axes = [*frame.below(sizes, byte_words(sizes)), *frame.horizontal(seconds, second_words(seconds))]
    return figure(WIDTH, HEIGHT, label, *axes, *words, *drawn)


def _range(seconds: Sequence[float]) -> tuple[float, float]:
    """Where the axis of seconds begins and ends: at 0 where plans take very unlike times."""
    least, most = min(seconds), max(seconds)
    if least < most / 2:
        return 0.0, 1.12 * most
    room = max(most - least, 0.05 * most)
    return max(least - 0.35 * room, 0.0), most + 0.2 * room


def _mark(mark: PlanMark, x: float, y: float) -> Markup:
    """Round for plans that fit, a ring for runners-up, a cross for what does not fit, a square for the plan."""
    title = element("title", f"{mark.words}: {format_seconds(mark.seconds)}, {format_bytes(mark.memory)}")
    size = _SIZES[mark.kind]
    if mark.kind == "overfull":
        return element("path", title, d=f"M{x - size:.1f} {y - size:.1f}l8 8m0-8l-8 8", class_="mark-overfull")
    if mark.kind == "plan":
        return element("rect", title, x=x - size, y=y - size, width=2 * size, height=2 * size, class_="mark-plan")
    return element("circle", title, cx=x, cy=y, r=size, class_=f"mark-{mark.kind}")


def _stairs(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """From each plan to the next with less memory: it is the fastest down to there."""
    stairs = points[:1]
    for (_, above), (x, y) in pairwise(points):
        stairs += [(x, above), (x, y)]
    return stairs


RUN_WIDTH, RUN_HEIGHT, RUN_MARGINS = 640.0, 220.0, (70.0, 14.0, 14.0, 30.0)
_POINTS = 400
_LENGTH, _SIZE = ("too long", "too short"), ("too high", "too low")
_PARTS = {
    "gradients": "gradients: sums over ranks", "check": "check: loss and gradient norm of all ranks",
    "waiting": "waiting for other stages", "other": "in none of these",
}  # fmt: skip
"""Parts of a step whose names do not say what they are."""
_WARM = 3  # steps at the beginning that are not counted where there are more than twice as many


_Beside = tuple[str, str, str, str]
"""A figure, measured and predicted in words, and how far the prediction is off, as a share of what was measured."""


@dataclass(frozen=True, slots=True)
class RunMeasurement:
    """What a run measured."""

    words: str  # of which steps it is
    rows: tuple[_Beside, ...]  # figures
    picture: Markup  # step times
    parts: tuple[_Beside, ...]  # where the time went, by rank: name and words


def measured(run: RecordedRun, plan: Plan) -> RunMeasurement | None:
    """What a run measured under its last plan; None where it has no steps."""
    plain = [step for step in run.plan_steps if not step.profiled]
    steps = plain[_WARM:] if len(plain) > 2 * _WARM else plain
    if not steps or plan.prediction is None:
        return None
    words = (
        f"{len(steps)} steps, {steps[0].step} to {steps[-1].step}, under the plan that was last in force, of run "
        f"{run.folder.name}. Medians; the first steps and those that were profiled are left out."
    )
    return RunMeasurement(
        words, tuple(_rows(run, plan, steps)), _picture(steps, plan.prediction.step_seconds), _parts(run, plan)
    )


def _rows(run: RecordedRun, plan: Plan, steps: Sequence[StepRecord]) -> list[_Beside]:
    assert plan.prediction is not None
    seconds = median(step.seconds for step in steps)
    rate = median(step.samples / step.seconds for step in steps if step.seconds)
    tokens = median(step.tokens / step.seconds for step in steps if step.seconds)
    memory = max((record.memory for records in run.ranks for record in records), default=0)
    memory = memory or max(step.memory for step in steps)
    prediction = plan.prediction
    rows = [
        _beside("step time", seconds, prediction.step_seconds, format_seconds, _LENGTH),
        _beside("samples a second", rate, prediction.samples_per_second, format_count),
        _beside("tokens a second", tokens, prediction.tokens_per_second, format_count),
        _beside(
            "MFU",
            prediction.mfu * prediction.step_seconds / seconds,
            prediction.mfu,
            lambda value: f"{100 * value:.1f} %",
        ),
    ]
    if memory:
        rows.append(_beside("peak memory of a device", memory, prediction.peak_memory, format_bytes))
    return rows


def _beside(
    name: str, measured: float, predicted: float, write: Callable[[float], str], sides: tuple[str, str] = _SIZE
) -> _Beside:
    return name, write(measured), write(predicted), _off(predicted, measured, sides)


def _off(predicted: float, measured: float, sides: tuple[str, str]) -> str:
    """In words: of a rate and of a time the same error has unlike signs."""
    if not predicted or not measured:
        return ""
    share = predicted / measured - 1.0
    return f"{percent(abs(share))} {sides[share < 0]}"


def _parts(run: RecordedRun, plan: Plan) -> tuple[_Beside, ...]:
    """Where the time went on the rank that waited least, beside the parts of the prediction it can be held against."""
    last = [records[-1] for records in run.ranks if records and records[-1].parts]
    if not last or plan.prediction is None:
        return ()
    names = sorted({part for record in last for part in record.parts})
    time = plan.prediction.time
    predicted = {
        "forward": time.forward, "backward": time.backward + time.recompute, "waiting": time.pipeline,
        "optimizer": time.optimizer,
    }  # fmt: skip
    rows = []
    for name in names:
        found = mean(record.parts.get(name, 0.0) for record in last)
        expected = predicted.get(name.value)
        rows.append(
            (_PARTS.get(name.value, name.value), format_seconds(found),
             "" if expected is None else format_seconds(expected), _off(expected or 0.0, found, _LENGTH))
        )  # fmt: skip
    return tuple(rows)


def _picture(steps: Sequence[StepRecord], predicted: float) -> Markup:
    every = -(-len(steps) // _POINTS)
    means = [steps[at : at + every] for at in range(0, len(steps), every)]
    points = [(mean(step.step for step in window), mean(step.seconds for step in window)) for window in means]
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1.0)
    top = 1.15 * max(predicted, *(seconds for _, seconds in points))
    frame = Frame(RUN_WIDTH, RUN_HEIGHT, RUN_MARGINS, last, top, x_start=first)
    values = marks(top, 4)
    drawn = [
        *frame.horizontal(values, second_words(values)),
        *frame.limit(predicted, "predicted"),
        element("path", d=path([frame.at(step, seconds) for step, seconds in points]), class_="measured-line"),
        *frame.below([first, last], [f"step {steps[0].step}", f"step {steps[-1].step}"]),
    ]
    return figure(
        RUN_WIDTH, RUN_HEIGHT, f"Seconds of {len(steps)} steps, beside the predicted {predicted:.3g} s.", *drawn
    )
