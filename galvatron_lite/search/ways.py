"""Plans beside those of stages in the model's order: each way to make some is asked, and the quickest plan counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from galvatron_lite.cluster.budget import Budget
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.parallelism.backends import Backend
from galvatron_lite.plans.schema import Alternative, Plan
from galvatron_lite.search.result import summary
from galvatron_lite.search.session import Session
from galvatron_lite.search.shapes import Request

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Asked:
    """What a way is asked for.

    Attributes:
        session: of the profile and the mode.
        request: what is planned.
        backend: what is to run the plan.
        budget: bytes a device, or of each type of device.
        delay: which rules of delayed gradients the user allows; empty: none.
        ordinary: the best plan of stages in the model's order; None where none fits.
    """

    session: Session
    request: Request
    backend: Backend
    budget: int | Budget
    delay: str = ""
    ordinary: Plan | None = None


Way = Callable[[Asked], Sequence[Plan]]
"""Plans of one way with their prediction and provenance, whether they fit or not; none where it offers none."""

WAYS: tuple[Way, ...] = ()


def with_ways(ordinary: Callable[[], Plan], asked: Asked, runners_up: int, ways: Sequence[Way] = WAYS) -> Plan:
    """The quickest plan that fits, the ordinary one of equal ones; the other is among its alternatives.

    Args:
        ordinary: finds the best plan of stages in the model's order.
        asked: what is planned.
        runners_up: how many other plans to report.
        ways: to ask besides.

    Raises:
        InfeasibleError: that of the ordinary search, where no other way has a plan that fits either.
    """
    try:
        first = ordinary()
    except InfeasibleError as error:
        found = _fitting(_plans(ways, asked))
        if not found:
            raise error
        return _led(found, runners_up)
    found = _plans(ways, replace(asked, ordinary=first)) if ways else []
    if not found:
        return first
    quicker = [plan for plan in _fitting(found) if seconds_of(plan) < seconds_of(first) * (1.0 - _ROUNDING)]
    others = [plan for plan in found if not any(plan is one for one in quicker)]
    return _led([*quicker, first, *others], runners_up)


def _plans(ways: Sequence[Way], asked: Asked) -> list[Plan]:
    """Of all ways, quickest first."""
    return sorted((plan for way in ways for plan in way(asked)), key=seconds_of)


def _fitting(plans: Sequence[Plan]) -> list[Plan]:
    return [plan for plan in plans if plan.fits]


def _led(plans: Sequence[Plan], wanted: int) -> Plan:
    """The first of some plans, with the others told beside it, then their alternatives."""
    told = {summary(plan): _told(plan) for plan in reversed(plans)}
    for other in (other for plan in plans for other in plan.alternatives):
        told.setdefault(other.summary, other)
    del told[summary(plans[0])]
    ways, rest = [told.pop(summary(plan)) for plan in plans[1:] if summary(plan) in told], list(told.values())
    kept = [*ways, *rest][: max(wanted, 0)]
    kept.sort(key=lambda other: (not other.fits, other.step_seconds))
    return replace(plans[0], alternatives=tuple(kept))


def _told(plan: Plan) -> Alternative:
    peak = plan.prediction.peak_memory if plan.prediction else 0
    return Alternative(summary(plan), seconds_of(plan), peak, bool(plan.fits))


def seconds_of(plan: Plan) -> float:
    """Of a step; infinite without a prediction."""
    return plan.prediction.step_seconds if plan.prediction else float("inf")
