"""What Hetu-Galvatron's profile files say, in its own units: MB are 2^20 bytes, times milliseconds, links GB/s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

CONTEXT_MB = 1024
"""What Hetu-Galvatron counts for the driver's context."""
BIAS = 0.003
"""What its memory formulas add to 1/n."""


class Engine(StrEnum):
    """The two releases whose cost models differ."""

    MAIN = "main"
    V240 = "v240"


@dataclass(frozen=True, slots=True)
class Line:
    """Milliseconds by samples (or MB): ``slope * x + start``."""

    slope: float
    start: float = 0.0

    def at(self, x: float) -> float:
        """The line's value."""
        return self.slope * x + self.start


@dataclass(frozen=True, slots=True)
class LayerType:
    """One type of layer.

    Attributes:
        layers: how many of it the model has.
        hidden, sequence: sizes of its boundary tensor.
        parameters: MB in fp32.
        activation: MB a sample on one device, by tensor (or Ulysses) degree.
        checkpoint: MB a sample that a checkpointed layer keeps, on a device that holds whole samples.
        forward: milliseconds by samples on the device.
    """

    layers: int
    hidden: int
    sequence: int
    parameters: float
    activation: Mapping[int, float]
    checkpoint: float
    forward: Line


@dataclass(frozen=True, slots=True)
class EdgeMemory:
    """MB of embedding and head.

    Attributes:
        states: parameters, gradients and optimizer, by tensor degree of the vocabulary.
        activation: a sample, by tensor (or Ulysses) degree.
    """

    states: Mapping[int, float]
    activation: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class HetuModel:
    """A model's profile.

    Attributes:
        name: for people.
        types: its layer types, in the order the model runs.
        whole, first, last: memory of embedding and head, in one stage, or in the first and last of several.
        edges: forward milliseconds of embedding and head together, by samples on the device.
        precision: of compute (``bf16``, ``fp32``).
        sequence_parallel: whether tensor groups share the tokens between matmuls.
        source: where it was read.
    """

    name: str
    types: tuple[LayerType, ...]
    whole: EdgeMemory
    first: EdgeMemory
    last: EdgeMemory
    edges: Line
    precision: str = "bf16"
    sequence_parallel: bool = True
    source: str = ""

    @property
    def mixed(self) -> bool:
        """Whether compute is in half precision."""
        return self.precision != "fp32"

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return sum(kind.layers for kind in self.types)

    def type_of(self, place: int) -> LayerType:
        """The type of the layer at a place."""
        for kind in self.types:
            if place < kind.layers:
                return kind
            place -= kind.layers
        raise IndexError(place)


@dataclass(frozen=True, slots=True)
class Table:
    """Milliseconds of a collective by MB: what was measured, and a straight line for all else."""

    points: Mapping[int, float]
    line: Line

    def at(self, size: float) -> float:
        """Milliseconds for so many MB."""
        return self.points.get(int(size), self.line.at(size)) if size == int(size) else self.line.at(size)


@dataclass(frozen=True, slots=True)
class HetuHardware:
    """A cluster's profile.

    Attributes:
        nodes, gpus: nodes, and GPUs of each.
        near, far: bus bandwidth in GB/s of all-reduces, by ranks that are neighbours or lie apart.
        send: GB/s between stages, by pipeline degree.
        overlap: factor on compute and on communication while both run.
        gather: all-gather (or reduce-scatter) by ranks: half of the all-reduce that was measured.
        exchange: all-to-all by ranks.
        source: where it was read.
    """

    nodes: int
    gpus: int
    near: Mapping[int, float]
    far: Mapping[int, float]
    send: Mapping[int, float]
    overlap: float
    gather: Mapping[int, Table]
    exchange: Mapping[int, Table]
    source: str = ""

    @property
    def devices(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus

    def ms_per_mb(self, ranks: int, *, apart: bool) -> float:
        """Milliseconds a MB at an all-reduce's bus bandwidth; ``apart``: the ranks are no neighbours."""
        if ranks == 1:
            return 0.0
        far = apart and ranks in self.far
        return 1.0 / (self.far if far else self.near)[ranks]
