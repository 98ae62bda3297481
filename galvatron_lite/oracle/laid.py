"""How a model's layers lie on devices under one strategy, and what they and their communication cost. No torch here.

Layers are split as ``chosen`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from galvatron_lite.cluster.cluster import RankGroup
from galvatron_lite.cost.groups import price_stages
from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.memory import group_memory
from galvatron_lite.cost.schedule import StageTimes
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer
from galvatron_lite.oracle.case import Kind, Moved
from galvatron_lite.oracle.chosen import Chosen, allowed, eased, family_of, inside, options, plain
from galvatron_lite.oracle.question import Question
from galvatron_lite.oracle.stages import least_runs
from galvatron_lite.parallelism.base import Collective, Communication, Moment, Strategy
from galvatron_lite.plans.schema import Schedule


@dataclass(frozen=True, slots=True)
class Laid:
    """Stages with what of their seconds is what.

    Attributes:
        shape: of the plan.
        costs: of the stages.
        moved: seconds of a step.
        alike: share of compute that several devices do alike.
    """

    shape: Shape
    costs: tuple[StageCost, ...]
    moved: Moved
    alike: float = 0.0


def laid_out(pricer: LayerPricer, question: Question) -> Laid:
    """The stages of a question's strategy, priced.

    Raises:
        InputError: the model cannot be laid out so.
    """
    in_turn = question.kind in (Kind.PIPELINE, Kind.LAYER)
    return _pipeline(pricer, question) if in_turn else _stage(pricer, question)


def _stage(pricer: LayerPricer, question: Question) -> Laid:
    """All layers on all devices."""
    graph = pricer.profile.graph
    chosen = {name: chosen_for(pricer, question, name) for name in graph.kinds}
    picked = [chosen[layer.kind] for layer in graph.layers]
    layers = [_price(pricer, question, one, own) for one, own in zip(graph.layers, picked, strict=True)]
    moving = _moving(pricer, question, picked)
    times = StageTimes(
        sum(one.forward_seconds for one in layers) + moving / 2 + pricer.profile.overhead.microbatch / 2,
        sum(one.backward_seconds for one in layers) + moving / 2 + pricer.profile.overhead.microbatch / 2,
    )
    memory = group_memory([layers], ((1,),), 1, 0, pricer.profile.cluster.device.context)
    cost = StageCost(tuple(layers), times, sum(one.step_seconds for one in layers), moving, memory)
    inner = sum(one.forward_exposed + one.backward_exposed for one in layers)
    moved = Moved(gradients=sum(one.step_exposed for one in layers), gather=moving)
    moved = replace(moved, halo=inner) if by_pixels(question) else replace(moved, layers=inner)
    alike = sum(_work(one) for one, own in zip(layers, picked, strict=True) if own.alike > 1)
    shape = Shape(question.devices, 1, 1, question.global_batch)
    return Laid(shape, (cost,), moved, alike / max(sum(map(_work, layers)), 1e-30))


def _work(layer: LayerCost) -> float:
    return layer.forward + layer.backward + layer.recompute


def by_pixels(question: Question) -> bool:
    """Whether devices share the pixels of samples."""
    if question.strategy is not None:
        return family_of(question.strategy) is Kind.SPATIAL
    return question.kind in (Kind.SPATIAL, Kind.DATA_SPATIAL)


def chosen_for(pricer: LayerPricer, question: Question, name: str) -> Chosen:
    """What a kind of layer does: of the ways to split it the most, the cheapest."""
    if question.strategy is not None:
        return _given(pricer, question, name, question.strategy)
    if question.width == 1:
        return Chosen(Strategy(data=question.devices))
    return _widest(pricer, question, name, question.kind, Strategy(data=question.replicas), question.width)


def _given(pricer: LayerPricer, question: Question, name: str, strategy: Strategy) -> Chosen:
    """A strategy that is given, where the layer allows it; else as much of it as it does.

    Raises:
        InputError: it cannot be split so at all.
    """
    layer, family = pricer.profile.graph.kinds[name], family_of(strategy)
    easier = eased(layer, strategy)
    if easier is not None:
        return Chosen(easier)
    if family is None or strategy.tensor * strategy.context > 1:
        raise InputError("--strategy", str(strategy), f"{name} allows {allowed(layer) or 'replicas only'}.")
    group = strategy.spatial * strategy.slices
    outer = replace(plain(strategy), data=strategy.data)
    return _widest(pricer, question, name, family, outer, group)


def _widest(pricer: LayerPricer, question: Question, name: str, kind: Kind, outer: Strategy, group: int) -> Chosen:
    """The cheapest of the ways to split a layer the most among a group, inside replicas; alike where there is none."""
    layer = pricer.profile.graph.kinds[name]
    found = [
        (sum(_seconds(cost)), number, one)
        for number, option in enumerate(options(layer, kind, group, question.batch))
        for one in (inside(layer, outer, option),)
        if (cost := pricer.price(name, one, question.global_batch, 1)) is not None
    ]
    if not found:
        return Chosen(inside(layer, outer, Strategy(data=group)), alike=group)
    return Chosen(min(found)[2])


def _seconds(cost: LayerCost) -> tuple[float, float, float]:
    return cost.forward_seconds, cost.backward_seconds, cost.step_seconds


def _price(pricer: LayerPricer, question: Question, layer: Layer, chosen: Chosen) -> LayerCost:
    """Where a group works alike, each of its devices has all of the group's samples.

    Raises:
        InputError: the strategy is not priced.
    """
    batch = question.global_batch * chosen.alike
    if batch % chosen.strategy.batch_degree:
        raise InputError("--batch", question.batch, f"{batch} samples do not divide over {chosen.strategy}.")
    cost = pricer.price(layer.kind, chosen.strategy, batch, 1)
    if cost is None:
        raise InputError("--strategy", str(chosen.strategy), f"{layer.name} has no figures for it.")
    return cost


def _moving(pricer: LayerPricer, question: Question, picked: Sequence[Chosen]) -> float:
    """Seconds of a step in which tensors change their layout between layers, both ways."""
    graph, group = pricer.profile.graph, question.width
    seconds = 0.0
    for left, right, size in graph.exchanges(range(len(graph.layers))):
        if picked[left] == picked[right]:
            continue
        if picked[right].alike > 1:
            whole = size * question.batch
            ranks = RankGroup(group, 1, question.replicas)
            gathered = Communication(Collective.ALL_GATHER, whole, ranks, Moment.FORWARD, overlaps=False)
            seconds += pricer.links.seconds(gathered)  # each keeps its part of the gradient, which is whole on it
        else:
            seconds += 2 * pricer.redistribution(
                size, question.global_batch, picked[left].strategy, picked[right].strategy
            )
    return seconds


def _pipeline(pricer: LayerPricer, question: Question) -> Laid:
    """Runs of layers of about equal time on a device each, the batch in segments (GPipe).

    Raises:
        InputError: more devices than layers.
    """
    graph, stages = pricer.profile.graph, question.devices
    parts = max(min(question.segments or stages, question.batch), 1) if question.kind is Kind.PIPELINE else 1
    while question.batch % parts:
        parts -= 1
    shape = Shape(stages, stages, parts, question.batch // parts, Schedule.GPIPE)
    if stages > len(graph.layers):
        raise InputError(
            "--gpus", stages, f"{graph.name} has {len(graph.layers)} layers; each stage takes one at least."
        )
    plain = [Strategy()] * len(graph.layers)
    costs = [pricer.price(layer.kind, Strategy(), shape.microbatch, stages) for layer in graph.layers]
    sizes = least_runs([_work(one) for one in costs if one is not None], stages)
    priced = tuple(price_stages(pricer, shape, sizes, plain))
    sends = sum(_sends(cost) for cost in priced) + (shape.microbatches - 1) * max(map(_sends, priced))
    return Laid(shape, priced, Moved(messages=sends if stages > 1 else 0.0))


def _sends(cost: StageCost) -> float:
    return cost.times.send_forward + cost.times.send_backward
