"""How a model's layers lie on devices under one strategy, and what they and their communication cost. No torch here.

Layers are split as ``picks`` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from galvatron_lite.cost.groups import price_stages
from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.memory import group_memory
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer
from galvatron_lite.oracle.case import Kind, Moved
from galvatron_lite.oracle.chosen import Chosen, family_of
from galvatron_lite.oracle.picks import moving_seconds, picked
from galvatron_lite.oracle.question import Question
from galvatron_lite.oracle.stages import least_runs
from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.parallelism.strategy import Strategy
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
    graph, chosen = pricer.profile.graph, picked(pricer, question)
    layers = [_price(pricer, question, one, own) for one, own in zip(graph.layers, chosen, strict=True)]
    moving = moving_seconds(pricer, question, chosen)
    times = StageTimes(
        sum(one.forward_seconds for one in layers) + moving / 2 + pricer.profile.overhead.microbatch / 2,
        sum(one.backward_seconds for one in layers) + moving / 2 + pricer.profile.overhead.microbatch / 2,
    )
    memory = group_memory([layers], ((0, (1,)),), 1, 0, pricer.profile.cluster.device.context)
    cost = StageCost(tuple(layers), times, sum(one.step_seconds for one in layers), moving, memory)
    inner = sum(one.forward_exposed + one.backward_exposed for one in layers)
    moved = Moved(gradients=sum(one.step_exposed for one in layers), gather=moving)
    moved = replace(moved, halo=inner) if by_pixels(question) else replace(moved, layers=inner)
    alike = sum(_work(one) for one, own in zip(layers, chosen, strict=True) if own.alike > 1)
    shape = Shape(question.devices, 1, 1, question.global_batch)
    return Laid(shape, (cost,), moved, alike / max(sum(map(_work, layers)), 1e-30))


def _work(layer: LayerCost) -> float:
    return layer.forward + layer.backward + layer.recompute


def by_pixels(question: Question) -> bool:
    """Whether devices share the pixels of samples."""
    if question.strategy is not None:
        return family_of(question.strategy) is Kind.SPATIAL
    return question.kind in (Kind.SPATIAL, Kind.DATA_SPATIAL)


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
