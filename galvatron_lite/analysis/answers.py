"""Answers of sweeps as rows of a table, as a sentence, as plain data, and as a figure of their points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from galvatron_lite.analysis.setting import Point
from galvatron_lite.analysis.sweeps import SATURATED, BestBatch, Cheapest, Fewest, Goal, ParetoFront, RunCost, Target
from galvatron_lite.files import to_data
from galvatron_lite.plans.schema import Proof
from galvatron_lite.search.result import summary
from galvatron_lite.svg import Scale, caption, document
from galvatron_lite.units import format_budget, format_bytes, format_count, format_duration, format_seconds

Answer = BestBatch | Fewest | Cheapest | ParetoFront


@dataclass(frozen=True, slots=True)
class AnswerText:
    """An answer for people."""

    columns: tuple[str, ...]  # heads of the table
    rows: tuple[tuple[str, ...], ...]  # cells
    sentence: str  # the answer itself
    notes: tuple[str, ...]  # what it is exact over, and what was left out
    chosen: Point | None = None  # the point that is the answer; None where there is none, or more than one
    failed: bool = False  # whether everything was looked at and nothing is enough


def answer_text(answer: Answer) -> AnswerText:
    """An answer for people."""
    match answer:
        case BestBatch():
            return _best_batch(answer)
        case Fewest():
            return _fewest(answer)
        case Cheapest():
            return _cheapest(answer)
        case ParetoFront():
            return _front(answer)


def _best_batch(answer: BestBatch) -> AnswerText:
    best, enough = answer.best, answer.saturated
    top = 1.0 if best is None else best.rate
    rows = tuple(
        (str(p.batch), *_speed(p), f"{p.rate / top:.1%}", *_plan(p))
        if p.plan is not None
        else (str(p.batch), "", "", "", "", _reason(p))
        for p in answer.points
    )
    sentence = ""
    if best is not None and enough is not None:
        sentence = f"Best batch: {best.batch} samples a step, {format_count(best.rate)} samples/s."
        if enough.batch < best.batch:
            share = f"{enough.rate / best.rate:.1%}"
            sentence += f" It saturates at {enough.batch}: {share} of that (within {SATURATED:.0%})."
        if best == answer.points[-1]:
            sentence += " That is the largest looked at: a larger one may be better."
    limit = f"; compute alone allows {format_count(answer.ceiling)} samples/s" * (answer.ceiling < float("inf"))
    notes = (
        f"Looked at: divisors of the devices, and 2^a and 3 * 2^a samples a device, up to "
        f"{answer.points[-1].batch} (--max-batch for others){limit}.",
        *_unfinished(answer.complete),
    )
    columns = ("batch", "step", "samples/s", "of best", "memory", "plan")
    return AnswerText(columns, rows, sentence, notes, best, best is None and answer.complete)


def _fewest(answer: Fewest) -> AnswerText:
    rows = []
    for run in _runs(answer.points):
        first, last = run[0], run[-1]
        devices = str(first.devices) if first.devices == last.devices else f"{first.devices} … {last.devices}"
        batch = str(first.batch) if len({point.batch for point in run}) == 1 else ""
        outcome = _plan(first) if first.plan is not None else ("", _reason(last))
        rows.append((devices, batch, *_speed(first, answer.target.goal), *outcome))
    chosen = answer.answer
    if chosen is not None:
        reached = _reach(answer.target, chosen.devices > 1)
        sentence = (
            f"Fewest: {_gpus(chosen.devices)} {reached}: {format_seconds(chosen.seconds)} a step of {chosen.batch}, "
            f"{_pace(chosen, answer.target.goal)}."
        )
    else:
        sentence = _missed(answer)
    notes = ("Looked at: every number of GPUs to a node, then whole nodes, up to the answer.",)
    columns = ("GPUs", "batch", "step", _unit(answer.target.goal), "memory", "plan")
    return AnswerText(
        columns,
        tuple(rows),
        sentence,
        (*notes, *_unfinished(answer.complete)),
        chosen,
        chosen is None and answer.complete,
    )


def _cheapest(answer: Cheapest) -> AnswerText:
    kept = {cost.point.devices for cost in answer.frontier}
    rows = []
    for cost in answer.costs:
        hours = f"{cost.device_hours:,.1f}" if cost.device_hours >= 10 else f"{cost.device_hours:.2g}"
        spent = (_money(cost.cost), format_duration(cost.seconds), hours, format_seconds(cost.point.seconds))
        mark = _mark(answer, cost, kept)
        rows.append((cost.point.devices, (str(cost.point.devices), str(cost.point.batch), *spent, mark)))
    rows += [(p.devices, (str(p.devices), str(p.batch), "", "", "", "", _reason(p))) for p in answer.missing]
    columns = ("GPUs", "batch", "cost", "time", "GPU-hours", "step", "")
    notes = (
        f"Looked at: 1, 2, 3, 4, 6, 8 … GPUs and nodes (2^a and 3 * 2^a), up to {rows and max(rows)[0]} GPUs "
        f"(--gpus), at {answer.price:g} a GPU-hour. Frontier: no other is both cheaper and quicker.",
        *_unfinished(answer.complete),
    )
    chosen = answer.answer
    return AnswerText(
        columns,
        tuple(row for _, row in sorted(rows)),
        _cheapest_sentence(answer),
        notes,
        None if chosen is None else chosen.point,
        chosen is None and answer.complete,
    )


def _front(answer: ParetoFront) -> AnswerText:
    top = answer.points[0].seconds if answer.points else 1.0
    certain = all(_is_proven(p) for p in answer.points)
    rows = tuple(
        (format_bytes(p.peak), format_seconds(p.seconds), f"{p.seconds / top - 1:+.0%}", _summary(p),
         *(() if certain else ("yes" if _is_proven(p) else _gap(p),)))
        for p in answer.points
    )  # fmt: skip
    columns = ("memory", "step", "slower by", "plan", *(() if certain else ("proven",)))
    least = "" if answer.least is None else f" No plan fits less than about {format_budget(answer.least, up=True)}."
    sentence = f"{len(answer.points)} plans of which none is beaten in both time and memory.{least}"
    notes = (
        f"Each is the fastest within its memory. Budgets less than {format_bytes(answer.step)} below a plan's memory "
        "were not looked at (--memory-step).",
        *_unfinished(answer.complete),
    )
    return AnswerText(columns, rows, sentence, notes)


def _reason(point: Point) -> str:
    if point.needs is not None:
        return f"does not fit: needs {format_budget(point.needs, up=True)} a GPU"
    return point.reason.rpartition("cannot be used. ")[2].partition(". ")[0].rstrip(".")


def _missed(answer: Fewest) -> str:
    most = answer.points[-1].devices if answer.points else 0
    planned = [point for point in answer.points if point.plan is not None]
    nearest = ""
    if planned:
        best = (
            max(planned, key=lambda p: p.rate)
            if answer.target.goal in _RATES
            else min(planned, key=lambda p: p.seconds)
        )
        nearest = (
            f" The nearest: {format_seconds(best.seconds)} a step, {_pace(best, answer.target.goal)}, on "
            f"{_gpus(best.devices)}."
        )
    elif answer.points:
        nearest = f" On {_gpus(most)}: {_reason(answer.points[-1])}."
    return f"No number of GPUs up to {most} {_reach(answer.target, False)}.{nearest} Try more --gpus."


_RATES = (Goal.SAMPLES, Goal.TOKENS)


def _reach(target: Target, many: bool) -> str:
    s = "" if many else "s"
    words = {
        Goal.FIT: f"fit{s} the model",
        Goal.STEP: f"take{s} at most {format_seconds(target.value)} a step",
        Goal.SAMPLES: f"train{s} {format_count(target.value)} samples/s",
        Goal.TOKENS: f"train{s} {format_count(target.value)} tokens/s",
    }
    return words[target.goal]


def _cheapest_sentence(answer: Cheapest) -> str:
    best = answer.answer
    if best is not None:
        amounts = {"steps": answer.run.steps, "samples": answer.run.samples, "tokens": answer.run.tokens}
        amount = next(f"{format_count(size)} {unit}" for unit, size in amounts.items() if size)
        cost = f"{_money(best.cost)} and {format_duration(best.seconds)}"
        return f"Cheapest: {_gpus(best.point.devices)}: {cost} for {amount}."
    quickest = min(answer.costs, key=lambda cost: cost.seconds)
    return (
        f"No number of GPUs ends within {format_duration(answer.deadline or 0.0)}: the quickest, "
        f"{_gpus(quickest.point.devices)}, takes {format_duration(quickest.seconds)}. Try more --gpus."
    )


def _mark(answer: Cheapest, cost: RunCost, kept: set[int]) -> str:
    if answer.answer is not None and cost.point.devices == answer.answer.point.devices:
        return "cheapest"
    late = answer.deadline is not None and cost.seconds > answer.deadline
    return "too late" if late else "frontier" if cost.point.devices in kept else ""


def _money(cost: float) -> str:
    return f"{cost:,.0f}" if cost >= 1000 else f"{cost:.3g}"


def _gpus(devices: int) -> str:
    return f"{devices} GPU{'s' * (devices > 1)}"


def _speed(point: Point, goal: Goal = Goal.SAMPLES) -> tuple[str, str]:
    if point.plan is None:
        return "", ""
    return format_seconds(point.seconds), _pace(point, goal).partition(" ")[0]


def _unit(goal: Goal) -> str:
    return "tokens/s" if goal is Goal.TOKENS else "samples/s"


def _pace(point: Point, goal: Goal) -> str:
    """The throughput in what the target is told in."""
    tokens = 0.0 if point.prediction is None else point.prediction.tokens_per_second
    return f"{format_count(tokens if goal is Goal.TOKENS else point.rate)} {_unit(goal)}"


def _plan(point: Point) -> tuple[str, str]:
    return format_bytes(point.peak), _summary(point)


def _summary(point: Point) -> str:
    return "" if point.plan is None else summary(point.plan)


def _is_proven(point: Point) -> bool:
    source = None if point.plan is None else point.plan.provenance
    return source is not None and source.proof is Proof.PROVEN


def _gap(point: Point) -> str:
    source = None if point.plan is None else point.plan.provenance
    return "no" if source is None else f"to {source.gap:.1%}"


def _unfinished(complete: bool) -> tuple[str, ...]:
    return () if complete else ("Interrupted: this is what was found so far; what was not looked at may be better.",)


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Neighbours that are too few by their compute alone make one row."""
    runs: list[list[Point]] = []
    for point in points:
        if runs and _alike(runs[-1][-1]) and _alike(point):
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _alike(point: Point) -> bool:
    return point.plan is None and point.needs is None and point.reason.startswith("too few")


