"""The strategy of every layer for one of the oracle's words or for a strategy in full.

A layer that cannot be split that many ways is split as far as it can be; the rest of its group takes other samples,
and where the batch has too few, every device of the group works through all of them. Of several ways to split the
layers, those that together cost least are chosen, with the cost of changing layouts between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.layer import LAYOUT, LayerPricer
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, Recompute
from galvatron_lite.oracle.rows import Method, RowQuestion
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.channel.parts import each_divides
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.search.space import Narrowed, strategies_for

_PLAIN: dict[str, tuple[object, ...]] = {
    "zero": (1,),
    "zero_stage": (0,),
    "tensor": (1,),
    "sequence_parallel": (False,),
    "recompute": (Recompute.NONE,),
    "context": (1,),
    "expert": (1,),
    "expert_tensor": (0,),
    "ulysses": (False,),
    "offload": (Offload.NONE,),
}
_PIXELS = ("depth", "height", "width")
SLICES = {Method.FILTER: "filters", Method.DATA_FILTER: "filters", Method.CHANNEL: "channels"}
"""Fields of ``Strategy`` by the oracle's words for sharing channels."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What one kind of layer does."""

    strategy: Strategy  # over all devices
    alike: int = 1  # devices of its group that all do the same work; 1 where each has work of its own


def degree_of(kind: Method, strategy: Strategy) -> int:
    """Ways that a strategy splits a layer as the oracle's word says."""
    return strategy.slices if kind in SLICES else strategy.spatial


def options(layer: LayerKind, kind: Method, group: int, batch: int) -> list[Strategy]:
    """Strategies of a group for a kind of layer, those first that split it most ways; none where the batch is small."""
    wanted = dict(_PLAIN)
    axes = (SLICES[kind],) if kind in SLICES else _PIXELS
    wanted |= {name: (1,) for name in ("filters", "channels", *_PIXELS) if name not in axes}
    strategies = strategies_for(layer, group, narrowed=Narrowed(wanted))
    legal = [strategy for strategy in strategies if batch % strategy.data == 0]
    most = max((degree_of(kind, one) for one in legal), default=0)
    return [one for one in legal if degree_of(kind, one) == most]


def _inside(layer: LayerKind, outer: Strategy, inner: Strategy) -> Strategy:
    """A group's strategy within the replicas, shards and recomputation of another, where the layer offers that."""
    again = outer.recompute if outer.recompute in layer.kept else Recompute.NONE
    return replace(inner, data=inner.data * outer.data, zero=outer.zero, zero_stage=outer.zero_stage, recompute=again)


def _eased(layer: LayerKind, strategy: Strategy) -> Strategy | None:
    """The strategy, where the layer allows it; else without what edges of a model do without; None where neither."""
    plain_tokens, kept = {"sequence_parallel": False}, {"recompute": Recompute.NONE}
    for changes in ({}, kept, plain_tokens, kept | plain_tokens):
        easier = replace(strategy, **changes)
        if legal(layer, easier):
            return easier
    return None


def legal(layer: LayerKind, strategy: Strategy) -> bool:
    """Whether a kind of layer can be split as a strategy says; how many replicas there are does not matter."""
    inner = replace(strategy, data=1)
    values: dict[str, tuple[object, ...]] = {item.name: (getattr(inner, item.name),) for item in fields(inner)}
    return inner in strategies_for(layer, inner.devices, narrowed=Narrowed(values))


def family_of(strategy: Strategy) -> Method | None:
    """The oracle's word for how a strategy splits convolutions; None where it does not."""
    if strategy.spatial > 1:
        return Method.SPATIAL
    if strategy.slices > 1:
        return Method.FILTER if strategy.filters > 1 else Method.CHANNEL
    return None


def check_text(strategy: Strategy, kinds: Mapping[str, LayerKind]) -> None:
    """Whether any layer of a model can be split as a strategy says."""
    if any(_eased(kind, strategy) for kind in kinds.values()):
        return
    ways = {name: allowed(kind) for name, kind in kinds.items()}
    text = "; ".join(f"{name}: {count}" for name, count in ways.items() if count)
    raise InputError("--strategy", str(strategy), f"No layer can be split so. They allow {text or 'no such split'}.")


def allowed(layer: LayerKind) -> str:
    """The most ways that a kind of layer can be split, for people; empty where it cannot be."""
    degrees = dict.fromkeys(("tensor", "height", "width", "filters", "channels"), 1)
    for group in (2, 3, 4, 8, 16, 32, 64):
        for one in strategies_for(layer, group, narrowed=Narrowed({**_PLAIN, "tensor": (1, group), "data": (1,)})):
            degrees = {name: max(most, getattr(one, name)) for name, most in degrees.items()}
    return ", ".join(f"{name} up to {most}" for name, most in degrees.items() if most > 1)


