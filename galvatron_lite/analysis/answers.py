"""Results of sweeps for people and programs: a table, a sentence, plain data for JSON, and a figure in SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from xml.sax.saxutils import escape

from galvatron_lite.analysis.setting import Point
from galvatron_lite.analysis.sweeps import SATURATED, BestBatch, Cheapest, Fewest, Goal, ParetoFront, RunCost
from galvatron_lite.files import to_data
from galvatron_lite.plans.schema import Proof
from galvatron_lite.search.result import summary
from galvatron_lite.svg import Scale, caption, document
from galvatron_lite.units import format_budget, format_bytes, format_count, format_duration, format_seconds

Answer = BestBatch | Fewest | Cheapest | ParetoFront


@dataclass(frozen=True, slots=True)
class AnswerText:
    """The result of a sweep for people."""

    columns: tuple[str, ...]  # heads of the table
    rows: tuple[tuple[str, ...], ...]  # cells
    sentence: str  # the result
    notes: tuple[str, ...]  # what was searched, and what was left out
    chosen: Point | None = None  # the point that is the result; None if there is none, or several
    failed: bool = False  # whether everything was searched and nothing is enough


def answer_text(answer: Answer) -> AnswerText:
    """Describe the result of a sweep."""
    match answer:
        case BestBatch():
            return _best_batch_text(answer)
        case Fewest():
            return _fewest_text(answer)
        case Cheapest():
            return _cheapest_text(answer)
        case ParetoFront():
            return _front_text(answer)


def _best_batch_text(answer: BestBatch) -> AnswerText:
    best, saturated = answer.best, answer.saturated
    top = 1.0 if best is None else best.rate
    rows = []
    for point in answer.points:
        cells: tuple[str, ...] = ("", "", "", "", _reason(point))
        if point.plan is not None:
            speed = (format_seconds(point.seconds), format_count(point.rate), f"{point.rate / top:.1%}")
            cells = (*speed, format_bytes(point.peak), summary(point.plan))
        rows.append((str(point.batch), *cells))
    sentence = ""
    if best is not None and saturated is not None:
        sentence = f"Best batch: {best.batch} samples a step, {format_count(best.rate)} samples/s."
        if saturated.batch < best.batch:
            share = f"{saturated.rate / best.rate:.1%}"
            sentence += f" It saturates at {saturated.batch}: {share} of that (within {SATURATED:.0%})."
        if best == answer.points[-1]:
            sentence += " That is the largest looked at: a larger one may be better."
    limit = f"; compute alone allows {format_count(answer.ceiling)} samples/s" * (answer.ceiling < float("inf"))
    notes = (
        f"Looked at: divisors of the devices, and 2^a and 3 * 2^a samples a device, up to "
        f"{answer.points[-1].batch} (--max-batch for others){limit}.",
        *_interrupted(answer),
    )
    columns = ("batch", "step", "samples/s", "of best", "memory", "plan")
    return AnswerText(columns, tuple(rows), sentence, notes, best, best is None and answer.complete)


def _fewest_text(answer: Fewest) -> AnswerText:
    chosen, rows = answer.answer, []
    unit = "tokens/s" if answer.target.goal is Goal.TOKENS else "samples/s"
    # Consecutive device counts whose compute alone takes too long share a row.
    for _, group in groupby(enumerate(answer.points), lambda item: -1 if _is_too_few(item[1]) else item[0]):
        points = [point for _, point in group]
        first, last = points[0], points[-1]
        devices = str(first.devices) if first.devices == last.devices else f"{first.devices} … {last.devices}"
        batch = str(first.batch) if len({point.batch for point in points}) == 1 else ""
        cells: tuple[str, ...] = ("", "", "", _reason(last))
        if first.plan is not None:
            throughput = format_count(_throughput(answer, first))
            cells = (format_seconds(first.seconds), throughput, format_bytes(first.peak), summary(first.plan))
        rows.append((devices, batch, *cells))
    if chosen is not None:
        sentence = (
            f"Fewest: {_gpus(chosen.devices)} {_reach(answer, '' if chosen.devices > 1 else 's')}: "
            f"{format_seconds(chosen.seconds)} a step of {chosen.batch}, "
            f"{format_count(_throughput(answer, chosen))} {unit}."
        )
    else:
        most = answer.points[-1].devices if answer.points else 0
        sentence = f"No number of GPUs up to {most} {_reach(answer, 's')}.{_nearest(answer, unit)} Try more --gpus."
    notes = ("Looked at: every number of GPUs to a node, then whole nodes, up to the answer.", *_interrupted(answer))
    columns = ("GPUs", "batch", "step", unit, "memory", "plan")
    return AnswerText(columns, tuple(rows), sentence, notes, chosen, chosen is None and answer.complete)


def _is_too_few(point: Point) -> bool:
    return point.plan is None and point.needs is None and point.reason.startswith("too few")


def _throughput(answer: Fewest, point: Point) -> float:
    """Samples a second, or tokens a second if the target is in tokens."""
    if answer.target.goal is not Goal.TOKENS:
        return point.rate
    return 0.0 if point.prediction is None else point.prediction.tokens_per_second


def _reach(answer: Fewest, s: str) -> str:
    """The target as a verb and its object; ``s``: the ending of the verb."""
    value = answer.target.value
    match answer.target.goal:
        case Goal.FIT:
            return f"fit{s} the model"
        case Goal.STEP:
            return f"take{s} at most {format_seconds(value)} a step"
        case Goal.SAMPLES:
            return f"train{s} {format_count(value)} samples/s"
        case Goal.TOKENS:
            return f"train{s} {format_count(value)} tokens/s"


def _nearest(answer: Fewest, unit: str) -> str:
    """A sentence on the plan that comes nearest to the target, or on why there is no plan."""
    planned = [point for point in answer.points if point.plan is not None]
    if planned:
        rates = answer.target.goal in (Goal.SAMPLES, Goal.TOKENS)
        best = max(planned, key=lambda point: point.rate if rates else -point.seconds)
        throughput = f"{format_count(_throughput(answer, best))} {unit}"
        return f" The nearest: {format_seconds(best.seconds)} a step, {throughput}, on {_gpus(best.devices)}."
    if answer.points:
        return f" On {_gpus(answer.points[-1].devices)}: {_reason(answer.points[-1])}."
    return ""


def _cheapest_text(answer: Cheapest) -> AnswerText:
    chosen = answer.answer
    rows = {point.devices: (str(point.batch), "", "", "", "", _reason(point)) for point in answer.missing}
    for cost in answer.costs:
        mark = ""
        if chosen is not None and cost.point.devices == chosen.point.devices:
            mark = "cheapest"
        elif answer.deadline is not None and cost.seconds > answer.deadline:
            mark = "too late"
        elif cost in answer.frontier:
            mark = "frontier"
        hours = f"{cost.device_hours:,.1f}" if cost.device_hours >= 10 else f"{cost.device_hours:.2g}"
        spent = (_money(cost.cost), format_duration(cost.seconds), hours, format_seconds(cost.point.seconds))
        rows[cost.point.devices] = (str(cost.point.batch), *spent, mark)
    if chosen is not None:
        amounts = {"steps": answer.run.steps, "samples": answer.run.samples, "tokens": answer.run.tokens}
        amount = next(f"{format_count(size)} {unit}" for unit, size in amounts.items() if size)
        cost_and_time = f"{_money(chosen.cost)} and {format_duration(chosen.seconds)}"
        sentence = f"Cheapest: {_gpus(chosen.point.devices)}: {cost_and_time} for {amount}."
    else:
        quickest = min(answer.costs, key=lambda cost: cost.seconds)
        sentence = (
            f"No number of GPUs ends within {format_duration(answer.deadline or 0.0)}: the quickest, "
            f"{_gpus(quickest.point.devices)}, takes {format_duration(quickest.seconds)}. Try more --gpus."
        )
    notes = (
        f"Looked at: 1, 2, 3, 4, 6, 8 … GPUs and nodes (2^a and 3 * 2^a), up to {rows and max(rows)} GPUs "
        f"(--gpus), at {answer.price:g} a GPU-hour. Frontier: no other is both cheaper and quicker.",
        *_interrupted(answer),
    )
    return AnswerText(
        ("GPUs", "batch", "cost", "time", "GPU-hours", "step", ""),
        tuple((str(devices), *cells) for devices, cells in sorted(rows.items())),
        sentence,
        notes,
        None if chosen is None else chosen.point,
        chosen is None and answer.complete,
    )


def _front_text(answer: ParetoFront) -> AnswerText:
    top = answer.points[0].seconds if answer.points else 1.0
    all_proven, rows = all(_is_proven(point) for point in answer.points), []
    for point in answer.points:
        text, proof = "", "no"
        if point.plan is not None:
            text = summary(point.plan)
            proof = "no" if point.plan.provenance is None else f"to {point.plan.provenance.gap:.1%}"
        cells = (format_bytes(point.peak), format_seconds(point.seconds), f"{point.seconds / top - 1:+.0%}", text)
        rows.append(cells if all_proven else (*cells, "yes" if _is_proven(point) else proof))
    columns = ("memory", "step", "slower by", "plan", *(() if all_proven else ("proven",)))
    least = "" if answer.least is None else f" No plan fits less than about {format_budget(answer.least, up=True)}."
    sentence = f"{len(answer.points)} plans of which none is beaten in both time and memory.{least}"
    notes = (
        f"Each is the fastest within its memory. Budgets less than {format_bytes(answer.step)} below a plan's memory "
        "were not looked at (--memory-step).",
        *_interrupted(answer),
    )
    return AnswerText(columns, tuple(rows), sentence, notes)


def _reason(point: Point) -> str:
    if point.needs is not None:
        return f"does not fit: needs {format_budget(point.needs, up=True)} a GPU"
    return point.reason.rpartition("cannot be used. ")[2].partition(". ")[0].rstrip(".")


def _is_proven(point: Point) -> bool:
    provenance = None if point.plan is None else point.plan.provenance
    return provenance is not None and provenance.proof is Proof.PROVEN


def _money(cost: float) -> str:
    return f"{cost:,.0f}" if cost >= 1000 else f"{cost:.3g}"


def _gpus(devices: int) -> str:
    return f"{devices} GPU{'s' * (devices > 1)}"


def _interrupted(answer: Answer) -> tuple[str, ...]:
    note = "Interrupted: this is what was found so far; what was not looked at may be better."
    return () if answer.complete else (note,)


def as_data(answer: Answer) -> dict[str, Any]:
    """The result as plain data for JSON, in seconds, bytes and samples; its plan is under ``plan``."""
    chosen = answer_text(answer).chosen
    data: dict[str, Any] = {"question": _QUESTIONS[type(answer)], "complete": answer.complete}
    if isinstance(answer, Cheapest):
        data["points"] = [_cost_data(cost) for cost in answer.costs] + [_point_data(p) for p in answer.missing]
        data["frontier"] = [cost.point.devices for cost in answer.frontier]
        data |= {"price": answer.price, "within": answer.deadline}
        data["answer"] = None if answer.answer is None else _cost_data(answer.answer)
    else:
        data["points"] = [_point_data(point) for point in answer.points]
    if isinstance(answer, BestBatch):
        data["saturated"] = None if answer.saturated is None else answer.saturated.batch
        data["ceiling"] = answer.ceiling if answer.ceiling < float("inf") else None
    if isinstance(answer, Fewest):
        data["target"] = {"goal": answer.target.goal.value, "value": answer.target.value}
    if isinstance(answer, ParetoFront):
        return data | {"step": answer.step, "least": answer.least}
    if not isinstance(answer, Cheapest):
        data["answer"] = None if chosen is None else _point_data(chosen)
    data["plan"] = None if chosen is None or chosen.plan is None else to_data(chosen.plan)
    return data


_QUESTIONS = {BestBatch: "best_batch", Fewest: "fewest_devices", Cheapest: "cheapest", ParetoFront: "pareto_front"}


def _point_data(point: Point) -> dict[str, Any]:
    data: dict[str, Any] = {"devices": point.devices, "batch": point.batch, "budget": point.budget}
    if point.plan is None or point.prediction is None:
        return data | {"reason": point.reason, "needs": point.needs}
    return data | {
        "step_seconds": point.seconds,
        "samples_per_second": point.rate,
        "tokens_per_second": point.prediction.tokens_per_second,
        "peak_memory": point.peak,
        "proven": _is_proven(point),
        "plan": summary(point.plan),
    }


def _cost_data(cost: RunCost) -> dict[str, Any]:
    return _point_data(cost.point) | {"run_seconds": cost.seconds, "device_hours": cost.device_hours, "cost": cost.cost}


_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 88, 616, 58, 348
_MARGIN = 1.08  # factor by which axes go on beyond the outermost points


@dataclass(frozen=True, slots=True)
class _LogAxis:
    name: str
    write: Callable[[float], str]  # a value as text


@dataclass(frozen=True, slots=True)
class _Dot:
    x: float  # value on the lower axis, above 0
    y: float  # value on the left axis, above 0
    title: str
    chosen: bool = False  # whether it is the result
    faint: bool = False  # whether it is for comparison only, beside the line


def figure(answer: Answer) -> str:
    """Draw the points of a sweep as SVG, for light and dark pages."""
    sentence = answer_text(answer).sentence
    heading = caption(16, 24, sentence if len(sentence) < 100 else sentence[:97] + "…", more=' font-weight="600"')
    across, up, dots = _axes_and_dots(answer)
    if not dots:
        return document(_WIDTH, _HEIGHT, sentence, [heading])
    x_values, y_values = [dot.x for dot in dots], [dot.y for dot in dots]
    x = Scale(min(x_values) / _MARGIN, max(x_values) * _MARGIN, _LEFT, _RIGHT)
    y = Scale(min(y_values) / _MARGIN, max(y_values) * _MARGIN, _BOTTOM, _TOP)
    first, *others = [(x.at(dot.x), y.at(dot.y)) for dot in dots if not dot.faint]
    # On a front a plan stays the best until the next one fits.
    line = "H{:.1f}V{:.1f}" if isinstance(answer, ParetoFront) else "L{:.1f} {:.1f}"
    path = f"M{first[0]:.1f} {first[1]:.1f}" + "".join(line.format(*place) for place in others)
    drawn = [
        heading,
        f'<path class="grid" d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>',
        *(caption(at, _BOTTOM + 18, across.write(value), "middle", "soft") for value, at in _ticks(x_values, x, 64)),
    ]
    for value, at in _ticks(y_values, y, 22):
        drawn.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_RIGHT}"/>')
        drawn.append(caption(_LEFT - 8, at + 4, up.write(value), "end", "soft"))
    drawn.append(caption((_LEFT + _RIGHT) / 2, _HEIGHT - 12, across.name, "middle"))
    drawn.append(caption(_LEFT - 8, _TOP - 12, up.name, "middle"))
    drawn.append(f'<path class="t0" stroke-width="1.5" d="{path}"/>')
    for dot in dots:
        size, kind = (6, "c1") if dot.chosen else (4, "soft" if dot.faint else "c0")
        circle = f'<circle class="{kind}" cx="{x.at(dot.x):.1f}" cy="{y.at(dot.y):.1f}" r="{size}">'
        drawn.append(f"{circle}<title>{escape(dot.title)}</title></circle>")
    return document(_WIDTH, _HEIGHT, sentence, drawn)


def _axes_and_dots(answer: Answer) -> tuple[_LogAxis, _LogAxis, list[_Dot]]:
    seconds = _LogAxis("seconds a step", format_seconds)
    if isinstance(answer, Cheapest):
        dots = [
            _Dot(cost.seconds, cost.cost,
                 f"{cost.point.devices} GPUs: {cost.cost:,.4g}, {format_duration(cost.seconds)}",
                 chosen=cost == answer.answer, faint=cost not in answer.frontier)
            for cost in sorted(answer.costs, key=lambda cost: cost.seconds)
        ]  # fmt: skip
        return _LogAxis("time of the run", format_duration), _LogAxis("cost", "{:,.3g}".format), dots
    planned = [point for point in answer.points if point.plan is not None]
    if isinstance(answer, BestBatch):
        dots = [
            _Dot(p.batch, p.rate, f"batch {p.batch}: {format_count(p.rate)} samples/s", chosen=p == answer.best)
            for p in planned
        ]
        return _LogAxis("batch", format_count), _LogAxis("samples/s", format_count), dots
    if isinstance(answer, Fewest):
        dots = [
            _Dot(p.devices, p.seconds, f"{p.devices} GPUs: {format_seconds(p.seconds)}", chosen=p == answer.answer)
            for p in planned
        ]
        return _LogAxis("GPUs", format_count), seconds, dots
    dots = [
        _Dot(p.peak, p.seconds, f"{format_bytes(p.peak)}: {format_seconds(p.seconds)}")
        for p in sorted(planned, key=lambda point: point.peak)
    ]
    return _LogAxis("memory of the fullest GPU", format_bytes), seconds, dots


def _ticks(values: Sequence[float], scale: Scale, distance: float) -> list[tuple[float, float]]:
    """Distinct values with their pixels, without those that are less than ``distance`` pixels from the one before."""
    ticks: list[tuple[float, float]] = []
    for value in sorted(set(values)):
        pixel = scale.at(value)
        if not ticks or abs(pixel - ticks[-1][1]) >= distance:
            ticks.append((value, pixel))
    return ticks