def as_data(answer: Answer) -> dict[str, Any]:
    """An answer as plain data for JSON: seconds, bytes, samples; the plan of the answer under ``plan``."""
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
        data |= {"step": answer.step, "least": answer.least}
    elif not isinstance(answer, Cheapest):
        data["answer"] = None if chosen is None else _point_data(chosen)
    if not isinstance(answer, ParetoFront):
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
    name: str  # what it shows
    write: Callable[[float], str]  # a value for people


@dataclass(frozen=True, slots=True)
class _PointMark:
    x: float  # x, y: values, above 0
    y: float
    words: str  # told where the reader points at it
    chosen: bool = False  # whether it is the answer
    faint: bool = False  # whether it is told for comparison only


def figure(answer: Answer) -> str:
    """The figure of an answer as SVG; it fits light and dark pages."""
    across, up, marks, stairs = _drawn(answer)
    if not marks:
        return _svg(answer_text(answer).sentence, [])
    right = _scale([mark.x for mark in marks], _LEFT, _RIGHT)
    top = _scale([mark.y for mark in marks], _BOTTOM, _TOP)
    line = [mark for mark in marks if not mark.faint]
    path = _path([(right.at(mark.x), top.at(mark.y)) for mark in line], stairs)
    return _svg(
        answer_text(answer).sentence,
        [
            *_grid(across, up, right, top, marks),
            f'<path class="t0" stroke-width="1.5" d="{path}"/>',
            *(_dot(mark, right.at(mark.x), top.at(mark.y)) for mark in marks),
        ],
    )


