"""What one pipeline stage costs: its layers, the redistribution between them, its sends, its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from galvatron_lite.cost.layer import ALONE, LayerCost, LayerPricer, Sharing
from galvatron_lite.cost.memory import stage_memory
from galvatron_lite.cost.schedule import StageTimes
from galvatron_lite.cost.sharing import sharing_of
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, buffer_bytes, in_flight, transfer
from galvatron_lite.plans.schema import MemoryBreakdown, Schedule


@dataclass(frozen=True, slots=True)
class Shape:
    """What is chosen once for the whole plan.

    Attributes:
        devices: world size.
        stages: pipeline degree.
        microbatches: a step.
        microbatch: samples of one.
        schedule: order of micro-batches.
    """

    devices: int
    stages: int
    microbatches: int
    microbatch: int
    schedule: Schedule = Schedule.ONE_F_ONE_B

    @property
    def stage_devices(self) -> int:
        """Devices of one stage."""
        return self.devices // self.stages


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage.

    Attributes:
        layers: the cost of each.
        times: seconds of one micro-batch.
        step: seconds once a step after the last backward: exposed gradient communication, update, host.
        moving: seconds of redistribution a micro-batch, both passes; part of ``times``.
        memory: bytes on one device.
    """

    layers: tuple[LayerCost, ...]
    times: StageTimes
    step: float
    moving: float
    memory: MemoryBreakdown


def price_stage(
    pricer: LayerPricer, shape: Shape, stage: int, inside: range, strategies: Sequence[Strategy]
) -> StageCost:
    """Cost of stage ``stage`` that holds the layers at ``inside``.

    Args:
        pricer: of one profile.
        shape: of the plan.
        stage: its number, 0 first.
        inside: places of its layers in the graph.
        strategies: of all layers of the model (those of neighbouring stages price the boundaries).

    Raises:
        InputError: the profile holds no point for a strategy.
    """
    shared = sharing_of(pricer.profile.graph, inside)
    costs = tuple(_layer_cost(pricer, shape, place, strategies[place], shared.get(place, ALONE)) for place in inside)
    moving = _moving(pricer, shape, inside, strategies)
    left, right = (_boundary(pricer, shape, cut, strategies) for cut in (inside.start, inside.stop))
    host = pricer.profile.overhead.pipeline
    sides = (inside.start > 0) + (inside.stop < len(strategies))
    times = StageTimes(
        sum(cost.forward_seconds for cost in costs) + moving + sides * host,
        sum(cost.backward_seconds for cost in costs) + moving + sides * host,
        right[1],
        left[1],
    )
    held = in_flight(shape.schedule, shape.stages, stage, shape.microbatches)
    context = pricer.profile.cluster.device.context
    memory = stage_memory(costs, held, shape.microbatches, buffer_bytes(left[0], right[0]), context)
    return StageCost(costs, times, sum(cost.step_seconds for cost in costs), 2 * moving, memory)


def _layer_cost(pricer: LayerPricer, shape: Shape, place: int, strategy: Strategy, sharing: Sharing) -> LayerCost:
    layer = pricer.profile.graph.layers[place]
    cost = pricer.price(layer.kind, strategy, shape.microbatch, shape.stages, sharing)
    if cost is None:
        raise InputError(
            f"strategy of {layer.name}",
            str(strategy),
            "The profile holds no figures for its tensor degree and recompute choice. Profile them too.",
        )
    return cost


def _moving(pricer: LayerPricer, shape: Shape, inside: range, strategies: Sequence[Strategy]) -> float:
    """Seconds of redistribution in one pass, at the stage's entry too."""
    graph = pricer.profile.graph
    start = max(inside.start - 1, 0)
    return sum(
        pricer.redistribution(
            graph.kind_of(graph.layers[left]).output_bytes, shape.microbatch, strategies[left], strategies[right]
        )
        for left, right in pairwise(range(start, inside.stop))
    )


def _boundary(pricer: LayerPricer, shape: Shape, cut: int, strategies: Sequence[Strategy]) -> tuple[int, float]:
    """Bytes a device sends over the boundary before layer ``cut``, and the seconds; zero at the model's ends."""
    graph = pricer.profile.graph
    if cut in (0, len(graph.layers)):
        return 0, 0.0
    size = boundary_bytes(graph.kind_of(graph.layers[cut - 1]).output_bytes, shape.microbatch, strategies[cut - 1])
    return size, pricer.links.seconds(transfer(size, shape.stage_devices))
