"""A network as the closed forms of ParaDL see it: layers with input, output and weight items. No torch here.

Kahira et al. 2021 (arXiv:2104.09075), section 3: x_l, y_l and w_l are items of one sample. Their released oracle
(github.com/TruongThaoNguyen/paraDL-analysis) has one measured time for a whole sample and shares it out by FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Interval

from galvatron_lite.files import STRICT
from galvatron_lite.limits import Layers, Name, Samples, Seconds, Steps

if TYPE_CHECKING:
    from pydantic import ConfigDict


class Op(StrEnum):
    """What a layer does."""

    CONV = "conv"
    POOL = "pool"
    FC = "fc"
    NORM = "norm"
    RELU = "relu"
    ADD = "add"
    OTHER = "other"


class Split(StrEnum):
    """A model-parallel strategy that a layer can take part in; other layers are computed by every device in full."""

    FILTER = "filter"
    SPATIAL = "spatial"


REUSED = (Op.RELU, Op.NORM)
"""Layers whose activations are not counted: they work in place or are freed (the paper's gamma)."""


@dataclass(frozen=True, slots=True)
class OracleLayer:
    """One layer.

    Attributes:
        name: for people.
        op: what it does.
        x: extents of the input of one sample, channels first.
        y: extents of the output.
        kernel: of a window; of a fully connected layer the input's extents without channels.
        split: strategies that split it.
        groups: of a convolution.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    op: Op
    x: tuple[Samples, ...]
    y: tuple[Samples, ...]
    kernel: tuple[Samples, ...] = ()
    split: tuple[Split, ...] = ()
    groups: Samples = 1

    @property
    def inputs(self) -> int:
        """Items that enter, one sample: |x_l|."""
        return prod(self.x)

    @property
    def outputs(self) -> int:
        """Items that leave, one sample: |y_l|."""
        return prod(self.y)

    @property
    def weights(self) -> int:
        """Items of weights: |w_l|; those of normalisations and biases are not counted."""
        weighted = self.op in (Op.CONV, Op.FC)
        return self.x[0] // self.groups * self.y[0] * prod(self.kernel) if weighted else 0

    @property
    def counted(self) -> bool:
        """Whether its activations count as memory."""
        return self.op not in REUSED

    @property
    def forward_flops(self) -> int:
        """FLOPs of forward as the released oracle counts them: a pooling layer's as if it mixed channels."""
        window = prod(self.kernel) * prod(self.y[1:])
        match self.op:
            case Op.CONV:
                return 2 * (self.x[0] // self.groups) * self.y[0] * window
            case Op.POOL:
                return self.x[0] * self.y[0] * window
            case Op.FC:
                return self.weights
            case Op.NORM:
                return 4 * self.inputs
            case Op.RELU | Op.ADD:
                return self.outputs
            case Op.OTHER:
                return 0

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward: forward again for the input's gradient, one an item of weights for theirs."""
        return 2 * self.forward_flops + self.weights

    def halo(self, extents: tuple[int, ...]) -> int:
        """Items of one border of a tensor cut along its first side: C (K - 1) / 2 times the other sides.

        Rounded down, as the released oracle does: windows of 2 pixels that move by 2 reach over no border.
        """
        kernel = self.kernel[0] if self.kernel else 1
        return extents[0] * ((kernel - 1) // 2) * prod(extents[2:])

    @property
    def exchanges(self) -> bool:
        """Whether its window reaches over a border."""
        return self.op in (Op.CONV, Op.POOL) and bool(self.kernel) and self.kernel[0] > 1


@dataclass(frozen=True)
class Network:
    """A network and the data set it is trained on.

    Attributes:
        name: of the model.
        source: where the layers come from.
        samples: of the data set (D).
        batch: samples of a replica where none are asked for.
        seconds: of forward and backward of one sample.
        seconds_origin: ``measured`` or ``estimated``.
        seconds_source: from what.
        layers: in the order they run.
        update_seconds: of one weight update of the whole network (WU); 0 where ``seconds`` hold it.
        graph: name of the planner's model of the same network.
        item_bytes: bytes of an item (delta).
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: Name
    source: str
    samples: Steps
    batch: Samples
    seconds: Annotated[float, Interval(gt=0, le=1e12)]
    seconds_origin: str
    seconds_source: str
    layers: Annotated[tuple[OracleLayer, ...], Layers]
    update_seconds: Seconds = 0.0
    graph: str = ""
    item_bytes: Samples = 4

    @cached_property
    def inputs(self) -> int:
        """Items of all inputs that count as memory: the sum of |x_l|."""
        return sum(layer.inputs for layer in self.layers if layer.counted)

    @cached_property
    def outputs(self) -> int:
        """Items of all outputs that count as memory: the sum of |y_l|."""
        return sum(layer.outputs for layer in self.layers if layer.counted)

    @cached_property
    def weights(self) -> int:
        """Items of all weights."""
        return sum(layer.weights for layer in self.layers)

    @cached_property
    def flops(self) -> int:
        """FLOPs of forward and backward of one sample."""
        return sum(layer.flops for layer in self.layers)

    def seconds_of(self, layer: OracleLayer) -> float:
        """Forward and backward of one sample in a layer: its part of the whole by FLOPs (FW_l + BW_l)."""
        return layer.flops * self.seconds / self.flops

    def forward_of(self, layer: OracleLayer) -> float:
        """Forward of one sample in a layer (FW_l)."""
        return layer.forward_flops * self.seconds / self.flops

    def update_of(self, layer: OracleLayer) -> float:
        """A layer's weight update (WU_l): its part by weights."""
        return layer.weights * self.update_seconds / max(self.weights, 1)

    def split_by(self, split: Split) -> tuple[OracleLayer, ...]:
        """Layers that a strategy splits."""
        return tuple(layer for layer in self.layers if split in layer.split)
