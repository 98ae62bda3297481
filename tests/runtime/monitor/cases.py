"""A model of a wide block, a profile of it, and windows that a machine that differs from it would give."""

from __future__ import annotations

from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.graph import Recompute
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import LayerPoint, Profile
from galvatron_lite.runtime.monitor.adaptive import probe_points
from galvatron_lite.runtime.monitor.correct import corrected, predicted_groups
from galvatron_lite.runtime.monitor.planning import plain
from galvatron_lite.runtime.monitor.schema import (
    LOG_VERSION,
    Adapt,
    Corrections,
    LayerGroup,
    LinkPoint,
    Started,
    StepWindow,
)
from galvatron_lite.search.planner import find_plan
from tests.factories import make_cluster, make_graph, make_kind, make_profile

BATCH = 16
PARAMETERS = 200_000


def wide_profile(devices: int = 2) -> Profile:
    """Blocks whose parameters are many for their work: replicas pay as long as the link is quick."""
    seconds = {"before": 1e-4, "block": 2e-3, "after": 1e-4}
    kinds = [make_kind(name, PARAMETERS if name == "block" else 1000, boundary=4000) for name in seconds]
    points = [
        LayerPoint(
            kind.name, samples, 1, False, Recompute.NONE,
            seconds[kind.name] * samples, 2 * seconds[kind.name] * samples,
            1000 * samples, 1500 * samples, 1200 * samples,
        )
        for kind in kinds
        for samples in (1, 2, 4, 8, 16)
    ]  # fmt: skip
    graph = make_graph(kinds, ["before", *["block"] * 4, "after"])
    return make_profile(graph, points, make_cluster(devices, bandwidth=1e9, latency=1e-5))


def fastest(profile: Profile) -> Plan:
    """The plan of a profile."""
    return find_plan(profile, devices=profile.cluster.devices, global_batch=BATCH, budget=2**29)


def started(settings: Adapt, profile: Profile | None = None) -> Started:
    """What a log begins with."""
    known = profile or wide_profile()
    return Started(LOG_VERSION, settings, known, fastest(known))


def window_on(
    profile: Profile, truth: Corrections, plan: Plan, step: int, noise: float = 0.0, links: bool = True
) -> StepWindow:
    """What a machine that differs from the profile by ``truth`` shows under a plan."""
    real = corrected(profile, truth)
    prediction = evaluate(real, plain(plan)).prediction
    seconds = prediction.step_seconds * truth.residual * (1.0 + noise)
    sizes = [(probe, size) for probe, points in probe_points(profile) for size, _ in points]
    real_points = {(name, size): value for name, points in probe_points(real, profile) for size, value in points}
    said = {(name, size): value for name, points in probe_points(profile) for size, value in points}
    found = tuple(
        LinkPoint(name, size, real_points[name, size] * (1.0 + noise), said[name, size]) for name, size in sizes
    )
    groups = _groups(real, truth, profile, plan)
    return StepWindow(step, (0.98 * seconds, seconds, 1.02 * seconds), groups, (), found if links else ())


def _groups(real: Profile, truth: Corrections, profile: Profile, plan: Plan) -> tuple[LayerGroup, ...]:
    """Forward passes as each rank's factor makes them."""
    found = []
    stages = {run.first: number for number, stage in enumerate(plan.stages) for run in stage.runs}
    for name, seconds in predicted_groups(corrected(profile, Corrections(truth.links)), plan).items():
        first = stages[name] * plan.stage_devices
        ranks = tuple(range(first, first + plan.stage_devices))
        factors = truth.devices or (1.0,) * real.cluster.devices
        found.append(LayerGroup(name, ranks, tuple(seconds * factors[rank] for rank in ranks)))
    return tuple(found)
