"""The profile of a model that only runs forward passes (inference). No torch here.

There is no backward, recomputation, gradient, optimizer state or activation that waits for backward. While a layer
runs, a device holds its parameters, the tensors between layers that it and later layers read, the results of the model
so far, and what the layer itself makes. The last is taken from a forward under autograd, an upper bound: without
gradients intermediate results are freed earlier.

Schedules count two passes. What a training step does in either pass (moving tensors between layers and stages, host
work) is done once here, so that each of the two passes counts half of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.base import LayerWork, Moment
from galvatron_lite.plans.schema import Mode
from galvatron_lite.profiler.schema import DeviceFigures, HostOverhead, LayerPoint, OptimizerCost, Profile

_HALVED = (
    "zero", "pipeline", "tensor", "tensor_per_byte", "gathered_per_byte", "microbatch", "spatial", "spatial_per_byte",
    "spatial_exchange", "branch",
)  # fmt: skip
"""Host seconds that a training step takes in either pass."""


def for_mode(profile: Profile, mode: Mode) -> Profile:
    """Return the profile for the mode of a plan."""
    return for_inference(profile) if mode is Mode.INFERENCE and not profile.forward_only else profile


def for_inference(profile: Profile) -> Profile:
    """Return the profile of forward passes alone, from one of training steps."""
    live = live_bytes(profile.graph)
    types = tuple(
        DeviceFigures(
            figures.device,
            _forward_points(figures.layers, live),
            OptimizerCost(figures.optimizer.name, 0, 0.0),
            _forward_overhead(figures.overhead),
        )
        for figures in profile.types
    )
    return replace(
        profile,
        layers=_forward_points(profile.layers, live),
        optimizer=OptimizerCost(profile.optimizer.name, 0, 0.0),
        overhead=_forward_overhead(profile.overhead),
        types=types,
        bucket_bytes=0,
        passing_bytes=0,
        accumulates=False,
        forward_only=True,
    )


def live_bytes(graph: ModelGraph) -> dict[str, int]:
    """Return the most bytes a sample, by kind, of tensors that are live while such a layer runs.

    These are the tensors that it and later layers read, and the outputs of earlier layers that no layer reads.
    """
    producers = {producer for producer, _ in graph.edges}
    most: dict[str, int] = {}
    results = 0
    for layer, crossing in zip(graph.layers, graph.crossings(), strict=False):
        kind = graph.kind_of(layer)
        live = max(crossing, kind.input_bytes) + results
        most[layer.kind] = max(most.get(layer.kind, 0), live)
        results += 0 if layer.name in producers else kind.output_bytes
    return most


def without_gradients(work: LayerWork) -> LayerWork:
    """Remove from a layer's work what needs gradients: optimizer states, and all messages but those of forward."""
    forward = tuple(communication for communication in work.communications if communication.moment is Moment.FORWARD)
    return replace(
        work, communications=forward, gradient_items=0.0, reduce_items=0.0, state_items=0.0, master_items=0.0
    )


def passes_with_moves(profile: Profile) -> float:
    """Return how much of a move between layers each of the two passes counts."""
    return 0.5 if profile.forward_only else 1.0


def step_flops(profile: Profile) -> int:
    """Return the FLOPs of one sample in a step."""
    graph = profile.graph
    return sum(graph.kind_of(layer).flops for layer in graph.layers) if profile.forward_only else graph.flops


def _forward_points(points: tuple[LayerPoint, ...], live: Mapping[str, int]) -> tuple[LayerPoint, ...]:
    def forward_point(point: LayerPoint) -> LayerPoint:
        working = point.forward_working + round(live.get(point.kind, 0) * point.samples)
        return replace(point, backward=0.0, kept=0, working=working, forward_working=working)

    return tuple(map(forward_point, points))


def _forward_overhead(overhead: HostOverhead) -> HostOverhead:
    return HostOverhead(step=overhead.step, **{name: getattr(overhead, name) * 0.5 for name in _HALVED})
