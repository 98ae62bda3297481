"""A plan for few processes that uses all that a large one does, each degree as small as it can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

from galvatron_lite.model.graph import LayerKind, Role
from galvatron_lite.parallelism.backends import GALVATRON
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.registry import pinned
from galvatron_lite.parallelism.strategy import Strategy, changed, degree_names
from galvatron_lite.plans.schema import LayerRun, Plan, Stage
from galvatron_lite.search.space import Narrowed, strategies_for

REPEATS = 2  # equal layers with equal strategies that are kept next to each other in a stage
MOST_LAYERS = 24  # layers beyond which only one is kept of such

Legal = Callable[[Strategy], bool]


@dataclass(frozen=True, slots=True)
class Spot:
    """A layer of the large model, and where its plan puts it."""

    name: str  # of the layer
    kind: str  # of the layer; consecutive layers of one kind can stand in for each other
    role: Role  # where it stands
    stage: int  # number of its stage
    strategy: Strategy  # what the plan does with it


@dataclass(frozen=True, slots=True)
class Size:
    """How many processes there are, and how they are shared out."""

    groups: int  # of devices that the stages are spread over
    devices: int  # of each group
    stages: int  # of the plan

    def stage_of(self, number: int, stages: int) -> int:
        """The stage that one of so many ``stages`` becomes part of."""
        return number * self.stages // stages


def features(strategy: Strategy) -> frozenset[str]:
    """What a strategy uses, whatever the degrees: ``tensor``, ``zero3``, ``full recomputation``."""
    return frozenset(name for one in pinned() for name in one.features(strategy))


def reductions(strategy: Strategy, devices: int) -> Iterator[Strategy]:
    """Strategies on so many devices that use nothing this one does not, each degree a divisor of its own."""
    names = [name for name in degree_names() if getattr(strategy, name) > 1]
    for degrees in product(*(divisors(getattr(strategy, name)) for name in names)):
        if math.prod(degrees) == devices:
            smaller = changed(strategy, dict(zip(names, degrees, strict=True)))
            for settings in product(*(one.shrunk(smaller, strategy) for one in pinned())):
                yield changed(smaller, {name: value for part in settings for name, value in part.items()})


def reduced(strategy: Strategy, devices: int, legal: Legal = lambda _: True) -> Strategy | None:
    """The strategy on so many devices that uses most of what this one does; None where none is legal."""

    def worth(smaller: Strategy) -> tuple[int, int, tuple[int, ...]]:
        degrees = tuple(getattr(smaller, name) for name in degree_names())  # they decide between equals
        return len(features(smaller)), -max(degrees), degrees

    return max(filter(legal, reductions(strategy, devices)), key=worth, default=None)


def choose_size(plan: Plan, strategies: Sequence[Strategy], processes: int) -> Size:
    """How few processes keep most of what a plan uses: the features of its strategies, its pipeline, its stages."""
    groups, devices = max(
        (
            (groups, devices)
            for groups in range(min(2, plan.pipeline), min(plan.pipeline, processes) + 1)
            for devices in divisors(plan.stage_devices)
            if groups * devices <= processes
        ),
        key=lambda size: (-len(unkept(strategies, size[1])), size[0], -size[0] * size[1]),
    )
    return Size(groups, devices, groups * min(plan.virtual_stages, 2))


def unkept(strategies: Sequence[Strategy], devices: int) -> list[str]:
    """What strategies use, and so many devices have no room for; all of one that fits on them in no way."""
    lost: list[str] = []
    for strategy in strategies:
        smaller, used = reduced(strategy, devices), features(strategy)
        lost += used - features(smaller) if smaller else {*used, "itself"}
    return lost


def kept_spots(spots: Sequence[Spot], size: Size) -> list[Spot]:
    """The layers that stay: of equal ones next to each other in a stage of the small plan a few, of others all."""
    stages = max(spot.stage for spot in spots) + 1

    def alike(spot: Spot) -> tuple[object, ...]:
        return size.stage_of(spot.stage, stages), spot.kind, spot.strategy, spot.role is Role.BLOCK

    runs = [list(run) for _, run in groupby(spots, alike)]
    for repeats in (REPEATS, 1):
        kept = [spot for run in runs for spot in (run[:repeats] if run[0].role is Role.BLOCK else run)]
        if len(kept) <= MOST_LAYERS:
            break
    return kept


def legal_for(kinds: Sequence[LayerKind], devices: int) -> Legal:
    """What the planner may do with layers of all these kinds on so many devices, and the runtime runs."""
    runnable = Narrowed(GALVATRON.values)
    offered = [set(strategies_for(kind, devices, narrowed=runnable)) for kind in kinds]
    return lambda strategy: GALVATRON.says(strategy) and all(strategy in one for one in offered)


def small_plan(
    plan: Plan, size: Size, kept: Sequence[Spot], names: Sequence[str], chosen: Mapping[str, Strategy]
) -> Plan:
    """The plan for the small model; ``chosen`` are strategies by names of the large model's layers."""
    layers: list[list[tuple[str, Strategy]]] = [[] for _ in range(size.stages)]
    for spot, name in zip(kept, names, strict=True):
        layers[size.stage_of(spot.stage, len(plan.stages))].append((name, chosen[spot.name]))
    stages = []
    for stage in layers:
        runs = [(strategy, [name for name, _ in run]) for strategy, run in groupby(stage, lambda layer: layer[1])]
        stages.append(Stage(tuple(LayerRun(run[0], run[-1], len(run), strategy) for strategy, run in runs)))
    microbatches = min(plan.microbatches, 2 * size.groups)
    return replace(
        plan,
        devices=size.groups * size.devices,
        global_batch=math.lcm(*(one.batch_degree for one in chosen.values())) * microbatches,
        microbatches=microbatches,
        precision="fp32",
        stages=tuple(stages),
        prediction=None,
        alternatives=(),
        left_out=(),
        provenance=None,
        virtual_stages=size.stages // size.groups,
        order=None,
    )


def differences(plan: Plan, small: Plan, pairs: Sequence[tuple[Strategy, Strategy]]) -> list[str]:
    """What the small plan has less of than the large one, a line each."""
    before, after = (
        f"{one.devices} devices, {len(one.stages)} stage{'s' * (len(one.stages) > 1)}, batch {one.global_batch} in "
        f"{one.microbatches} micro-batch{'es' * (one.microbatches > 1)}"
        for one in (plan, small)
    )
    lines = [f"plan: {before} -> {after}"]
    for large, smaller in pairs:
        lost = ", ".join(sorted(features(large) - features(smaller)))
        if large != smaller:
            lines.append(f"strategy: {large} -> {smaller}{lost and f'; not kept: {lost}'}")
    return lines
