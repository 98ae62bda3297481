"""Figures of memory against step time, and of a measured run beside its prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import mean, median

from markupsafe import Markup

from galvatron_lite.plans.schema import Plan, Prediction
from galvatron_lite.runs.schema import RecordedRun, StepRecord
from galvatron_lite.svg import Frame, byte_marks, byte_words, element, figure, marks, path, percent, second_words, text
from galvatron_lite.units import format_bytes, format_count, format_seconds

WIDTH, HEIGHT, MARGINS = 640.0, 330.0, (76.0, 20.0, 16.0, 46.0)
_MOST_MEMORY, _MOST_SECONDS = 1.6, 2.5
"""Factors on the budget and on the plan's step time beyond which runners-up are not drawn."""
RUN_WIDTH, RUN_HEIGHT, RUN_MARGINS = 640.0, 220.0, (70.0, 14.0, 14.0, 30.0)
_MOST_POINTS = 400
_WARM_UP = 3  # first steps that are left out, if there are more than twice as many
_TIME_ERRORS, _ERRORS = ("too long", "too short"), ("too high", "too low")
_PART_NAMES = {
    "gradients": "gradients: sums over ranks", "check": "check: loss and gradient norm of all ranks",
    "waiting": "waiting for other stages", "other": "in none of these",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlanMark:
    """A plan in the figure."""

    memory: int  # bytes on its fullest device
    seconds: float  # of a step
    kind: str  # ``plan``, ``front``, ``other`` (a runner-up that fits) or ``overfull``
    words: str  # for its title, and for the table


def front_figure(plans: Sequence[PlanMark], budget: int) -> Markup:
    """Draw step time against memory; ``budget``: bytes a device, 0 if not known."""
    chosen = next(mark for mark in plans if mark.kind == "plan")
    most_memory, most_seconds = _MOST_MEMORY * max(budget, chosen.memory), _MOST_SECONDS * chosen.seconds
    near = [
        mark for mark in plans
        if mark.kind in ("plan", "front") or (mark.memory <= most_memory and mark.seconds <= most_seconds)
    ]  # fmt: skip
    quick, slow = _range([mark.seconds for mark in near])
    most = 1.1 * max(budget, *(mark.memory for mark in near))
    frame = Frame(WIDTH, HEIGHT, MARGINS, most, slow, y_start=quick)
    front = sorted((mark for mark in near if mark.kind in ("front", "plan")), key=lambda mark: -mark.memory)
    line = [frame.at(mark.memory, mark.seconds) for mark in front]
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
    """The ends of the axis of seconds: it begins at 0 if step times differ by a factor of 2 or more."""
    least, most = min(seconds), max(seconds)
    if least < most / 2:
        return 0.0, 1.12 * most
    room = max(most - least, 0.05 * most)
    return max(least - 0.35 * room, 0.0), most + 0.2 * room


def _mark(mark: PlanMark, x: float, y: float) -> Markup:
    """A square for the plan, a cross for plans that do not fit, a circle for others."""
    title = element("title", f"{mark.words}: {format_seconds(mark.seconds)}, {format_bytes(mark.memory)}")
    if mark.kind == "overfull":
        return element("path", title, d=f"M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8", class_="mark-overfull")
    if mark.kind == "plan":
        return element("rect", title, x=x - 7, y=y - 7, width=14.0, height=14.0, class_="mark-plan")
    return element("circle", title, cx=x, cy=y, r=4.0, class_=f"mark-{mark.kind}")


def _stairs(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """A staircase through the points: each plan is the fastest down to the memory of the next."""
    stairs = points[:1]
    for (_, above), (x, y) in pairwise(points):
        stairs += [(x, above), (x, y)]
    return stairs


Row = tuple[str, str, str, str]
"""A name, the measured and the predicted value, and the error of the prediction, as a share of the measured value."""


@dataclass(frozen=True, slots=True)
class RunMeasurement:
    """A measured run beside its prediction."""

    words: str  # which steps were measured
    rows: tuple[Row, ...]
    picture: Markup  # of step times
    parts: tuple[Row, ...]  # the parts of a step


def measured(run: RecordedRun, plan: Plan) -> RunMeasurement | None:
    """Compare a run under its last plan with the prediction of a plan; None if the run has no steps."""
    plain = [step for step in run.plan_steps if not step.profiled]
    steps = plain[_WARM_UP:] if len(plain) > 2 * _WARM_UP else plain
    prediction = plan.prediction
    if not steps or prediction is None:
        return None
    words = (
        f"{len(steps)} steps, {steps[0].step} to {steps[-1].step}, under the plan that was last in force, of run "
        f"{run.folder.name}. Medians; the first steps and those that were profiled are left out."
    )
    rows = tuple(_rows(run, prediction, steps))
    return RunMeasurement(words, rows, _picture(steps, prediction.step_seconds), tuple(_part_rows(run, prediction)))


def _rows(run: RecordedRun, prediction: Prediction, steps: Sequence[StepRecord]) -> list[Row]:
    seconds = median(step.seconds for step in steps)
    rate = median(step.samples / step.seconds for step in steps if step.seconds)
    tokens = median(step.tokens / step.seconds for step in steps if step.seconds)
    memory = max((record.memory for records in run.ranks for record in records), default=0)
    memory = memory or max(step.memory for step in steps)
    mfu = prediction.mfu * prediction.step_seconds / seconds
    rows = [
        _row("step time", seconds, prediction.step_seconds, format_seconds, _TIME_ERRORS),
        _row("samples a second", rate, prediction.samples_per_second, format_count),
        _row("tokens a second", tokens, prediction.tokens_per_second, format_count),
        _row("MFU", mfu, prediction.mfu, lambda value: f"{100 * value:.1f} %"),
    ]
    if memory:
        rows.append(_row("peak memory of a device", memory, prediction.peak_memory, format_bytes))
    return rows


def _row(
    name: str,
    measured: float,
    predicted: float | None,
    write: Callable[[float], str],
    errors: tuple[str, str] = _ERRORS,
) -> Row:
    error = ""
    if predicted and measured:
        share = predicted / measured - 1.0
        error = f"{percent(abs(share))} {errors[share < 0]}"
    return name, write(measured), "" if predicted is None else write(predicted), error


def _part_rows(run: RecordedRun, prediction: Prediction) -> list[Row]:
    """The parts of a step, mean over the last records of all ranks, and predicted as far as they can be compared."""
    last = [records[-1] for records in run.ranks if records and records[-1].parts]
    time = prediction.time
    predicted = {
        "forward": time.forward, "backward": time.backward + time.recompute, "waiting": time.pipeline,
        "optimizer": time.optimizer,
    }  # fmt: skip
    rows = []
    for part in sorted({part for record in last for part in record.parts}):
        seconds = mean(record.parts.get(part, 0.0) for record in last)
        name = _PART_NAMES.get(part.value, part.value)
        rows.append(_row(name, seconds, predicted.get(part.value), format_seconds, _TIME_ERRORS))
    return rows


def _picture(steps: Sequence[StepRecord], predicted: float) -> Markup:
    """Draw step times, averaged so that there are not too many points."""
    size = -(-len(steps) // _MOST_POINTS)
    windows = [steps[start : start + size] for start in range(0, len(steps), size)]
    points = [(mean(step.step for step in window), mean(step.seconds for step in window)) for window in windows]
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
    label = f"Seconds of {len(steps)} steps, beside the predicted {predicted:.3g} s."
    return figure(RUN_WIDTH, RUN_HEIGHT, label, *drawn)