def _drawn(answer: Answer) -> tuple[_LogAxis, _LogAxis, list[_PointMark], bool]:
    if isinstance(answer, Cheapest):
        kept, best = {cost.point.devices for cost in answer.frontier}, answer.answer
        marks = [
            _PointMark(cost.seconds, cost.cost, f"{cost.point.devices} GPUs: {cost.cost:,.4g}, "
                 f"{format_duration(cost.seconds)}", cost == best, cost.point.devices not in kept)
            for cost in sorted(answer.costs, key=lambda cost: cost.seconds)
        ]  # fmt: skip
        return _LogAxis("time of the run", format_duration), _LogAxis("cost", "{:,.3g}".format), marks, False
    planned = [point for point in answer.points if point.plan is not None]
    if isinstance(answer, BestBatch):
        marks = [
            _PointMark(p.batch, p.rate, f"batch {p.batch}: {format_count(p.rate)} samples/s", p == answer.best)
            for p in planned
        ]
        return _LogAxis("batch", format_count), _LogAxis("samples/s", format_count), marks, False
    if isinstance(answer, Fewest):
        marks = [
            _PointMark(p.devices, p.seconds, f"{p.devices} GPUs: {format_seconds(p.seconds)}", p == answer.answer)
            for p in planned
        ]
        return _LogAxis("GPUs", format_count), _LogAxis("seconds a step", format_seconds), marks, False
    marks = [
        _PointMark(p.peak, p.seconds, f"{format_bytes(p.peak)}: {format_seconds(p.seconds)}")
        for p in sorted(planned, key=lambda p: p.peak)
    ]
    return _LogAxis("memory of the fullest GPU", format_bytes), _LogAxis("seconds a step", format_seconds), marks, True


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    return Scale(min(values) / _MARGIN, max(values) * _MARGIN, start, end)


