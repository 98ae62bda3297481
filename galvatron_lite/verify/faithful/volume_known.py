"""By how much what is sent is known to differ from what is priced, and why. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.layout import layout, received
from galvatron_lite.model.graph import Layer, Recompute, Role
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.verify.faithful.layers import Planned
from galvatron_lite.verify.schema import ParameterSplit, RoleRun

_REPEATED = "Checkpointing stops at the last tensor that backward needs: the last sum of a layer is not repeated."
_AROUND = (
    "Code between layers works on whole tokens as its edge layer splits samples, so what it looks at goes there and "
    "back; context parallelism gives a rank an early and a late piece, priced as one."
)
_NO_WAY_BACK = "Layers before it have no parameters: what they hand on needs no gradient, which is priced."
_LOGITS = "Code behind the last layer splits samples as the first one does: it looks at whole logits, not at shares."
_STILL_THERE = "The backward pass of the last layer follows its forward at once: what ZeRO-3 gathered is still there."
_LOOSE = "Parameters that no module of the layer holds are not shared out; their gradients are summed as replicas' are."


@dataclass(frozen=True, slots=True)
class Allowance:
    """Bytes by which a class may be below and above what is priced, and why."""

    why: str
    less: float = 0.0
    more: float = 0.0


def allowances(
    pricer: LayerPricer, planned: Planned, group: int, runs: Sequence[RoleRun], layers: Sequence[Layer]
) -> Mapping[str, Sequence[Allowance]]:
    """By class, of one group of devices, of which these are runs of a model's layers, for a step."""
    times, stages = planned.plan.microbatches, planned.stages_of(group)
    names = [planned.stages[stage] for stage in stages]
    repeated = sum(_not_repeated(pricer, planned, name) for own in names for name in own)
    logits = sum(_looked_at(planned, own) for own in names) * times
    around = sum(sum(_detours(planned, own)) + _inside_edges(planned, own) for own in names) * times
    inside = sum(_no_way_back(planned, own) for own in names) * times
    between = sum(_not_sent_back(planned, own) for own in names) * times
    here = {name for own in names for name in own}
    gathered = sum(_gathered_once(pricer, planned, name, here) for name in here)
    apart, summed = _loose(pricer, planned, runs, layers)
    found = {
        "zero": (Allowance(_STILL_THERE, less=gathered), Allowance(_LOOSE, less=apart)),
        "data": (Allowance(_LOOSE, more=summed),),
        "tensor": (Allowance(_REPEATED, less=repeated), Allowance(_LOGITS, more=logits)),
        "redistribution": (
            Allowance(_AROUND, more=around), Allowance(_NO_WAY_BACK, less=inside), Allowance(_LOGITS, more=logits),
        ),
        "pipeline": (Allowance(_NO_WAY_BACK, less=between),),
    }  # fmt: skip
    return {name: [one for one in own if one.less or one.more] for name, own in found.items()}


def _gathered_once(pricer: LayerPricer, planned: Planned, name: str, here: Collection[str]) -> float:
    """Bytes that ZeRO-3 is priced to gather again for the backward pass of a last layer, of all micro-batches."""
    strategy = planned.strategies[name]
    if planned.layers[name].role is not Role.AFTER or strategy.zero_stage != 3:
        return 0.0
    work = pricer.work(planned.kind_on(name, here), strategy, planned.plan.microbatch)
    backward = [one for one in work.communications if one.cause == "zero" and one.moment is Moment.BACKWARD]
    again = [once(one) * float(one.count) for one in backward if one.collective is Collective.ALL_GATHER]
    return sum(again) * planned.plan.microbatches


def _loose(
    pricer: LayerPricer, planned: Planned, runs: Sequence[RoleRun], layers: Sequence[Layer]
) -> tuple[float, float]:
    """Of parameters outside of their layers' modules, of one rank: bytes that ZeRO is priced to move, and bytes of the
    sums of their gradients instead."""
    apart = summed = 0.0
    run = {layer.name: (layer, name) for layer, name in zip(layers, planned.layers, strict=True)}
    for split in runs[0].splits if runs else ():
        layer, name = run[split.layer]
        strategy = planned.strategies[name]
        items = sum(prod(one.held) for one in split.parameters)
        out = sum(prod(one.held) for one in split.parameters if not _is_inside(one, layer) and not one.sharded)
        if strategy.state_shards > 1 and out:
            work = pricer.work(planned.kind(name), strategy, planned.plan.microbatch)
            zero = [one for one in work.communications if one.cause == "zero"]
            moved = sum(once(one) * float(one.count) * _times(one, planned) for one in zero)
            apart, summed = apart + moved * min(out / items, 1.0), summed + 2 * 4 * out
    return apart, summed


def _is_inside(one: ParameterSplit, layer: Layer) -> bool:
    return any(one.name.startswith(f"{path}.") for path in layer.modules)


def _times(one: Communication, planned: Planned) -> int:
    return 1 if one.moment is Moment.STEP else planned.plan.microbatches


