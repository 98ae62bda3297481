"""Plans from the choices of a search, their provenance, and a plan in a line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from galvatron_lite.cluster.budget import Budget, as_budget, bytes_on
from galvatron_lite.model.graph import Layer, ModelGraph
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.describe import device_range
from galvatron_lite.plans.schema import (
    DEFAULT_SCHEDULE,
    PLAN_VERSION,
    LayerRun,
    Plan,
    Proof,
    Provenance,
    Schedule,
    Stage,
)
from galvatron_lite.profiler.schema import Profile

_MOST_STRATEGIES, _MOST_BRANCHES = 2, 4
"""Strategies and branches that ``summary`` names."""


def runs_of(layers: Sequence[Layer], strategies: Sequence[Strategy]) -> tuple[LayerRun, ...]:
    """Layers of one stage as runs of equal strategy; runs end where the role of the layers changes."""
    pairs = zip(layers, strategies, strict=True)
    groups = [list(group) for _, group in groupby(pairs, key=lambda pair: (pair[1], pair[0].role))]
    return tuple(LayerRun(group[0][0].name, group[-1][0].name, len(group), group[0][1]) for group in groups)


def plan_of(
    graph: ModelGraph,
    *,
    devices: int,
    global_batch: int,
    microbatches: int,
    cuts: Sequence[int],
    strategies: Sequence[Strategy],
    schedule: Schedule = DEFAULT_SCHEDULE,
) -> Plan:
    """A plan without prediction.

    Args:
        graph: the model.
        devices: world size.
        global_batch: samples a step.
        microbatches: a step.
        cuts: places where stages start, and the number of layers: (0, ..., L).
        strategies: of every layer.
        schedule: order of micro-batches.
    """
    stages = tuple(Stage(runs_of(graph.layers[a:b], strategies[a:b])) for a, b in pairwise(cuts))
    return Plan(PLAN_VERSION, graph.name, devices, global_batch, microbatches, schedule, graph.precision, stages)


def summary(plan: Plan) -> str:
    """What a plan does, in a short line: its pipeline, its two most used strategies and by how many layers they are
    used, branches on devices of their own, and its micro-batches."""
    if plan.cyclic is not None:
        return f"delayed gradients ({plan.cyclic.rule.value}, {plan.cyclic.setting.value}), {len(plan.stages)} stages"
    layers: dict[str, int] = {}
    for run in (run for stage in plan.stages for run in stage.runs):
        layers[str(run.strategy)] = layers.get(str(run.strategy), 0) + run.count
    used = sorted(layers.items(), key=lambda item: (-item[1], item[0]))
    strategies = [name if len(used) == 1 else f"{name} ({count})" for name, count in used[:_MOST_STRATEGIES]]
    groups, virtual = len(plan.stages) // plan.virtual_stages, plan.virtual_stages
    pipeline = [f"pipeline {groups}{f' of {virtual} stages each' * (virtual > 1)}"] if len(plan.stages) > 1 else []
    parts = f"{plan.microbatches} micro-batch{'es' * (plan.microbatches > 1)}"
    apart = [f"{branch.name} on {device_range(branch)}" for branch in plan.branches[:_MOST_BRANCHES]]
    more = ["…"] * (len(plan.branches) > _MOST_BRANCHES)
    return ", ".join([*pipeline, *strategies, *["…"] * (len(used) > _MOST_STRATEGIES), *apart, *more, parts])


def provenance(profile: Profile, budget: int | Budget, gap: float, tolerance: float = 0.0) -> Provenance:
    """The provenance of a plan whose step another plan may shorten by the share ``gap``; up to the tolerance it counts
    as proven. The budget is bytes a device, or of each type of device."""
    from galvatron_lite import __version__
    from galvatron_lite.profiler.store import profile_hash

    return Provenance(
        galvatron=__version__,
        profile=profile.name,
        profile_hash=profile_hash(profile),
        profile_origin=f"{profile.origin.kind.value}: {profile.origin.source}",
        cluster=profile.cluster.name,
        fingerprint=dict(profile.cluster.fingerprint),
        budget=bytes_on(budget, ""),
        budgets=dict(as_budget(budget).by_device),
        proof=Proof.FEASIBLE if gap > tolerance * (1.0 + 1e-6) else Proof.PROVEN,
        gap=gap,
        parameters=profile.graph.parameters,
        stack=profile.stack,
        trains=profile.graph.trains,
    )
