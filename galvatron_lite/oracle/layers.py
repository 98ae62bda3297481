"""Networks and links of clusters for ParaDL's closed forms.

Kahira et al. 2021 (arXiv:2104.09075), section 3.1: Hockney's model with ring collectives. alpha is the summed latency
of the way, 1 / beta the bandwidth of its slowest link, of the worst pair on the ring.

    one message of m bytes                  alpha + m beta
    all-reduce of m bytes over p            2 (p - 1) (alpha + m beta / p)
    all-gather of m bytes of each of p      (p - 1) (alpha + m beta)

x_l, y_l and w_l are the items of inputs, outputs and weights of layer l for one sample. The released oracle
(github.com/TruongThaoNguyen/paraDL-analysis) divides the measured time of one sample among layers by FLOPs. For other
convolutional networks, ``network_of`` makes the table from the planner's graph, with estimated seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Annotated

from annotated_types import Interval

from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.errors import InputError
from galvatron_lite.files import Strict
from galvatron_lite.limits import Layers, Name, Samples, Seconds, Steps
from galvatron_lite.model.graph import LayerKind, ModelGraph, Operator, OperatorClass
from galvatron_lite.model.sides import sides_of
from galvatron_lite.parallelism.pictures import channels_of, is_picture


@dataclass(frozen=True, slots=True)
class Link:
    """The path between two devices."""

    alpha: float  # seconds before the first byte arrives
    beta: float  # seconds a byte

    def seconds(self, size: float) -> float:
        """Return the seconds of a message of ``size`` bytes."""
        return self.alpha + size * self.beta

    def contended(self, flows: float) -> Link:
        """Return the path if ``flows`` flows share its slowest link (the paper's phi)."""
        return Link(self.alpha, self.beta * flows)


def all_reduce(link: Link, devices: int, size: float) -> float:
    """Return the seconds of an all-reduce of ``size`` bytes over a ring."""
    return 2 * (devices - 1) * link.seconds(size / devices)


def all_gather(link: Link, devices: int, size: float) -> float:
    """Return the seconds of an all-gather of ``size`` bytes from each device over a ring."""
    return (devices - 1) * link.seconds(size)


@dataclass(frozen=True, slots=True)
class LinkSetting(Strict):
    """One published variant of the latencies of a network."""

    end: float  # seconds from a device to its bridge
    source: str = ""  # publication


@dataclass(frozen=True, slots=True)
class Rate(Strict):
    """Figures of a link."""

    bandwidth: float  # bytes a second
    latency: float  # seconds


@dataclass(frozen=True, slots=True)
class SwitchDistance(Strict):
    """Latency of the switches on the longest path among some devices."""

    devices: int  # at most
    switches: float  # seconds


@dataclass(frozen=True, slots=True)
class Fabric(Strict):
    """A fat tree of nodes with bridged network adapters (``profiles/paradl/networks``)."""

    name: str  # name of the cluster
    source: str  # where the figures come from
    devices: int  # at most
    memory: float  # bytes of a device
    node: int  # devices of a node
    default: str  # name of the default setting
    settings: dict[str, LinkSetting]
    inside: Rate  # between devices of a node
    between: float  # bytes a second between nodes
    bridge: float  # seconds of the switch between a device and the adapter
    levels: tuple[SwitchDistance, ...]  # ascending by devices
    staged: Rate  # between devices of a node through host memory


@dataclass(frozen=True, slots=True)
class WorstLinks:
    """The slowest path among some devices of a cluster."""

    name: str  # name of the cluster
    setting: str  # name of the setting
    devices: int  # at most
    memory: float  # bytes of a device
    node: int  # devices of a node
    direct: tuple[tuple[int, Link], ...]  # (devices at most, path of collectives), ascending
    staged: tuple[tuple[int, Link], ...]  # (devices at most, path through host memory), ascending

    def link(self, devices: int, *, staged: bool = False) -> Link:
        """Return the path of collectives; ``staged``: of halos and of the all-gather that ends a spatial split."""
        links = self.staged if staged else self.direct
        for reach, link in links:
            if devices <= reach:
                return link
        raise InputError("--gpus", devices, f"The cluster has {links[-1][0]}; give 1 to that many.")


def fabric_links(fabric: Fabric, setting: str | None = None) -> WorstLinks:
    """Return the paths of a fabric with one of its settings."""
    name = setting or fabric.default
    if name not in fabric.settings:
        raise InputError("--network", name, f"{fabric.name} has {', '.join(fabric.settings)}.")
    hop, near = fabric.settings[name].end + fabric.bridge, fabric.inside
    slow = min(fabric.between, fabric.staged.bandwidth)
    first = (fabric.node, Link(near.latency, 1 / near.bandwidth))
    far = [(at.devices, Link(2 * hop + at.switches, 1 / fabric.between)) for at in fabric.levels]
    through = (fabric.node, Link(fabric.staged.latency + fabric.bridge, 1 / fabric.staged.bandwidth))
    beyond = [(at.devices, Link(4 * hop + at.switches, 1 / slow)) for at in fabric.levels]
    return WorstLinks(
        fabric.name, name, fabric.devices, fabric.memory, fabric.node, (first, *far), (through, *beyond)
    )  # fmt: skip


def cluster_links(cluster: Cluster, setting: str | None = None) -> WorstLinks:
    """Return the paths of any cluster, by level: the latency of the level, the slowest bandwidth of a single adapter.

    Bandwidths are scaled by ``Level.efficiency``. Messages do not go through host memory.
    """
    if setting is not None:
        raise InputError("--network", setting, f"{cluster.name} has one way to tell its network: leave it out.")
    sizes = list(accumulate((level.size for level in cluster.levels), lambda a, b: a * b))
    slow = list(accumulate((level.bandwidth / level.lanes * level.efficiency for level in cluster.levels), min))
    links = tuple(
        (size, Link(level.latency, 1 / rate)) for size, level, rate in zip(sizes, cluster.levels, slow, strict=True)
    )
    memory = float(cluster.device.memory - cluster.device.context)
    return WorstLinks(cluster.name, "levels", cluster.devices, memory, cluster.levels[0].size, links, links)


class Op(StrEnum):
    """The operation of a layer."""

    CONV = "conv"
    POOL = "pool"
    FC = "fc"
    NORM = "norm"
    RELU = "relu"
    ADD = "add"
    OTHER = "other"


class ModelSplit(StrEnum):
    """A split that a layer can take part in; other layers are computed by each device in full."""

    FILTER = "filter"
    SPATIAL = "spatial"


REUSED = (Op.RELU, Op.NORM)
"""Layers whose activations are not counted: they work in place or are freed (the paper's gamma)."""


@dataclass(frozen=True, slots=True)
class OracleLayer(Strict):
    """One layer."""

    name: str  # for people
    op: Op
    x: tuple[Samples, ...]  # extents of the input of one sample, channels first
    y: tuple[Samples, ...]  # extents of the output
    kernel: tuple[Samples, ...] = ()  # extents of the window; in a fully connected layer, of the input without channels
    split: tuple[ModelSplit, ...] = ()  # splits that it takes part in
    groups: Samples = 1  # groups of a convolution

    @property
    def inputs(self) -> int:
        """Items of the input of one sample: |x_l|."""
        return prod(self.x)

    @property
    def outputs(self) -> int:
        """Items of the output of one sample: |y_l|."""
        return prod(self.y)

    @property
    def weights(self) -> int:
        """Items of weights, |w_l|, without normalisations and biases."""
        weighted = self.op in (Op.CONV, Op.FC)
        return self.x[0] // self.groups * self.y[0] * prod(self.kernel) if weighted else 0

    @property
    def counts_as_memory(self) -> bool:
        """Whether its activations count as memory."""
        return self.op not in REUSED

    @property
    def forward_flops(self) -> int:
        """FLOPs of forward as the released oracle counts them, with pooling as if it mixed channels."""
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
        """FLOPs of forward and backward: the input's gradient as many as forward, the weights' gradient one an item."""
        return 2 * self.forward_flops + self.weights

    def halo(self, extents: tuple[int, ...]) -> int:
        """Return the items of one border of a tensor cut along its first side: C (K - 1) / 2 times the other sides.

        Rounded down, as in the released oracle: windows of 2 pixels with stride 2 do not cross a border.
        """
        kernel = self.kernel[0] if self.kernel else 1
        return extents[0] * ((kernel - 1) // 2) * prod(extents[2:])

    @property
    def exchanges(self) -> bool:
        """Whether its window crosses a border."""
        return self.op in (Op.CONV, Op.POOL) and bool(self.kernel) and self.kernel[0] > 1


@dataclass(frozen=True)
class Network(Strict):
    """A network and its data set."""

    name: Name  # name of the model
    source: str  # where the layers come from
    samples: Steps  # samples of the data set (D)
    batch: Samples  # default samples of a replica
    seconds: Annotated[float, Interval(gt=0, le=1e12)]  # forward and backward of one sample
    seconds_origin: str  # ``measured`` or ``estimated``
    seconds_source: str  # device, or source of the estimate
    layers: Annotated[tuple[OracleLayer, ...], Layers]  # in running order
    update_seconds: Seconds = 0.0  # one weight update of the network (WU); 0 if ``seconds`` include it
    graph: str = ""  # name of the planner's model of the same network
    item_bytes: Samples = 4  # bytes of an item (delta)

    @cached_property
    def inputs(self) -> int:
        """Items of all inputs that count as memory: the sum of |x_l|."""
        return sum(layer.inputs for layer in self.layers if layer.counts_as_memory)

    @cached_property
    def outputs(self) -> int:
        """Items of all outputs that count as memory: the sum of |y_l|."""
        return sum(layer.outputs for layer in self.layers if layer.counts_as_memory)

    @cached_property
    def weights(self) -> int:
        """Items of all weights."""
        return sum(layer.weights for layer in self.layers)

    @cached_property
    def flops(self) -> int:
        """FLOPs of forward and backward of one sample."""
        return sum(layer.flops for layer in self.layers)

    def seconds_of(self, layer: OracleLayer) -> float:
        """Return the seconds of forward and backward of a layer for one sample (FW_l + BW_l), its share by FLOPs."""
        return layer.flops * self.seconds / self.flops

    def forward_of(self, layer: OracleLayer) -> float:
        """Return the seconds of forward of a layer for one sample (FW_l)."""
        return layer.forward_flops * self.seconds / self.flops

    def update_of(self, layer: OracleLayer) -> float:
        """Return the seconds of a layer's weight update (WU_l), its share by weights."""
        return layer.weights * self.update_seconds / max(self.weights, 1)

    def split_by(self, split: ModelSplit) -> tuple[OracleLayer, ...]:
        """Return the layers that take part in a split."""
        return tuple(layer for layer in self.layers if split in layer.split)


_ADDS = ("residual", "add", "concat")
_ELEMENTWISE = ("relu", "act", "gelu", "swish", "silu", "sigmoid")


def network_of(graph: ModelGraph, seconds: float, source: str, samples: int, batch: int) -> Network:
    """Make the table of a model of the planner."""
    for kind in graph.kinds.values():
        if kind.dims.sequence > 1 or any(operator.kind is OperatorClass.ATTENTION for operator in kind.operators):
            remedy = "The closed forms are of convolutional networks; leave --formulas paradl out."
            raise InputError("model", graph.name, remedy)
    layers = []
    for layer in graph.layers:
        for operator in graph.kind_of(layer).operators:
            name = f"{layer.name}.{operator.name}"
            names = [f"{name}.{number}" for number in range(operator.count)] if operator.count > 1 else [name]
            layers += [_layer(name, graph.kind_of(layer), operator) for name in names]
    return Network(
        graph.name, f"the planner's model of {graph.name}", samples, batch, seconds, "estimated", source,
        tuple(layers), graph=graph.name, item_bytes=2 if graph.precision in ("fp16", "bf16") else 4,
    )  # fmt: skip


def _layer(name: str, kind: LayerKind, operator: Operator) -> OracleLayer:
    """Return the layer of one call of an operator.

    A matmul over pixels is a convolution with a window of one pixel; over a single row it is fully connected.
    """
    both = (ModelSplit.FILTER, ModelSplit.SPATIAL)
    if operator.kind is OperatorClass.MATMUL:
        rows, inner, columns = operator.shape
        if rows > 1 and is_picture(kind) and operator.weight_bytes:
            return OracleLayer(name, Op.CONV, (inner, rows), (columns, rows), (1,), both)
        return OracleLayer(name, Op.FC, (inner, rows), (columns, rows), (1,))
    sides = sides_of(operator)
    if not sides:
        extent = (operator.shape[0],)
        return OracleLayer(name, _element_op(operator), extent, extent)
    before, after = tuple(side.extent for side in sides), tuple(side.output for side in sides)
    kernel, pixels = tuple(side.kernel for side in sides), prod(before) > 1
    if operator.kind is not OperatorClass.CONVOLUTION:
        channels = operator.shape[1]
        return OracleLayer(name, Op.POOL, (channels, *before), (channels, *after), kernel, both[1:] if pixels else ())
    inputs, outputs, groups = channels_of(operator)
    split = both if pixels else both[:1]
    return OracleLayer(name, Op.CONV, (inputs, *before), (outputs, *after), kernel, split, groups)


def _element_op(operator: Operator) -> Op:
    if operator.weight_bytes:
        return Op.NORM
    last = operator.name.rsplit(".", 1)[-1]
    if any(word in last for word in _ADDS):
        return Op.ADD
    return Op.RELU if any(word in last for word in _ELEMENTWISE) else Op.OTHER
