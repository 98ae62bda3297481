"""One strategy on so many devices, priced by the planner's cost model. No torch here.

Compute is at the shape that a device really works on, communication that compute hides costs nothing, and memory is the
worst moment of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from galvatron_lite.cost.groups import busy_seconds, groups_of
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.stage import StageCost
from galvatron_lite.cost.step import straggling
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.oracle.case import Kind
from galvatron_lite.oracle.laid import Laid, by_pixels, laid_out
from galvatron_lite.oracle.machine import Machine
from galvatron_lite.oracle.question import Question
from galvatron_lite.oracle.rows import Loudest, Row, iterations_of
from galvatron_lite.plans.schema import MemoryBreakdown


def row_of(machine: Machine, question: Question) -> Row:
    """The figures of a row; one that cannot be run says why."""
    row = Row(
        question.name or question.kind.value, question.devices, question.global_batch,
        iterations_of(question.samples, question.global_batch),
    )  # fmt: skip
    try:
        pricer = machine.pricer(question.devices)
        priced = laid_out(pricer, question)
    except InputError as error:
        return replace(row, problem=str(error))
    return _filled(row, pricer, question, priced)


def _filled(row: Row, pricer: LayerPricer, question: Question, priced: Laid) -> Row:
    """The row with an epoch's seconds: of the slowest group of devices."""
    profile, shape, costs = pricer.profile, priced.shape, priced.costs
    groups = groups_of(shape, costs)
    ends = busy_seconds(profile, shape, costs)
    alone = max(end + sum(one.step for one in group) for end, group in zip(ends, groups, strict=True))
    seconds = (alone + profile.overhead.step) * straggling(profile, question.devices)
    works = [sum(_compute(one) for one in group) * shape.microbatches for group in groups]
    slowest = groups[works.index(max(works))]
    layers = [one for cost in slowest for one in cost.layers]
    update = sum(one.update for one in layers)
    host = profile.overhead.step + seconds - seconds / straggling(profile, question.devices)
    left = max(seconds - max(works) - update - priced.moved.total, 0.0)
    waiting = max(left - host, 0.0) if len(costs) > 1 else 0.0
    count, memory = row.iterations, max((cost.memory for cost in costs), key=lambda one: one.total)
    return replace(
        row,
        compute=count * max(works),
        moved=priced.moved.times(count),
        update=count * update,
        waiting=count * waiting,
        other=count * (left - waiting),
        memory=memory.total,
        capacity=profile.cluster.device.memory,
        whole=_alike(question, memory),
        loudest=_loudest(profile.graph, question, costs),
        uneven=max(works) * len(works) / max(sum(works), 1e-30),
        twice=priced.alike,
        shared=1 if len(costs) > 1 else question.width,
    )


def _compute(cost: StageCost) -> float:
    return sum(layer.forward + layer.backward + layer.recompute for layer in cost.layers)


def _loudest(graph: ModelGraph, question: Question, costs: Sequence[StageCost]) -> Loudest:
    """The layers whose communication is exposed longest; of a pipeline the last one of the stage that sends longest."""
    layers = [one for cost in costs for one in cost.layers]
    if len(costs) > 1:
        ends = list(accumulate(len(cost.layers) for cost in costs))
        slow = max(range(len(costs)), key=lambda stage: costs[stage].times.send_forward)
        return Loudest(messages=graph.layers[ends[slow] - 1].name)
    once = _named(graph, [one.step_exposed for one in layers])
    inner = _named(graph, [one.forward_exposed + one.backward_exposed for one in layers])
    near = by_pixels(question)
    return Loudest(once, "" if near else inner, inner if near else "")


def _named(graph: ModelGraph, seconds: Sequence[float]) -> str:
    """The layer with the most seconds; empty where all are 0."""
    most = max(seconds)
    return graph.layers[seconds.index(most)].name if most > 0 else ""


def _alike(question: Question, memory: MemoryBreakdown) -> float:
    """Bytes that all devices of a group, or all replicas, hold alike: weights, or whole activations."""
    states = memory.parameters + memory.gradients + memory.optimizer
    match question.kind:
        case Kind.FILTER | Kind.CHANNEL | Kind.DATA_FILTER:
            return float(memory.activations)
        case Kind.SERIAL | Kind.PIPELINE | Kind.LAYER:
            return 0.0
    return float(states)
