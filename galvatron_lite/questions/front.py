"""Time against memory: the fastest plan for every budget, from the whole budget down to the least that any plan needs.

The epsilon constraint (Haimes, Lasdon and Wismer 1971): the fastest plan within a budget is found, then the budget is
set below its peak, until nothing fits. A plan of peak p found within budget B is the fastest for every budget from p
to B. Budgets go down by a least step, so that a model whose plans differ by bytes takes dozens of searches and not
thousands: between a plan and the next one of the table, budgets of less than a step below the plan's peak are not
looked at. With a step of 1 byte none is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from galvatron_lite.cluster.budget import as_budget
from galvatron_lite.errors import InputError
from galvatron_lite.questions.setting import Point, Progress, Setting, batch_for, gathered, look, require_plan
from galvatron_lite.units import format_bytes

STEPS = 32
"""Least step of the budget, as a part of the whole."""


@dataclass(frozen=True, slots=True)
class Front:
    """The answer.

    Attributes:
        points: plans of which none beats another in both time and memory, the fastest first; the budget of a point is
            the largest for which its plan was found to be the fastest.
        step: bytes; budgets of less than this below a point's peak were not looked at.
        least: bytes a device that the leanest plan needs, as the search names it; None where that is not known.
        complete: whether it goes down to the least.
    """

    points: tuple[Point, ...]
    step: int
    least: int | None
    complete: bool


def pareto_front(
    setting: Setting,
    batch: int | None = None,
    *,
    step: int | None = None,
    progress: Progress | None = None,
    searching: Progress | None = None,
) -> Front:
    """The time-memory front from the setting's budget down.

    Args:
        setting: its budget is the largest.
        batch: samples a step; 8 a device if not given.
        step: bytes by which a budget is less than the peak before it at the least; 1/32 of the budget if not given.
        progress: called with (per cent of the budget done, 100, what is being looked at).
        searching: called with (done, total, label) while each plan is searched for; KeyboardInterrupt ends the front
            with what was found.

    Raises:
        InputError: a step below 1.
        InfeasibleError: nothing fits the largest budget.
    """
    gap = max(as_budget(setting.budget_at(setting.profile.cluster.devices)).most // STEPS, 1) if step is None else step
    if gap < 1:
        raise InputError("step", gap, "Give 1 byte or more.")
    seen = gathered(_looked_at(setting, batch, gap, progress, searching))
    require_plan(seen)
    least = next((point.needs for point in seen.points if point.plan is None), None)
    planned = [point for point in seen.points if point.plan is not None]
    return Front(undominated(planned), gap, least, seen.complete)


def undominated(points: list[Point]) -> tuple[Point, ...]:
    """The points that no other one beats in both time and memory, the fastest first.

    Budgets go down in the closed form of the schedule; the simulated times that are told may differ a little.
    """
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.seconds, point.peak)):
        if not kept or point.peak < kept[-1].peak:
            kept.append(point)
    return tuple(kept)


def _looked_at(
    setting: Setting, batch: int | None, step: int, progress: Progress | None, searching: Progress | None
) -> Iterator[Point]:
    devices = setting.profile.cluster.devices
    samples, whole = batch_for(devices, batch), as_budget(setting.budget_at(devices))
    budget = whole.most
    while budget >= 1:
        if progress is not None:
            progress(100 - 100 * budget // whole.most, 100, format_bytes(budget))
        point = look(setting, devices, samples, whole.within(budget), searching)
        yield replace(point, budget=budget)
        if point.plan is None:
            # The leanest plan lies less than a step below the last one: a search there takes long and tells little.
            return
        budget = int((point.peak - step) / (1.0 - setting.margin))