def _path(places: Sequence[tuple[float, float]], stairs: bool) -> str:
    """A line through the places; in steps where a plan is the best until the next one fits."""
    first, *others = places
    moves = (f"H{x:.1f}V{y:.1f}" if stairs else f"L{x:.1f} {y:.1f}" for x, y in others)
    return f"M{first[0]:.1f} {first[1]:.1f}" + "".join(moves)


def _dot(mark: _PointMark, x: float, y: float) -> str:
    size, kind = (6, "c1") if mark.chosen else (4, "soft" if mark.faint else "c0")
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"><title>{escape(mark.words)}</title></circle>'


def _grid(across: _LogAxis, up: _LogAxis, right: Scale, top: Scale, marks: Sequence[_PointMark]) -> list[str]:
    lines = [f'<path class="grid" d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>']
    for value, x in _apart([mark.x for mark in marks], right, 64):
        lines.append(caption(x, _BOTTOM + 18, across.write(value), "middle", "soft"))
    for value, y in _apart([mark.y for mark in marks], top, 22):
        lines.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
        lines.append(caption(_LEFT - 8, y + 4, up.write(value), "end", "soft"))
    lines.append(caption((_LEFT + _RIGHT) / 2, _HEIGHT - 12, across.name, "middle"))
    return [*lines, caption(_LEFT - 8, _TOP - 12, up.name, "middle")]


def _apart(values: Sequence[float], scale: Scale, least: float) -> list[tuple[float, float]]:
    """Values with their places, those left out that lie less than ``least`` pixels from the one before."""
    kept: list[tuple[float, float]] = []
    for value in sorted(set(values)):
        place = scale.at(value)
        if not kept or abs(place - kept[-1][1]) >= least:
            kept.append((value, place))
    return kept


def _svg(sentence: str, lines: Sequence[str]) -> str:
    heading = caption(16, 24, sentence if len(sentence) < 100 else sentence[:97] + "…", more=' font-weight="600"')
    return document(_WIDTH, _HEIGHT, sentence, [heading, *lines])