def _looked_at(planned: Planned, names: Sequence[str]) -> float:
    """Bytes of a micro-batch's logits that tensor ranks gather, where the edge layers of a stage split unlike."""
    edges = [name for name in names if planned.layers[name].role is not Role.BLOCK]
    last = planned.strategies[names[-1]]
    kind = planned.kind(names[-1])
    if last.tensor == 1 or len(edges) < 2 or layout(planned.strategies[edges[0]]) == layout(last):
        return 0.0
    return kind.gathered_output_bytes * planned.plan.microbatch / last.token_degree


def _no_way_back(planned: Planned, names: Sequence[str]) -> float:
    """Bytes of a micro-batch that go to another layout inside a stage, and whose gradients nobody needs: up to all that
    is priced, of the mean of both ways, where forward has nothing to send."""
    return sum(
        2 * size * planned.plan.microbatch * share(*_strategies(planned, left, right))
        for left, right, size in _moves(planned, names)
        if not _trains(planned, left + 1)
    )


def _not_sent_back(planned: Planned, names: Sequence[str]) -> float:
    """Bytes of a micro-batch that a stage was given by stages whose layers have no parameters."""
    start = list(planned.layers).index(names[0])
    if start == 0 or _trains(planned, start):
        return 0.0
    return boundary_bytes(planned.graph.crossing(start), planned.plan.microbatch, _strategies(planned, start - 1)[0])


def _trains(planned: Planned, count: int) -> bool:
    """Whether any of the first layers has parameters."""
    return any(planned.kind(name).parameters.total for name in list(planned.layers)[:count])


def _strategies(planned: Planned, *places: int) -> list[Strategy]:
    chosen = list(planned.strategies.values())
    return [chosen[place] for place in places]


def _moves(planned: Planned, names: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Places of layers between which tensors go in a stage and into it, and bytes a sample."""
    places = {name: place for place, name in enumerate(planned.layers)}
    inside = range(places[names[0]], places[names[-1]] + 1)
    if inside.start:
        yield inside.start - 1, inside.start, planned.graph.crossing(inside.start)
    yield from planned.graph.exchanges(inside)


def _not_repeated(pricer: LayerPricer, planned: Planned, name: str) -> float:
    """Bytes of the last sum of a layer's forward, of all micro-batches, if it recomputes."""
    strategy = planned.strategies[name]
    if strategy.recompute is Recompute.NONE or strategy.tensor == 1:
        return 0.0
    work = pricer.work(planned.kind(name), strategy, planned.plan.microbatch)
    sums = [one for one in work.communications if one.moment is Moment.FORWARD and one.cause == "tensor" and one.count]
    ends = [one for one in sums if one.collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)]
    return max(map(once, ends), default=0.0) * planned.plan.microbatches


def once(one: Communication) -> float:
    """Wire bytes of one of these collectives."""
    ways = int(one.group.size)
    whole = {Collective.ALL_REDUCE: 2 * (ways - 1) / ways, Collective.BROADCAST: 1.0, Collective.SEND_RECV: 1.0}
    return float(one.size) * whole.get(one.collective, (ways - 1) / ways)


def _detours(planned: Planned, names: Sequence[str]) -> Iterator[float]:
    """Bytes of a micro-batch that may go beyond those priced: both ways of every tensor of a stage."""
    chosen = list(planned.strategies.values())
    between = _between(planned, names)
    for left, right, size in _moves(planned, names):
        moved = 2 * size * planned.plan.microbatch
        edges = {list(planned.layers.values())[place].role for place in (left, right)} - {Role.BLOCK}
        direct = share(chosen[left], chosen[right])
        if edges:
            around = share(chosen[left], between) + share(between, chosen[right])
            yield moved * max(around - direct, 0.0)
        elif chosen[left].context != chosen[right].context:
            yield moved * max((_held(chosen[left]) + _held(chosen[right])) / 2 - direct, 0.0)


def _inside_edges(planned: Planned, names: Sequence[str]) -> float:
    """Bytes of a micro-batch that code between the modules of an edge layer may have brought to it, and back."""
    between, places, total = _between(planned, names), list(planned.layers), 0.0
    for name in names:
        layer, cut = planned.layers[name], places.index(name)
        if layer.role is not Role.BLOCK and len(layer.modules) > 1:
            size = max(planned.graph.crossing(cut), planned.graph.crossing(cut + 1)) * planned.plan.microbatch
            total += 4 * size * (len(layer.modules) - 1) * share(planned.strategies[name], between)
    return total


def _between(planned: Planned, names: Sequence[str]) -> Strategy:
    """How code between a stage's layers splits samples: as its first edge layer, or first block, does."""
    first = next((name for name in names if planned.layers[name].role is not Role.BLOCK), names[0])
    own = planned.strategies[first]
    return Strategy(data=own.batch_degree, tensor=own.devices // own.batch_degree)


def _held(strategy: Strategy) -> float:
    """Share of a tensor that lies on a device."""
    tokens = strategy.tensor if strategy.sequence_parallel else 1
    return 1 / prod((strategy.token_degree, tokens))


def share(left: Strategy, right: Strategy) -> float:
    """Of a tensor, what the device that gets most gets from others, the mean of both directions."""
    return float(received(np.array(layout(left)), np.array(layout(right))))
