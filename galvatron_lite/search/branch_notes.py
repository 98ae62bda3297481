"""What a plan with branches on devices of their own says of itself: what each gains, and what there is otherwise."""

from __future__ import annotations

from galvatron_lite.plans.describe import device_range
from galvatron_lite.plans.schema import Mode, Plan
from galvatron_lite.search.result import summary
from galvatron_lite.units import format_seconds


def branch_notes(plan: Plan, ordinary: Plan | None) -> tuple[str, ...]:
    """A line on all branches, and what they gain over the ordinary plan.

    Args:
        plan: with its prediction.
        ordinary: the best plan without; None where none fits.
    """
    apart = ", ".join(f"{one.name} on {device_range(one)} ({format_seconds(one.seconds)})" for one in plan.branches)
    return (f"independent branches run at the same time: {apart}; {_gain(plan, ordinary)}",)


def _gain(plan: Plan, ordinary: Plan | None) -> str:
    if plan.prediction is None:
        return "nothing is predicted"
    if ordinary is None or ordinary.prediction is None:
        return "without, no plan fits the budget"
    what = "a pass" if plan.mode is Mode.INFERENCE else "a step"
    own, other = plan.prediction.step_seconds, ordinary.prediction.step_seconds
    otherwise = f"{format_seconds(other)} without ({summary(ordinary)})"
    return f"{what} takes {format_seconds(own)} instead of {otherwise}: {other / own:.2f}x"
