"""Answers as plain data, for JSON."""

from __future__ import annotations

from typing import Any

from galvatron_lite.files import to_data
from galvatron_lite.questions.answers import Answer, proven, said
from galvatron_lite.questions.batches import BestBatch
from galvatron_lite.questions.cheapest import Cheapest, RunCost
from galvatron_lite.questions.fewest import Fewest
from galvatron_lite.questions.front import Front
from galvatron_lite.questions.setting import Point
from galvatron_lite.search.result import summary


def as_data(answer: Answer) -> dict[str, Any]:
    """An answer as plain data for JSON: seconds, bytes, samples; the plan of the answer under ``plan``."""
    chosen = said(answer).chosen
    data: dict[str, Any] = {"question": _QUESTIONS[type(answer)], "complete": answer.complete}
    if isinstance(answer, Cheapest):
        data["points"] = [_cost_data(cost) for cost in answer.costs] + [point_data(p) for p in answer.missing]
        data["frontier"] = [cost.point.devices for cost in answer.frontier]
        data |= {"price": answer.price, "within": answer.deadline}
        data["answer"] = None if answer.answer is None else _cost_data(answer.answer)
    else:
        data["points"] = [point_data(point) for point in answer.points]
    if isinstance(answer, BestBatch):
        data["saturated"] = None if answer.saturated is None else answer.saturated.batch
        data["ceiling"] = answer.ceiling if answer.ceiling < float("inf") else None
    if isinstance(answer, Fewest):
        data["target"] = {"goal": answer.target.goal.value, "value": answer.target.value}
    if isinstance(answer, Front):
        data |= {"step": answer.step, "least": answer.least}
    elif not isinstance(answer, Cheapest):
        data["answer"] = None if chosen is None else point_data(chosen)
    if not isinstance(answer, Front):
        data["plan"] = None if chosen is None or chosen.plan is None else to_data(chosen.plan)
    return data


_QUESTIONS = {BestBatch: "best_batch", Fewest: "fewest_devices", Cheapest: "cheapest", Front: "pareto_front"}


def point_data(point: Point) -> dict[str, Any]:
    """A point as plain data; one without a plan has its reason."""
    data: dict[str, Any] = {"devices": point.devices, "batch": point.batch, "budget": point.budget}
    if point.plan is None or point.prediction is None:
        return data | {"reason": point.reason, "needs": point.needs}
    return data | {
        "step_seconds": point.seconds,
        "samples_per_second": point.rate,
        "tokens_per_second": point.prediction.tokens_per_second,
        "peak_memory": point.peak,
        "proven": proven(point),
        "plan": summary(point.plan),
    }


def _cost_data(cost: RunCost) -> dict[str, Any]:
    return point_data(cost.point) | {"run_seconds": cost.seconds, "device_hours": cost.device_hours, "cost": cost.cost}
