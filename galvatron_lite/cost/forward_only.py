"""Forward passes alone (inference): the profile of a model that is run and not trained. No torch here.

What training has and this has not: backward, recomputation, gradients and their communication, optimizer states,
activations that wait for backward. While a layer runs, a device holds its parameters, the tensors between layers that
it and later ones read, the outputs that nobody reads (they are results), and what the layer itself makes. The last is
taken as what it holds in a forward under autograd, an upper bound: intermediate results go earlier where no gradient
needs them.

Everything that a training step does once in either pass (moving tensors between layers and stages, host work) goes one
way here. Schedules count two passes: each of them has half of it, so that a step has all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.base import LayerWork, Moment
from galvatron_lite.plans.schema import Mode
from galvatron_lite.profiler.schema import DeviceFigures, HostOverhead, LayerPoint, OptimizerCost, Profile

_HALF = 0.5


def for_mode(profile: Profile, mode: Mode) -> Profile:
    """The profile of what a plan is for; a profile of forward passes is never one of training steps again."""
    return for_inference(profile) if mode is Mode.INFERENCE and not profile.forward_only else profile


def for_inference(profile: Profile) -> Profile:
    """The profile of forward passes alone, of one of training steps."""
    live = live_bytes(profile.graph)
    types = tuple(
        DeviceFigures(type_.device, _forward(type_.layers, live), _idle(type_.optimizer), _once(type_.overhead))
        for type_ in profile.types
    )
    return replace(
        profile,
        layers=_forward(profile.layers, live),
        optimizer=_idle(profile.optimizer),
        overhead=_once(profile.overhead),
        types=types,
        bucket_bytes=0,
        passing_bytes=0,
        accumulates=False,
        forward_only=True,
    )


def live_bytes(graph: ModelGraph) -> dict[str, int]:
    """By kind the most bytes a sample of tensors between layers, and of outputs, that are there when such a layer runs:
    what it and later layers read, and what earlier ones gave to nobody."""
    read = set(graph.edges)
    producers = {producer for producer, _ in read}
    most: dict[str, int] = {}
    results = 0
    for layer, crossing in zip(graph.layers, graph.crossings(), strict=False):
        kind = graph.kind_of(layer)
        live = max(crossing, kind.input_bytes) + results
        most[layer.kind] = max(most.get(layer.kind, 0), live)
        results += 0 if layer.name in producers else kind.output_bytes
    return most


def without_gradients(work: LayerWork) -> LayerWork:
    """What a layer does where no gradient is made: nothing is sent but in forward, and no states are kept."""
    forward = tuple(communication for communication in work.communications if communication.moment is Moment.FORWARD)
    return replace(
        work, communications=forward, gradient_items=0.0, reduce_items=0.0, state_items=0.0, master_items=0.0
    )


def passes_with_moves(profile: Profile) -> float:
    """What a move between layers counts in either of two passes: all of it, or half where it is made in forward."""
    return _HALF if profile.forward_only else 1.0


def step_flops(profile: Profile) -> int:
    """FLOPs of one sample in a step."""
    graph = profile.graph
    return sum(graph.kind_of(layer).flops for layer in graph.layers) if profile.forward_only else graph.flops


def _forward(points: tuple[LayerPoint, ...], live: Mapping[str, int]) -> tuple[LayerPoint, ...]:
    return tuple(_point(point, live.get(point.kind, 0)) for point in points)


def _point(point: LayerPoint, live: int) -> LayerPoint:
    held = point.forward_working + round(live * point.samples)
    return replace(point, backward=0.0, kept=0, working=held, forward_working=held)


def _idle(optimizer: OptimizerCost) -> OptimizerCost:
    return OptimizerCost(optimizer.name, 0, 0.0)


def _once(overhead: HostOverhead) -> HostOverhead:
    return HostOverhead(
        zero=overhead.zero * _HALF,
        step=overhead.step,
        pipeline=overhead.pipeline * _HALF,
        tensor=overhead.tensor * _HALF,
        tensor_per_byte=overhead.tensor_per_byte * _HALF,
        gathered_per_byte=overhead.gathered_per_byte * _HALF,
        microbatch=overhead.microbatch * _HALF,
        spatial=overhead.spatial * _HALF,
        spatial_per_byte=overhead.spatial_per_byte * _HALF,
        spatial_exchange=overhead.spatial_exchange * _HALF,
        branch=overhead.branch * _HALF,
    )
