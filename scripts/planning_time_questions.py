"""What ``scripts/planning_time`` asks: models, clusters, batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes import build_graph, load_shape
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder, classify
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile

GB = 10**9
PRECISION = "bf16"
LAYERS = (8, 16, 32, 64, 128, 256, 512)
UNLIKE = (10, 20, 40, 75, 150, 300)
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DIMENSIONS = ("offload", "context", "ulysses", "recompute", "sequence", "zero", "tensor", "pipeline")
"""Left out of the whole space, one after another."""


@dataclass(frozen=True, slots=True)
class Question:
    """One search."""

    series: str  # of the table
    size: float  # what grows along the series
    model: str  # a name, ``pyramid`` for a network of unlike layers
    layers: int | None  # blocks; None: the model's own
    cluster: str  # by name
    gpus: int  # GPUs, samples a step
    batch: int
    backend: str = "any"  # see ``find_plan``
    forbidden: tuple[str, ...] = ()  # dimensions left out
    budget: int | None = None  # bytes a device; None: 95 % of its memory
    target: float | None = None  # seconds it shall take at most; None: none is set


def targets(backend: str) -> Iterator[Question]:
    """Searches that have a time to keep."""
    for model, layers, cluster, gpus, batch, budget, target in (
        ("gpt3-175b", None, "a100-80gb", 1024, 1536, None, 1.0),
        ("llama3-405b", None, "h100", 16384, 2048, None, 3.0),
        ("llama2-7b", None, "a100-40gb", 8, 64, None, 0.2),
        ("llama3-70b", None, "h100", 64, 256, None, 1.0),
        ("mixtral-8x7b", None, "h100", 64, 256, None, 1.0),
        ("pyramid", 300, "a100-80gb", 64, 1024, None, 2.0),
    ):
        yield Question(f"targets, {backend}", gpus, model, layers, cluster, gpus, batch, backend, (), budget, target)


def growing(backend: str, most: float) -> Iterator[Question]:
    """Searches that grow in layers, equal ones and unlike ones, and in GPUs; none of a size above ``most``."""
    for layers in LAYERS:
        yield Question(f"equal layers, {backend}", layers, "llama2-7b", layers, "a100-80gb", 64, 256, backend)
    for layers in UNLIKE:
        yield Question(f"unlike layers, {backend}", layers, "pyramid", layers, "a100-80gb", 64, 1024, backend)
    for gpus in GPUS:
        if gpus <= most:
            yield Question(f"GPUs, {backend}", gpus, "llama2-7b", None, "a100-80gb", gpus, 4 * gpus, backend)


def narrowing() -> Iterator[Question]:
    """The whole space, then with one dimension less each time."""
    for left in range(len(DIMENSIONS) + 1):
        yield Question("space", left, "llama2-7b", None, "a100-80gb", 64, 256, "any", DIMENSIONS[:left])


@lru_cache(maxsize=4)
def profile_of(model: str, layers: int | None, cluster: str, gpus: int) -> Profile:
    """The estimated profile of a question."""
    return estimate_profile(graph_of(model, layers), load_cluster(cluster, gpus), precision=PRECISION, name=model)


@lru_cache(maxsize=4)
def graph_of(model: str, layers: int | None) -> ModelGraph:
    """The model, with so many blocks."""
    if model == "pyramid":
        return pyramid(layers or 300)
    shape = load_shape(model)
    return build_graph(shape if layers is None else replace(shape, layers=layers), precision=PRECISION)  # type: ignore[call-arg]


def pyramid(layers: int) -> ModelGraph:
    """A convolutional network of so many layers, no two alike: bottlenecks that widen from each to the next, in four
    stages that halve the picture (after Han et al. 2017, "Deep Pyramidal Residual Networks", without shortcuts)."""
    net = NetworkBuilder(f"pyramid-{layers}", PRECISION, 3, (224, 224))
    net.stem(_stem)
    blocks = layers - 2
    for place in range(blocks):
        stage = 4 * place // blocks
        halves = stage > 0 and 4 * (place - 1) // blocks < stage
        net.block(_bottleneck, width=256 + 4 * place, stride=2 if halves else 1)
    return net.end(classify)


def _stem(flow: ImageFlow) -> None:
    flow.unit(64, 7, 2).pool(3, 2)


def _bottleneck(flow: ImageFlow, width: int, stride: int) -> None:
    flow.unit(width // 4).unit(width // 4, 3, stride).unit(width)
