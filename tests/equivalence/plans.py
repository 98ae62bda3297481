"""Random plans from the planner's own space, and what makes them legal."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.backends import GALVATRON
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.search.space import Fixed as Free
from galvatron_lite.search.space import Narrowed, pipeline_degrees, strategies_for
from tests.schedules import EXECUTABLE

Stages = Sequence[Sequence[str]]


def write_plan(
    stages: Stages,
    strategies: Mapping[str, Strategy],
    *,
    devices: int,
    batch: int,
    microbatches: int = 1,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    virtual: int = 1,
) -> Plan:
    """A plan by hand: names of each stage's layers, and the strategy of every layer."""
    written = tuple(Stage(tuple(LayerRun(name, name, 1, strategies[name]) for name in names)) for names in stages)
    plan = Plan(PLAN_VERSION, "tiny", devices, batch, microbatches, schedule, "fp32", written)
    return replace(plan, virtual_stages=virtual)


def uniform_plan(graph: ModelGraph, block: Strategy, edge: Strategy | None = None, **fields: int) -> Plan:
    """One stage; one strategy for all blocks, one for the layers around them (the same without recomputation)."""
    plain = edge or Strategy(block.data, block.zero, block.zero_stage, block.tensor)
    strategies = {layer.name: block if layer.role is Role.BLOCK else plain for layer in graph.layers}
    return write_plan([list(strategies)], strategies, devices=block.devices, **fields)


def sample_plan(graph: ModelGraph, devices: int, batch: int, seed: int, whole: bool = False, *, most: int = 4) -> Plan:
    """A random legal plan: pipeline degree and boundaries, a strategy for every layer, micro-batches, schedule.

    Args:
        graph, devices, batch: what is planned.
        seed: of what is drawn.
        whole: the batch in one go, as batch norms take the statistics of each micro-batch by itself.
        most: micro-batches for each group of devices of the pipeline.
    """
    draw = random.Random(f"{graph.name} {devices} {batch} {seed}")
    names = [layer.name for layer in graph.layers]
    count = draw.choice(pipeline_degrees(devices, len(names), Free()))
    schedule, virtual = _sample_schedule(count, len(names), draw)
    cuts = sorted(draw.sample(range(1, len(names)), count * virtual - 1))
    stages = [names[start:stop] for start, stop in pairwise([0, *cuts, len(names)])]
    strategies = _sample_strategies(graph, devices // count, len(stages), draw, schedule)
    unit = math.lcm(*(strategy.batch_degree for strategy in strategies.values()))
    microbatches = draw.choice(
        [number for number in divisors(batch // unit) if number <= most * count and not whole] or [1]
    )
    sizes = {"devices": devices, "batch": batch, "microbatches": microbatches, "virtual": virtual}
    return write_plan(stages, strategies, schedule=schedule, **sizes)


def _sample_schedule(groups: int, layers: int, draw: random.Random) -> tuple[Schedule, int]:
    """A schedule, and stages of each group of devices, that the layers suffice for."""
    schedule = draw.choice(EXECUTABLE) if groups > 1 else Schedule.ONE_F_ONE_B
    virtual = {Schedule.INTERLEAVED: draw.choice((2, 3)), Schedule.ZERO_BUBBLE_V: 2}.get(schedule, 1)
    return (schedule, virtual) if groups * virtual <= layers else (Schedule.ONE_F_ONE_B, 1)


def _sample_strategies(
    graph: ModelGraph, devices: int, stages: int, draw: random.Random, schedule: Schedule
) -> dict[str, Strategy]:
    """Any strategy for every block. Layers that share parameters are treated alike; in a single stage the layers before
    and after the blocks split samples and matmuls alike.
    """
    runnable = Narrowed(GALVATRON.values)
    choices = {
        name: [one for one in sorted(strategies_for(kind, devices, narrowed=runnable)) if _runs(one, schedule, stages)]
        for name, kind in graph.kinds.items()
    }
    chosen = {layer.name: draw.choice(choices[layer.kind]) for layer in graph.layers}
    first, last = graph.layers[0].name, graph.layers[-1].name
    if stages == 1 and chosen[first].tensor > 1:
        split = chosen[first].batch_degree, chosen[first].tensor
        alike = [s for s in choices[graph.layers[-1].kind] if (s.batch_degree, s.tensor) == split]
        chosen[last] = draw.choice(alike)
    _tie(graph, chosen, choices, draw)
    return chosen


def _tie(
    graph: ModelGraph, chosen: dict[str, Strategy], choices: Mapping[str, Sequence[Strategy]], draw: random.Random
) -> None:
    """Layers that share parameters take the first's strategy; one that all of them may have."""
    kinds = {layer.name: layer.kind for layer in graph.layers}
    for first in {tie.first: None for tie in graph.ties}:
        others = [tie.second for tie in graph.ties if tie.first == first]
        both = [one for one in choices[kinds[first]] if all(one in choices[kinds[other]] for other in others)]
        if chosen[first] not in both:
            chosen[first] = draw.choice(both)
        chosen.update(dict.fromkeys(others, chosen[first]))


def _runs(strategy: Strategy, schedule: Schedule, stages: int) -> bool:
    asked = GALVATRON.required(schedule) if stages > 1 else ()
    return GALVATRON.combines(strategy) and all(getattr(strategy, name) == value for name, value in asked)


def describe(plan: Plan) -> str:
    """A plan in a line, for messages."""
    stages = [" ".join(f"[{run.strategy}]" for run in stage.runs) for stage in plan.stages]
    return f"{plan.devices} devices, {plan.microbatches} x {plan.microbatch} {plan.schedule}: {' | '.join(stages)}"
