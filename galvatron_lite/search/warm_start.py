"""Plans that the user already has: the search starts from them, so that what it ends with is no worse."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from galvatron_lite.cost.groups import price_stages
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.cost.step import bound_seconds, shape_of, straggling, strategies_of
from galvatron_lite.errors import InputError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.search.best_first import SolvedPlan
from galvatron_lite.search.problem import Partition, StagePlan
from galvatron_lite.search.shapes import Request, open_problem
from galvatron_lite.search.tables import ticks


def given_plans(request: Request, pricer: LayerPricer, plans: Sequence[Plan]) -> tuple[SolvedPlan, ...]:
    """The plans that fit the budget and keep the pins, as what a search might have ended with, quickest first.

    They need not be in the declared space: what its rules leave out is priced all the same.

    Raises:
        InputError: a plan of other devices or another batch, of another model, or that cannot be run on it.
    """
    for plan in plans:
        for name in ("devices", "global_batch"):
            if getattr(plan, name) != getattr(request, name):
                raise InputError(f"known plan, {name}", getattr(plan, name), f"Asked is {getattr(request, name)}.")
        if plan.cyclic is not None:
            raise InputError("known plan, cyclic", plan.cyclic.rule.value, "The search finds such plans itself.")
    wanted = (plan for plan in plans if _keeps(request, pricer, plan) and request.fits(price_plan(pricer, plan)))
    return tuple(sorted((_as_result(request, pricer, plan) for plan in wanted), key=lambda found: found.partition.time))


def _keeps(request: Request, pricer: LayerPricer, plan: Plan) -> bool:
    """Whether a plan has what is pinned, and nothing that the backend does not run."""
    fixed, backend = request.fixed, request.space.backend
    pins = (
        (fixed.pipeline, plan.pipeline),
        (fixed.microbatches, plan.microbatches),
        (fixed.schedule if plan.pipeline > 1 else None, plan.schedule),
        (fixed.virtual if plan.pipeline > 1 else None, plan.virtual_stages),
    )
    if any(pin is not None and pin != value for pin, value in pins):
        return False
    if plan.pipeline > 1 and ("pipeline" in fixed.forbidden or plan.schedule not in request.schedules):
        return False
    pairs = zip(request.graph.layers, strategies_of(plan, pricer.profile), strict=True)
    return all(backend.runs(own) and fixed.allows(own) and fixed.allows_in(layer.name, own) for layer, own in pairs)


def _as_result(request: Request, pricer: LayerPricer, plan: Plan) -> SolvedPlan:
    """A plan with its closed form, in the search's own unit."""
    strategies = strategies_of(plan, pricer.profile)
    shape = shape_of(plan, strategies)
    sizes = [sum(run.count for run in stage.runs) for stage in plan.stages]
    seconds = bound_seconds(pricer.profile, shape, price_stages(pricer, shape, sizes, strategies))
    work = seconds / straggling(pricer.profile, plan.devices) - pricer.profile.overhead.step
    cuts = (0, *accumulate(sizes))
    stages = tuple(StagePlan((), 0, tuple(strategies[a:b])) for a, b in pairwise(cuts))
    return SolvedPlan(open_problem(request, pricer, shape), Partition(ticks(work), cuts, stages), given=True)
