"""The strategies of a model's layers: of the ways to split each, those that together cost least, moves counted.

No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.layer import LAYOUT, LayerPricer
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.oracle.case import Kind
from galvatron_lite.oracle.chosen import SLICES, Chosen, allowed, eased, family_of, inside, options, plain
from galvatron_lite.oracle.question import Question
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.channel.each import each_divides
from galvatron_lite.parallelism.strategy import Strategy

Way = tuple[float, Chosen]
"""Seconds of a step in a layer, and what it does."""


def picked(pricer: LayerPricer, question: Question) -> list[Chosen]:
    """What every layer does: the shortest way through all choices, tensors that go to the next layer counted.

    Tensors that pass over layers are not: they are few, and priced once all is chosen.

    Raises:
        InputError: the model cannot be split so.
    """
    graph = pricer.profile.graph
    ways = {name: ways_of(pricer, question, name) for name in graph.kinds}
    sizes = {right: size for left, right, size in graph.exchanges(range(len(graph.layers))) if right == left + 1}
    ends: list[tuple[float, tuple[Chosen, ...]]] = [(0.0, ())]
    for place, layer in enumerate(graph.layers):
        ends = [_arrived(pricer, question, sizes.get(place, 0), ends, way) for way in ways[layer.kind]]
    return list(min(ends, key=lambda end: end[0])[1])


def _arrived(
    pricer: LayerPricer, question: Question, size: int, ends: Sequence[tuple[float, tuple[Chosen, ...]]], way: Way
) -> tuple[float, tuple[Chosen, ...]]:
    """The shortest way that ends in a choice."""
    seconds, chosen = way
    found = [
        (before + (move_seconds(pricer, question, size, passed[-1], chosen) if passed else 0.0), passed)
        for before, passed in ends
    ]
    before, passed = min(found, key=lambda pair: pair[0])
    return before + seconds, (*passed, chosen)


def ways_of(pricer: LayerPricer, question: Question, name: str) -> list[Way]:
    """What a kind of layer may do: all of the ways to split it the most.

    Raises:
        InputError: it cannot be split so at all.
    """
    if question.strategy is not None:
        return _given(pricer, question, name, question.strategy)
    if question.width == 1:
        return [(0.0, Chosen(Strategy(data=question.devices)))]
    return _widest(pricer, question, name, question.kind, Strategy(data=question.replicas), question.width)


def _given(pricer: LayerPricer, question: Question, name: str, strategy: Strategy) -> list[Way]:
    """A strategy that is given, where the layer allows it; else as much of it as it does.

    Raises:
        InputError: it cannot be split so at all.
    """
    layer, family = pricer.profile.graph.kinds[name], family_of(strategy)
    easier = eased(layer, strategy)
    if easier is not None:
        return [(0.0, Chosen(easier))]
    if family is None or strategy.tensor * strategy.context > 1:
        raise InputError("--strategy", str(strategy), f"{name} allows {allowed(layer) or 'replicas only'}.")
    outer = replace(plain(strategy), data=strategy.data)
    return _widest(pricer, question, name, family, outer, strategy.spatial * strategy.slices)


def _widest(pricer: LayerPricer, question: Question, name: str, kind: Kind, outer: Strategy, group: int) -> list[Way]:
    """The ways to split a layer the most among a group, inside replicas; alike where there is none."""
    layer = pricer.profile.graph.kinds[name]
    found = [
        (cost.forward_seconds + cost.backward_seconds + cost.step_seconds, Chosen(one))
        for option in _options(pricer, layer, kind, group, question.batch)
        for one in (inside(layer, outer, option),)
        if (cost := pricer.price(name, one, question.global_batch, 1)) is not None
    ]
    return found or [(0.0, Chosen(inside(layer, outer, Strategy(data=group)), alike=group))]


def _options(pricer: LayerPricer, layer: LayerKind, kind: Kind, group: int, batch: int) -> list[Strategy]:
    """A group's strategies; software that brings pictures together behind every convolution has one only."""
    if kind not in SLICES or not pricer.profile.pictures.gathers_each:
        return options(layer, kind, group, batch)
    by = SLICES[kind]
    own = Strategy(filters=group) if by == "filters" else Strategy(channels=group)
    return [own] if each_divides(layer, by, group) else []


def moving_seconds(pricer: LayerPricer, question: Question, chosen: Sequence[Chosen]) -> float:
    """Seconds of a step in which tensors change their layout between layers, both ways."""
    graph = pricer.profile.graph
    return sum(
        move_seconds(pricer, question, size, chosen[left], chosen[right])
        for left, right, size in graph.exchanges(range(len(graph.layers)))
    )


def move_seconds(pricer: LayerPricer, question: Question, size: int, left: Chosen, right: Chosen) -> float:
    """Seconds to bring a tensor of so many bytes a sample from one layer's layout to another's, and its gradient back.

    Where a group works alike on one side, it gathers the tensor or its gradient; the other way each keeps its part.
    """
    if left == right or not size:
        return 0.0
    if left.alike == right.alike == 1:
        return 2 * pricer.redistribution(size, question.global_batch, left.strategy, right.strategy)
    ranks = RankGroup(question.width, 1, question.replicas)
    size *= question.batch
    whole = Communication(Collective.ALL_GATHER, size, ranks, Moment.FORWARD, overlaps=False, cause=LAYOUT)
    return float(pricer.links.seconds(whole))
