"""Convert Hetu-Galvatron's profile of a model to our model graph and layer points. Its MB are 2^20 bytes.

The rules of its cost model stay: backward takes twice the time of forward, and three times with checkpointing. A
checkpointed layer needs only its input while it is recomputed. The tensor group of a transformer layer gathers or
scatters the boundary tensor six times a micro-batch (v2.4.0: four times), half of them in forward; these become regions
that end (``LayerKind.tensor_scatters``). Embedding and head take half of their common time each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Recompute, Role, SplitDims, TensorSplit
from galvatron_lite.profiler.schema import LayerPoint
from galvatron_lite.units import ITEM_BYTES

CONTEXT_MB = 1024  # driver context in its memory formulas
BIAS = 0.003  # that its memory formulas add to 1/n


class Engine(StrEnum):
    """Releases with different cost models."""

    MAIN = "main"
    V240 = "v240"


@dataclass(frozen=True, slots=True)
class LinearTime:
    """Milliseconds as a line over samples or MB: ``slope * x + start``."""

    slope: float
    start: float = 0.0

    def at(self, x: float) -> float:
        """Milliseconds at ``x``."""
        return self.slope * x + self.start


@dataclass(frozen=True, slots=True)
class LayerType:
    """One type of layer."""

    layers: int  # number of such layers
    hidden: int  # hidden and sequence size of its boundary tensor
    sequence: int
    parameters: float  # MB in fp32
    activation: Mapping[int, float]  # MB a sample on one device, by tensor (or Ulysses) degree
    checkpoint: float  # MB a sample that a checkpointed layer saves, on one device
    forward: LinearTime  # milliseconds by samples on the device


@dataclass(frozen=True, slots=True)
class EdgeMemory:
    """Memory of embedding and head in MB."""

    states: Mapping[int, float]  # parameters, gradients and optimizer, by tensor degree of the vocabulary
    activation: Mapping[int, float]  # a sample, by tensor (or Ulysses) degree


@dataclass(frozen=True, slots=True)
class HetuModel:
    """The profile of a model."""

    name: str
    types: tuple[LayerType, ...]  # in the order of the model
    together: EdgeMemory  # of embedding and head in a single stage
    first: EdgeMemory  # of the embedding in the first of several stages
    last: EdgeMemory  # of the head in the last of several stages
    edges: LinearTime  # forward milliseconds of embedding and head together, by samples on the device
    precision: str = "bf16"  # of compute (``bf16``, ``fp32``)
    sequence_parallel: bool = True  # whether tensor groups share the tokens between matmuls
    source: str = ""  # names of its files

    @property
    def mixed(self) -> bool:
        """Whether compute is in half precision."""
        return self.precision != "fp32"

    @property
    def layers(self) -> int:
        """Number of layers."""
        return sum(kind.layers for kind in self.types)

    def type_of(self, place: int) -> LayerType:
        """The type of a layer by its index."""
        for kind in self.types:
            if place < kind.layers:
                return kind
            place -= kind.layers
        raise IndexError(place)


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """Milliseconds of a collective by MB: measured points, and a fitted line for other sizes."""

    points: Mapping[int, float]
    line: LinearTime

    def at(self, size: float) -> float:
        """Milliseconds for a size in MB."""
        return self.points.get(int(size), self.line.at(size)) if size == int(size) else self.line.at(size)


@dataclass(frozen=True, slots=True)
class HetuHardware:
    """The profile of a cluster."""

    nodes: int
    gpus: int  # of each node
    near: Mapping[int, float]  # bus bandwidth of all-reduces of neighbouring ranks in GB/s, by number of ranks
    far: Mapping[int, float]  # the same of ranks that are not neighbours
    send: Mapping[int, float]  # GB/s between stages, by pipeline degree
    overlap: float  # factor on compute and on communication while both run
    gather: Mapping[int, CollectiveTable]  # all-gather or reduce-scatter, by ranks: half of the measured all-reduce
    exchange: Mapping[int, CollectiveTable]  # all-to-all, by ranks
    source: str = ""  # folder of its files

    @property
    def devices(self) -> int:
        """Number of GPUs."""
        return self.nodes * self.gpus

    def ms_per_mb(self, ranks: int, *, apart: bool) -> float:
        """Milliseconds per MB at the bus bandwidth of an all-reduce; ``apart``: the ranks are not neighbours."""
        if ranks == 1:
            return 0.0
        far = apart and ranks in self.far
        return 1.0 / (self.far if far else self.near)[ranks]


MB = 2**20
STATE_BYTES = 16
"""Bytes of states for one parameter item in its memory figures: fp32 or half precision, Adam."""
SAMPLES = (1, 64)  # of the points that represent its lines
ENDS = {Engine.MAIN: 3, Engine.V240: 2}
"""Collectives of the boundary tensor in one forward pass of a layer."""


def to_graph(model: HetuModel, engine: Engine = Engine.MAIN) -> ModelGraph:
    """Convert a model: an embedding, all layers, a head."""
    first, last, kinds = model.types[0], model.types[-1], dict[str, LayerKind]()
    for name, memory, ends in (("embed", model.first, first), ("head", model.last, last)):
        kept = {Recompute.NONE: TensorSplit(tensor=ceil(memory.activation[1] * MB))}
        degrees, parameters = max(memory.activation), _edge_parameters(memory.states)
        # Its formulas count one blocking collective of the boundary tensor.
        kinds[name] = _kind(name, model, ends, parameters, kept, degrees, gathers=1)
    layers = [Layer("embed", "embed", Role.BEFORE)]
    for place, kind in enumerate(model.types):
        name, degrees = block_name(model, place), max(kind.activation)
        kept = {
            Recompute.NONE: TensorSplit(tensor=ceil(kind.activation[1] * MB)),
            Recompute.FULL: TensorSplit(sequence=ceil(kind.checkpoint * MB)),
        }
        parameters = TensorSplit(tensor=round(kind.parameters * MB / ITEM_BYTES["fp32"]))
        kinds[name] = _kind(name, model, kind, parameters, kept, degrees, scatters=ENDS[engine], heads=degrees)
        start = len(layers) - 1
        layers += [Layer(f"layers.{number}", name, Role.BLOCK) for number in range(start, start + kind.layers)]
    layers.append(Layer("head", "head", Role.AFTER))
    notes = ("As its cost model has it, a checkpointed layer is computed again without working memory.",)
    return ModelGraph(
        model.name, tuple(layers), kinds, max(kind.sequence for kind in model.types), model.precision,
        source=f"Hetu-Galvatron: {model.source}", notes=notes,
    )  # fmt: skip


def _kind(
    name: str,
    model: HetuModel,
    size: LayerType,
    parameters: TensorSplit,
    kept: dict[Recompute, TensorSplit],
    degrees: int,
    gathers: int = 0,
    scatters: int = 0,
    heads: int = 0,
) -> LayerKind:
    boundary = size.sequence * size.hidden * ITEM_BYTES[model.precision]
    return LayerKind(
        name, parameters, (), kept, TensorSplit(), TensorSplit(), boundary, boundary,
        SplitDims(sequence=size.sequence, heads=heads, kv_heads=heads, hidden=size.hidden),
        tensor_degrees=degrees, tensor_collectives=2 * (gathers + scatters), tensor_gathers=gathers,
        tensor_scatters=scatters, sequence_parallel=model.sequence_parallel,
    )  # fmt: skip


def block_name(model: HetuModel, place: int) -> str:
    """Name of the kind of a layer type."""
    return "block" if len(model.types) == 1 else f"block{place}"


def to_points(model: HetuModel) -> tuple[LayerPoint, ...]:
    """Layer points of every kind at every profiled tensor degree."""
    half, points = LinearTime(model.edges.slope / 2, model.edges.start / 2), list[LayerPoint]()
    for name, memory in (("embed", model.first), ("head", model.last)):
        for degree, figure in sorted(memory.activation.items()):
            points += _points(name, degree, Recompute.NONE, half, figure, 0.0, model)
    for place, kind in enumerate(model.types):
        points += _block_points(block_name(model, place), kind, model)
    return tuple(points)


def _edge_parameters(states: Mapping[int, float]) -> TensorSplit:
    """Parameter items that tensor parallelism divides, and those that it does not, by least squares over all degrees.

    The two add up to the states on one device without tensor parallelism.
    """
    total = states[1]
    gaps = [(1 - 1 / degree, figure - total / degree) for degree, figure in states.items() if degree > 1]
    weight = sum(share * share for share, _ in gaps)
    weighted = sum(share * gap for share, gap in gaps) / weight if weight else 0.0
    weighted = min(max(weighted, 0.0), total)
    return TensorSplit(tensor=round((total - weighted) * MB / STATE_BYTES), whole=round(weighted * MB / STATE_BYTES))


def _block_points(name: str, kind: LayerType, model: HetuModel) -> Iterator[LayerPoint]:
    for degree, figure in sorted(kind.activation.items()):
        kept = {Recompute.NONE: figure, Recompute.FULL: kind.checkpoint / (degree if model.sequence_parallel else 1)}
        shared = degree > 1 and model.sequence_parallel
        buffer = kind.sequence * kind.hidden * ITEM_BYTES[model.precision] / MB if shared else 0.0
        for choice, size in kept.items():
            yield from _points(name, degree, choice, kind.forward, size, buffer, model)


def _points(
    name: str, degree: int, choice: Recompute, line: LinearTime, kept: float, buffer: float, model: HetuModel
) -> Iterator[LayerPoint]:
    """Points on the line of one recomputation option; ``kept`` and ``buffer`` in MB a sample."""
    for samples in SAMPLES:
        forward = max(line.at(samples / degree), 0.0) / 1000
        saved = ceil(kept * samples * MB)
        working = saved + ceil(buffer * samples * MB)
        times = 3 if choice is Recompute.FULL else 2
        shared = degree > 1 and model.sequence_parallel
        yield LayerPoint(name, samples, degree, shared, choice, forward, times * forward, saved, working, working)
