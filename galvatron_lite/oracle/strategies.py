"""Chooses the strategy of each layer for a method of the oracle or for a strategy written in full.

A layer that cannot be split by the full degree is split as far as possible; the other devices of its group take other
samples or, if the batch has too few, repeat the same work. Among several splits of the layers, the cheapest
combination is chosen, the cost of changing layouts between layers included.
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
"""Fields of ``Strategy`` by the methods that split channels."""


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The strategy of a layer."""

    strategy: Strategy  # over all devices
    duplicates: int = 1  # devices of its group that repeat the same work


def degree_of(kind: Method, strategy: Strategy) -> int:
    """Return the degree by which a strategy splits a layer in the dimension of a method."""
    return strategy.slices if kind in SLICES else strategy.spatial


def widest_strategies(layer: LayerKind, kind: Method, group: int, batch: int) -> list[Strategy]:
    """Return the strategies of a group of devices that split a layer by the largest degree that its batch allows."""
    wanted = dict(_PLAIN)
    axes = (SLICES[kind],) if kind in SLICES else _PIXELS
    wanted |= {name: (1,) for name in ("filters", "channels", *_PIXELS) if name not in axes}
    strategies = strategies_for(layer, group, narrowed=Narrowed(wanted))
    legal = [strategy for strategy in strategies if batch % strategy.data == 0]
    most = max((degree_of(kind, strategy) for strategy in legal), default=0)
    return [strategy for strategy in legal if degree_of(kind, strategy) == most]


def _within(layer: LayerKind, outer: Strategy, inner: Strategy) -> Strategy:
    """Return the strategy of a group with the replicas, shards and, if offered, recomputation of another."""
    recompute = outer.recompute if outer.recompute in layer.kept else Recompute.NONE
    data = inner.data * outer.data
    return replace(inner, data=data, zero=outer.zero, zero_stage=outer.zero_stage, recompute=recompute)


def _simplified(layer: LayerKind, strategy: Strategy) -> Strategy | None:
    """Return the strategy if it is legal, else without recomputation or sequence parallelism, which layers before and
    after the blocks do not offer; None if neither is legal."""
    full_sequence, kept = {"sequence_parallel": False}, {"recompute": Recompute.NONE}
    for changes in ({}, kept, full_sequence, kept | full_sequence):
        candidate = replace(strategy, **changes)
        if legal(layer, candidate):
            return candidate
    return None


def legal(layer: LayerKind, strategy: Strategy) -> bool:
    """Whether a strategy is legal for a kind of layer, with any number of replicas."""
    inner = replace(strategy, data=1)
    values: dict[str, tuple[object, ...]] = {item.name: (getattr(inner, item.name),) for item in fields(inner)}
    return inner in strategies_for(layer, inner.devices, narrowed=Narrowed(values))


def method_of(strategy: Strategy) -> Method | None:
    """Return the method by which a strategy splits convolutions; None if it does not."""
    if strategy.spatial > 1:
        return Method.SPATIAL
    if strategy.slices > 1:
        return Method.FILTER if strategy.filters > 1 else Method.CHANNEL
    return None


def check_strategy(strategy: Strategy, kinds: Mapping[str, LayerKind]) -> None:
    """Refuse a strategy that no layer of a model can be split by."""
    if any(_simplified(kind, strategy) for kind in kinds.values()):
        return
    degrees = {name: allowed_degrees(kind) for name, kind in kinds.items()}
    text = "; ".join(f"{name}: {words}" for name, words in degrees.items() if words)
    raise InputError("--strategy", str(strategy), f"No layer can be split so. They allow {text or 'no such split'}.")


def allowed_degrees(layer: LayerKind) -> str:
    """Return the largest degrees that a kind of layer can be split by, for people; empty if it cannot be split."""
    degrees = dict.fromkeys(("tensor", "height", "width", "filters", "channels"), 1)
    for group in (2, 3, 4, 8, 16, 32, 64):
        narrowed = Narrowed({**_PLAIN, "tensor": (1, group), "data": (1,)})
        for strategy in strategies_for(layer, group, narrowed=narrowed):
            degrees = {name: max(most, getattr(strategy, name)) for name, most in degrees.items()}
    return ", ".join(f"{name} up to {most}" for name, most in degrees.items() if most > 1)


PricedChoice = tuple[float, LayerChoice]  # seconds of a step in a layer, and its choice


