"""What a plan of any kind costs: in stages, with branches on separate devices, or cyclic."""

from __future__ import annotations

from galvatron_lite.cost.branched import price_branched
from galvatron_lite.cost.cyclic import price_cyclic
from galvatron_lite.cost.forward_only import for_mode
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.step import price_staged
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile


def evaluate(profile: Profile, plan: Plan) -> Plan:
    """Return the plan with its prediction: step time, memory of every stage, and where both go.

    Raises:
        InputError: the plan does not fit the profile's model, or its numbers do not divide.
    """
    return price_plan(LayerPricer(for_mode(profile, plan.mode)), plan)


def price_plan(pricer: LayerPricer, plan: Plan) -> Plan:
    """``evaluate`` with a pricer, which remembers what it has priced."""
    if plan.branches:
        return price_branched(pricer, plan)
    return price_staged(pricer, plan) if plan.cyclic is None else price_cyclic(pricer, plan)
