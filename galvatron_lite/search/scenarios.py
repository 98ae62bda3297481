"""How long a step of a plan may take where things are not as the cost model assumes.

Scenarios are slow links, less that hides, other kernels, and stragglers. Nobody has measured these on a cluster that is
planned for by its data sheet; how far they go is the spread that constants fitted to published runs have
(``spread_of``). Each plan is priced again by the closed form under each scenario; its simulated time changes in
proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.cluster.cluster import Level
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.step import bound_seconds, price_stages, shape_of, straggling, strategies_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import OriginKind, Profile

_OVERLAPPING = ("data", "zero")
"""Causes of communication that hides fully where a profile says nothing."""
_INSIDE = ("nvlink", "pcie")
"""How the names of links inside a node begin."""
_HARDLY = 0.1
"""A share of what hides up to which software is documented not to overlap: no fit says so."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How far the constants of a cost model may be from those that a run meets."""

    links: float  # factor on the bandwidth beyond a node
    hidden: float  # factor on what compute hides
    kernels: float  # share by which kernels may be slower or quicker
    straggling: float  # relative growth of the step time with each doubling of nodes (``Profile.straggling``)


def spread_of(calibration: Calibration) -> Spread:
    """The spread of constants over link types and software stacks that were fitted to published runs, and the average
    error of step times where the software was not seen (``expected_error``).

    Links and hiding: the least fitted constant over the greatest. Stragglers: the greatest fitted one. All of entries
    that rest on rows of ``profiles/published/runs.jsonl``, as ``configs/calibration`` says of each.
    """
    fitted = {name for name, origin in calibration.origins.items() if origin.rows}
    links = [
        link.efficiency
        for name, link in calibration.links.items()
        if f"links/{name}" in fitted and not name.startswith(_INSIDE)
    ]
    stacks = [stack for name, stack in calibration.stacks.items() if f"stacks/{name}" in fitted]
    shares = [stack.hidden.get(cause, 0.0) for stack in stacks for cause in _OVERLAPPING]
    hidden = [share for share in shares if share > _HARDLY]
    return Spread(
        links=min(links, default=1.0) / max(links, default=1.0),
        hidden=min(hidden, default=1.0) / max(hidden, default=1.0),
        kernels=calibration.expected_error.get("without_family", 0.0),
        straggling=max((stack.straggling for stack in stacks), default=0.0),
    )


@cache
def _shipped_spread() -> Spread:
    return spread_of(load_calibration())


@dataclass(frozen=True, slots=True)
class Range:
    """Seconds of a step over all scenarios."""

    least: float
    most: float
    mean: float  # the expected step: all scenarios are equally likely


def ranges_of(pricer: LayerPricer, plans: Sequence[Plan]) -> list[Range]:
    """The range of each plan.

    Args:
        pricer: of the profile.
        plans: with their predictions.
    """
    varied_pricers = [
        LayerPricer(profile, works=pricer.works, sizes=pricer.sizes, points=pricer.points, compute=compute)
        for profile, compute in scenarios_of(pricer.profile)
    ]
    worst = max(pricer.profile.straggling, _shipped_spread().straggling)
    straggler, ranges = replace(pricer.profile, straggling=worst), list[Range]()
    for plan in plans:
        strategies = strategies_of(plan, pricer.profile)
        shape, sizes = shape_of(plan, strategies), [sum(run.count for run in stage.runs) for stage in plan.stages]
        assumed, *varied = (
            bound_seconds(each.profile, shape, price_stages(each, shape, sizes, strategies, memory=False))
            for each in (pricer, *varied_pricers)
        )
        step = plan.prediction.step_seconds if plan.prediction else assumed
        late = straggling(straggler, plan.devices) / straggling(pricer.profile, plan.devices)
        seconds = [step, *(step * other / assumed for other in varied), step * late]
        ranges.append(Range(min(seconds), max(seconds), sum(seconds) / len(seconds)))
    return ranges


def scenarios_of(profile: Profile) -> list[tuple[Profile, float]]:
    """The profile under each scenario but stragglers, with a factor on its compute: slow links, less hidden, and quick
    or slow kernels where these were estimated, not measured."""
    cluster, spread = profile.cluster, _shipped_spread()
    first = min(1, len(cluster.levels) - 1)
    node = cluster.levels[0].size if first else 1

    def slowed(levels: Sequence[Level]) -> tuple[Level, ...]:
        return tuple(
            replace(level, bandwidth=spread.links * level.bandwidth) if place >= first else level
            for place, level in enumerate(levels)
        )

    groups = tuple(replace(group, levels=slowed(group.levels)) for group in cluster.groups)
    near = [(point.group - 1) * point.stride < node for point in profile.fits]
    fits = (
        fit if inside else replace(fit, bandwidth=spread.links * fit.bandwidth)
        for fit, inside in zip(profile.fits, near, strict=True)
    )
    slow = replace(
        profile, cluster=replace(cluster, levels=slowed(cluster.levels), groups=groups), fits=tuple(fits),
        collectives=tuple(point for point in profile.collectives if (point.group - 1) * point.stride < node),
    )  # fmt: skip
    shares = {**dict.fromkeys(_OVERLAPPING, 1.0), **profile.hidden}
    shown = replace(profile, hidden={cause: spread.hidden * share for cause, share in shares.items()})
    kernels = (1.0 - spread.kernels, 1.0 + spread.kernels) if profile.origin.kind is OriginKind.ESTIMATED else ()
    return [(slow, 1.0), (shown, 1.0), *((profile, factor) for factor in kernels)]