def choose_strategies(pricer: LayerPricer, question: RowQuestion) -> list[LayerChoice]:
    """Return the choices of all layers, by a shortest path that includes redistribution between adjacent layers.

    Tensors that skip layers are left out: they are few, and priced once the choices are fixed.
    """
    graph = pricer.profile.graph
    choices = {name: choices_of(pricer, question, name) for name in graph.kinds}
    sizes = {right: size for left, right, size in graph.exchanges(range(len(graph.layers))) if right == left + 1}
    paths: list[tuple[float, tuple[LayerChoice, ...]]] = [(0.0, ())]  # the shortest one to each choice of a layer
    for number, layer in enumerate(graph.layers):
        size, longer = sizes.get(number, 0), []
        for seconds, choice in choices[layer.kind]:
            candidates = [
                (total + (redistribution_seconds(pricer, question, size, path[-1], choice) if path else 0.0), path)
                for total, path in paths
            ]
            total, path = min(candidates, key=lambda pair: pair[0])
            longer.append((total + seconds, (*path, choice)))
        paths = longer
    return list(min(paths, key=lambda pair: pair[0])[1])


def choices_of(pricer: LayerPricer, question: RowQuestion, name: str) -> list[PricedChoice]:
    """Return the choices of a kind of layer: all widest splits by a method, or as much of a strategy as is legal."""
    layer, strategy = pricer.profile.graph.kinds[name], question.strategy
    if strategy is None:
        if question.width == 1:
            return [(0.0, LayerChoice(Strategy(data=question.devices)))]
        return _widest_choices(pricer, question, name, question.kind, Strategy(data=question.replicas), question.width)
    method, simplified = method_of(strategy), _simplified(layer, strategy)
    if simplified is not None:
        return [(0.0, LayerChoice(simplified))]
    if method is None or strategy.tensor * strategy.context > 1:
        raise InputError("--strategy", str(strategy), f"{name} allows {allowed_degrees(layer) or 'replicas only'}.")
    # keep replicas, shards and recomputation; the devices that share convolutions split the layer as far as possible
    outer = replace(strategy, depth=1, height=1, width=1, filters=1, channels=1)
    return _widest_choices(pricer, question, name, method, outer, strategy.spatial * strategy.slices)


def _widest_choices(
    pricer: LayerPricer, question: RowQuestion, name: str, kind: Method, outer: Strategy, group: int
) -> list[PricedChoice]:
    """Return the widest splits of a layer among a group within ``outer``; without one the group repeats the work."""
    layer = pricer.profile.graph.kinds[name]
    choices = list[PricedChoice]()
    for inner in _group_strategies(pricer, layer, kind, group, question.batch):
        strategy = _within(layer, outer, inner)
        cost = pricer.price(name, strategy, question.global_batch, 1)
        if cost is not None:
            seconds = cost.forward_seconds + cost.backward_seconds + cost.step_seconds
            choices.append((seconds, LayerChoice(strategy)))
    return choices or [(0.0, LayerChoice(_within(layer, outer, Strategy(data=group)), duplicates=group))]


def _group_strategies(pricer: LayerPricer, layer: LayerKind, kind: Method, group: int, batch: int) -> list[Strategy]:
    """Return the strategies of a group; software that gathers pictures after each convolution has a single one."""
    if kind not in SLICES or not pricer.profile.pictures.gathers_each:
        return widest_strategies(layer, kind, group, batch)
    by = SLICES[kind]
    sliced = Strategy(filters=group) if by == "filters" else Strategy(channels=group)
    return [sliced] if each_divides(layer, by, group) else []


def total_redistribution_seconds(pricer: LayerPricer, question: RowQuestion, chosen: Sequence[LayerChoice]) -> float:
    """Return the seconds of a step for changing layouts between layers, in forward and backward."""
    graph = pricer.profile.graph
    return sum(
        redistribution_seconds(pricer, question, size, chosen[left], chosen[right])
        for left, right, size in graph.exchanges(range(len(graph.layers)))
    )


def redistribution_seconds(
    pricer: LayerPricer, question: RowQuestion, size: int, left: LayerChoice, right: LayerChoice
) -> float:
    """Return the seconds to redistribute a tensor of ``size`` bytes a sample between two layers, and its gradient back.

    If a group repeats work on one side, it gathers the tensor, or its gradient, in one direction only.
    """
    if left == right or not size:
        return 0.0
    if left.duplicates == right.duplicates == 1:
        return 2 * pricer.redistribution(size, question.global_batch, left.strategy, right.strategy)
    ranks = RankGroup(question.width, 1, question.replicas)
    size *= question.batch
    gather = Communication(Collective.ALL_GATHER, size, ranks, Moment.FORWARD, overlaps=False, cause=LAYOUT)
    return float(pricer.links.seconds(gather))
