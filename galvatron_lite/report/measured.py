"""What a run measured, beside what was predicted. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from markupsafe import Markup

from galvatron_lite.plans.schema import Plan
from galvatron_lite.report.scales import marks, percent, second_words
from galvatron_lite.report.svg import element, figure, path, text
from galvatron_lite.runs.read import Run
from galvatron_lite.runs.schema import StepRecord
from galvatron_lite.units import format_bytes, format_count, format_seconds

WIDTH, HEIGHT = 640.0, 220.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 14.0, 14.0, 30.0
_POINTS = 400
_LENGTH, _SIZE = ("too long", "too short"), ("too high", "too low")
_PARTS = {
    "gradients": "gradients: sums over ranks", "check": "check: loss and gradient norm of all ranks",
    "waiting": "waiting for other stages", "other": "in none of these",
}  # fmt: skip
"""Parts of a step whose names do not say what they are."""
_WARM = 3
"""Steps at the beginning that are not counted where there are more than twice as many."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A figure, measured and predicted.

    Attributes:
        name: of what.
        measured, predicted: in words.
        off: how far the prediction is from what was measured, as a share of that, and to which side; empty where one
            is not known.
    """

    name: str
    measured: str
    predicted: str
    off: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run measured.

    Attributes:
        words: of which steps it is.
        rows: figures.
        picture: step times.
        parts: where the time went, by rank: name and words.
    """

    words: str
    rows: tuple[Beside, ...]
    picture: Markup
    parts: tuple[Beside, ...]


def measured(run: Run, plan: Plan) -> Measured | None:
    """What a run measured under its last plan; None where it has no steps.

    Args:
        run: of training.
        plan: with its prediction.
    """
    steps = counted(run.own_steps)
    if not steps or plan.prediction is None:
        return None
    words = (
        f"{len(steps)} steps, {steps[0].step} to {steps[-1].step}, under the plan that was last in force, of run "
        f"{run.folder.name}. Medians; the first steps and those that were profiled are left out."
    )
    return Measured(
        words, tuple(_rows(run, plan, steps)), _picture(steps, plan.prediction.step_seconds), _parts(run, plan)
    )


def counted(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Steps that were not profiled, without the first ones where there are enough."""
    plain = [step for step in steps if not step.profiled]
    return plain[_WARM:] if len(plain) > 2 * _WARM else plain


def _rows(run: Run, plan: Plan, steps: Sequence[StepRecord]) -> list[Beside]:
    assert plan.prediction is not None
    seconds = median(step.seconds for step in steps)
    rate = median(step.samples / step.seconds for step in steps if step.seconds)
    tokens = median(step.tokens / step.seconds for step in steps if step.seconds)
    memory = max((record.memory for records in run.ranks for record in records), default=0)
    memory = memory or max(step.memory for step in steps)
    said = plan.prediction
    rows = [
        _beside("step time", seconds, said.step_seconds, format_seconds, _LENGTH),
        _beside("samples a second", rate, said.samples_per_second, format_count),
        _beside("tokens a second", tokens, said.tokens_per_second, format_count),
        _beside("MFU", said.mfu * said.step_seconds / seconds, said.mfu, lambda value: f"{100 * value:.1f} %"),
    ]
    if memory:
        rows.append(_beside("peak memory of a device", memory, said.peak_memory, format_bytes))
    return rows


def _beside(
    name: str, found: float, said: float, write: Callable[[float], str], sides: tuple[str, str] = _SIZE
) -> Beside:
    return Beside(name, write(found), write(said), _off(said, found, sides))


def _off(said: float, found: float, sides: tuple[str, str]) -> str:
    """In words: of a rate and of a time the same error has unlike signs."""
    if not said or not found:
        return ""
    share = said / found - 1.0
    return f"{percent(abs(share))} {sides[share < 0]}"


def _parts(run: Run, plan: Plan) -> tuple[Beside, ...]:
    """Where the time went on the rank that waited least, beside the parts of the prediction it can be held against."""
    last = [records[-1] for records in run.ranks if records and records[-1].parts]
    if not last or plan.prediction is None:
        return ()
    names = sorted({part for record in last for part in record.parts})
    time = plan.prediction.time
    said = {
        "forward": time.forward, "backward": time.backward + time.recompute, "waiting": time.pipeline,
        "optimizer": time.optimizer,
    }  # fmt: skip
    rows = []
    for name in names:
        found = mean(record.parts.get(name, 0.0) for record in last)
        own = said.get(name.value)
        rows.append(
            Beside(_PARTS.get(name.value, name.value), format_seconds(found),
                   "" if own is None else format_seconds(own), _off(own or 0.0, found, _LENGTH))
        )  # fmt: skip
    return tuple(rows)


def _picture(steps: Sequence[StepRecord], predicted: float) -> Markup:
    """Step times, a line, and the prediction."""
    every = -(-len(steps) // _POINTS)
    means = [steps[at : at + every] for at in range(0, len(steps), every)]
    points = [(mean(step.step for step in own), mean(step.seconds for step in own)) for own in means]
    top = 1.15 * max(predicted, *(seconds for _, seconds in points))
    low = HEIGHT - _BOTTOM
    first, last = points[0][0], points[-1][0]
    across = (WIDTH - _LEFT - _RIGHT) / max(last - first, 1.0)
    up = (low - _TOP) / top
    places = [(_LEFT + (at - first) * across, low - seconds * up) for at, seconds in points]
    drawn: list[Markup] = []
    values = marks(top, 4)
    for value, word in zip(values, second_words(values), strict=True):
        y = low - value * up
        drawn += [element("path", d=f"M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}", class_="grid"),
                  text(_LEFT - 6, y + 4, word, anchor="end")]  # fmt: skip
    y = low - predicted * up
    drawn += [
        element("path", d=f"M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}", class_="limit"),
        text(WIDTH - _RIGHT, y + 13, "predicted", anchor="end", class_="limit-word"),
        element("path", d=path(places), class_="measured-line"),
        text(_LEFT, HEIGHT - 8, f"step {steps[0].step}"),
        text(WIDTH - _RIGHT, HEIGHT - 8, f"step {steps[-1].step}", anchor="end"),
    ]
    return figure(WIDTH, HEIGHT, f"Seconds of {len(steps)} steps, beside the predicted {predicted:.3g} s.", *drawn)
