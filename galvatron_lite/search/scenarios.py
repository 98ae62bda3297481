"""What plans cost where things are not as the cost model assumes: slow links, less that hides, other kernels.

Nobody has measured these on a cluster that is planned for by its data sheet. Each plan is priced again by the closed
form under each scenario; what that is more or less than as assumed, its simulated time is, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from galvatron_lite.cost.groups import price_stages
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.stage import Shape
from galvatron_lite.cost.step import bound_seconds, shape_of, strategies_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import LayerPoint, OriginKind, Profile

LINKS, HIDDEN, KERNELS = 0.5, 0.6, 0.1
"""Factors on the bandwidth beyond a node and on what compute hides, and by how much kernels are quicker or slower: the
average error of estimated step times of published runs is about as much."""
_OVERLAPPING = ("data", "zero")
"""Causes of communication that hides wholly where a profile says nothing."""


@dataclass(frozen=True, slots=True)
class Range:
    """Seconds of a step over all scenarios."""

    least: float  # least, most: of any
    most: float
    mean: float  # the expected step, all alike


def ranges_of(pricer: LayerPricer, plans: Sequence[Plan]) -> list[Range]:
    """The range of each plan, which has its prediction."""
    profile = pricer.profile
    others = [LayerPricer(other) for other in scenarios_of(profile)]
    found = []
    for plan in plans:
        strategies = strategies_of(plan, profile)
        shape = shape_of(plan, strategies)
        assumed = _seconds(pricer, plan, shape, strategies)
        step = plan.prediction.step_seconds if plan.prediction else assumed
        seconds = [step, *(step * _seconds(other, plan, shape, strategies) / assumed for other in others)]
        found.append(Range(min(seconds), max(seconds), sum(seconds) / len(seconds)))
    return found


def _seconds(pricer: LayerPricer, plan: Plan, shape: Shape, strategies: Sequence[Strategy]) -> float:
    sizes = [sum(run.count for run in stage.runs) for stage in plan.stages]
    return bound_seconds(pricer.profile, shape, price_stages(pricer, shape, sizes, strategies, memory=False))


def scenarios_of(profile: Profile) -> list[Profile]:
    """The profile as it would be under each scenario; kernels that were measured are as they are."""
    found = [_slow_links(profile), _less_hidden(profile)]
    if profile.origin.kind is OriginKind.ESTIMATED:
        found += [_kernels(profile, 1.0 - KERNELS), _kernels(profile, 1.0 + KERNELS)]
    return found


def _slow_links(profile: Profile) -> Profile:
    cluster = profile.cluster
    inside = list(accumulate((level.size for level in cluster.levels), mul))
    first = min(1, len(inside) - 1)
    node = inside[0] if first else 1
    levels = [
        replace(level, bandwidth=LINKS * level.bandwidth) if place >= first else level
        for place, level in enumerate(cluster.levels)
    ]
    groups = tuple(
        replace(group, levels=tuple(
            replace(level, bandwidth=LINKS * level.bandwidth) if place >= first else level
            for place, level in enumerate(group.levels)
        ))
        for group in cluster.groups
    )  # fmt: skip
    far = [fit for fit in profile.fits if (fit.group - 1) * fit.stride >= node]
    fits = tuple(replace(fit, bandwidth=LINKS * fit.bandwidth) if fit in far else fit for fit in profile.fits)
    near = tuple(point for point in profile.collectives if (point.group - 1) * point.stride < node)
    slow = replace(cluster, levels=tuple(levels), groups=groups)
    return replace(profile, cluster=slow, fits=fits, collectives=near)


def _less_hidden(profile: Profile) -> Profile:
    shares = {**dict.fromkeys(_OVERLAPPING, 1.0), **profile.hidden}
    return replace(profile, hidden={cause: HIDDEN * share for cause, share in shares.items()})


def _kernels(profile: Profile, factor: float) -> Profile:
    def scaled(points: Sequence[LayerPoint]) -> tuple[LayerPoint, ...]:
        return tuple(replace(one, forward=factor * one.forward, backward=factor * one.backward) for one in points)

    types = tuple(replace(one, layers=scaled(one.layers)) for one in profile.types)
    return replace(profile, layers=scaled(profile.layers), types=types)