Way = tuple[float, Chosen]  # seconds of a step in a layer, and what it does


def picked(pricer: LayerPricer, question: RowQuestion) -> list[Chosen]:
    """What every layer does: the shortest way through all choices, tensors that go to the next layer counted.

    Tensors that pass over layers are not: they are few, and priced once all is chosen.
    """
    graph = pricer.profile.graph
    ways = {name: ways_of(pricer, question, name) for name in graph.kinds}
    sizes = {right: size for left, right, size in graph.exchanges(range(len(graph.layers))) if right == left + 1}
    ends: list[tuple[float, tuple[Chosen, ...]]] = [(0.0, ())]
    for place, layer in enumerate(graph.layers):
        size, further = sizes.get(place, 0), []
        for seconds, chosen in ways[layer.kind]:
            arrived = [
                (before + (move_seconds(pricer, question, size, passed[-1], chosen) if passed else 0.0), passed)
                for before, passed in ends
            ]
            before, passed = min(arrived, key=lambda pair: pair[0])
            further.append((before + seconds, (*passed, chosen)))
        ends = further
    return list(min(ends, key=lambda end: end[0])[1])


def ways_of(pricer: LayerPricer, question: RowQuestion, name: str) -> list[Way]:
    """What a kind of layer may do: all ways to split it the most, or as much of a strategy as it allows."""
    layer, strategy = pricer.profile.graph.kinds[name], question.strategy
    if strategy is None:
        if question.width == 1:
            return [(0.0, Chosen(Strategy(data=question.devices)))]
        return _widest(pricer, question, name, question.kind, Strategy(data=question.replicas), question.width)
    family, easier = family_of(strategy), _eased(layer, strategy)
    if easier is not None:
        return [(0.0, Chosen(easier))]
    if family is None or strategy.tensor * strategy.context > 1:
        raise InputError("--strategy", str(strategy), f"{name} allows {allowed(layer) or 'replicas only'}.")
    # replicas, shards and recomputation alone; the devices that share convolutions split it the most they can
    outer = replace(strategy, depth=1, height=1, width=1, filters=1, channels=1)
    return _widest(pricer, question, name, family, outer, strategy.spatial * strategy.slices)


def _widest(
    pricer: LayerPricer, question: RowQuestion, name: str, kind: Method, outer: Strategy, group: int
) -> list[Way]:
    """The ways to split a layer the most among a group, _inside replicas; alike where there is none."""
    layer = pricer.profile.graph.kinds[name]
    widest = [
        (cost.forward_seconds + cost.backward_seconds + cost.step_seconds, Chosen(one))
        for option in _options(pricer, layer, kind, group, question.batch)
        for one in (_inside(layer, outer, option),)
        if (cost := pricer.price(name, one, question.global_batch, 1)) is not None
    ]
    return widest or [(0.0, Chosen(_inside(layer, outer, Strategy(data=group)), alike=group))]


def _options(pricer: LayerPricer, layer: LayerKind, kind: Method, group: int, batch: int) -> list[Strategy]:
    """A group's strategies; software that brings pictures together behind every convolution has one only."""
    if kind not in SLICES or not pricer.profile.pictures.gathers_each:
        return options(layer, kind, group, batch)
    by = SLICES[kind]
    sliced = Strategy(filters=group) if by == "filters" else Strategy(channels=group)
    return [sliced] if each_divides(layer, by, group) else []


def moving_seconds(pricer: LayerPricer, question: RowQuestion, chosen: Sequence[Chosen]) -> float:
    """Seconds of a step in which tensors change their layout between layers, both ways."""
    graph = pricer.profile.graph
    return sum(
        move_seconds(pricer, question, size, chosen[left], chosen[right])
        for left, right, size in graph.exchanges(range(len(graph.layers)))
    )


def move_seconds(pricer: LayerPricer, question: RowQuestion, size: int, left: Chosen, right: Chosen) -> float:
    """Seconds to bring a tensor of so many bytes a sample from one layer's layout to another's, and its gradient back.

    Where a group works alike on one side, it gathers the tensor or its gradient; the other way each keeps its part.
    """
    if left == right or not size:
        return 0.0
    if left.alike == right.alike == 1:
        return 2 * pricer.redistribution(size, question.global_batch, left.strategy, right.strategy)
    ranks = RankGroup(question.width, 1, question.replicas)
    size *= question.batch
    gather = Communication(Collective.ALL_GATHER, size, ranks, Moment.FORWARD, overlaps=False, cause=LAYOUT)
    return float(pricer.links.seconds(gather))
