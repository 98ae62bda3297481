"""Runner-ups: what other, well-known shapes of plan would have cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.registry import SHAPES
from galvatron_lite.plans.schema import Alternative, Plan
from galvatron_lite.search.best_first import finished, search
from galvatron_lite.search.result import summary
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed

UNBOUNDED = 2**60


def alternatives(request: Request, pricer: LayerPricer, plan: Plan, wanted: int) -> tuple[Alternative, ...]:
    """Up to ``wanted`` runner-ups, quickest of those that fit first; each is a good plan of its shape,
    not a proven one.

    A shape of which no plan is met that fits is reported with its quickest plan, marked as not fitting.
    """
    if wanted < 1:
        return ()
    found: dict[str, Alternative] = {}
    for name, fixed in _others(request, plan):
        option = _best_of(replace(request, fixed=fixed), pricer, name)
        if option is not None and option.summary.partition(": ")[2] != summary(plan):
            found.setdefault(option.summary.partition(": ")[2], option)
    ordered = sorted(found.values(), key=lambda option: (not option.fits, option.step_seconds, option.summary))
    return tuple(ordered[:wanted])


def _others(request: Request, plan: Plan) -> Iterator[tuple[str, Fixed]]:
    """Named shapes without a pipeline, then the neighbouring pipeline degrees of the plan."""
    if request.fixed != Fixed():
        return
    if request.devices > 1:
        for name, fields in SHAPES:
            yield name, Fixed(pipeline=1, strategy=tuple(fields.items()))
    degrees = [degree for degree in divisors(request.devices) if degree <= len(request.graph.layers)]
    here = degrees.index(len(plan.stages))
    for degree in degrees[max(here - 1, 0) : here] + degrees[here + 1 : here + 2]:
        yield f"pipeline {degree}" if degree > 1 else "no pipeline", Fixed(pipeline=degree)


def _best_of(request: Request, pricer: LayerPricer, name: str) -> Alternative | None:
    for budget in (request.budget, UNBOUNDED):
        try:
            found = search(replace(request, budget=budget), pricer, exact=False)
        except InputError:
            return None
        if found is not None:
            break
    else:
        return None
    plan = finished(request, pricer, found)
    if plan.prediction is None:
        return None
    seconds, peak = plan.prediction.step_seconds, plan.prediction.peak_memory
    return Alternative(f"{name}: {summary(plan)}", seconds, peak, peak <= request.budget)
