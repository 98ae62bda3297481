"""What layers and communication cost, measured or estimated, in one schema."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated

from annotated_types import Interval

from galvatron_lite.cluster.cluster import Cluster, Collective
from galvatron_lite.cluster.transport import STRAIGHT, Transport
from galvatron_lite.files import Strict
from galvatron_lite.limits import (
    SAMPLES,
    Amount,
    CallSeconds,
    Count,
    Devices,
    Factor,
    Name,
    Precision,
    Rate,
    RateOrNone,
    Seconds,
    Share,
    Size,
)
from galvatron_lite.model.graph import ModelGraph, Recompute
from galvatron_lite.parallelism.base import SPARING, PictureSplit

PROFILE_VERSION = 1


class OriginKind(StrEnum):
    """Whether a figure was measured or estimated."""

    MEASURED = "measured"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True)
class Origin(Strict):
    """Where figures come from."""

    kind: OriginKind  # measured or estimated
    source: str  # the device and backend they were measured on, or what they were estimated from
    date: str = ""  # ISO date of the measurement; empty for estimates
    repetitions: Size = 0  # how often each point was measured; 0 for estimates
    spread: Amount = 0.0  # median over points of (third quartile - first quartile) / median of the repetitions


@dataclass(frozen=True, slots=True)
class LayerPoint(Strict):
    """One measured or estimated point of one kind of layer on one device."""

    kind: Name  # key into ``ModelGraph.kinds``
    # samples on the device; fractions where devices share the tokens of one
    samples: Annotated[int | float, Interval(gt=0, le=SAMPLES)]
    tensor: Devices  # tensor-parallel degree whose shard was run (communication left out)
    sequence_parallel: bool  # whether tokens were shared too
    recompute: Recompute  # what is computed again; ``backward`` includes it
    forward: Seconds  # seconds
    backward: Seconds  # seconds
    kept: Size  # bytes that stay from forward to backward
    # bytes live at the worst moment of backward beyond parameters, their gradients, and what all earlier layers keep;
    # includes this layer's own ``kept``
    working: Size
    # bytes live at the worst moment of forward beyond parameters and what all earlier layers keep; includes this
    # layer's own ``kept``
    forward_working: Size
    spread: Amount = 0.0  # interquartile range / median of forward + backward; 0 for estimates
    # devices that the experts of a mixture were spread over, each of which works on the tokens of them all
    expert: Devices = 1
    filters: Devices = 1  # devices that share the output channels of convolutions
    channels: Devices = 1  # devices that share their input channels


@dataclass(frozen=True, slots=True)
class CollectivePoint(Strict):
    """One measured point of communication."""

    collective: Collective  # its kind
    group: Devices  # ranks in the group
    stride: Devices  # ranks between its members (1: near)
    siblings: Devices  # groups that ran at the same moment
    size: Size  # bytes of the whole tensor (what an all-gather yields, what a reduce-scatter takes)
    seconds: Seconds  # time of one call


@dataclass(frozen=True, slots=True)
class CollectiveFit(Strict):
    """Straight line through the points of one collective on one shape of group: ``latency + size / bandwidth``."""

    collective: Collective  # collective, group, stride, siblings: what it was fitted for
    group: Devices
    stride: Devices
    siblings: Devices
    latency: Seconds  # seconds
    bandwidth: Rate  # bytes of the whole tensor per second
    residual: Amount  # median of |predicted - measured| / measured


@dataclass(frozen=True, slots=True)
class Overlap(Strict):
    """How much compute and communication slow one another down while both run."""

    compute_slowdown: Factor = 1.0  # factor >= 1 on compute time
    communication_slowdown: Factor = 1.0  # factor >= 1 on communication time


@dataclass(frozen=True, slots=True)
class OptimizerCost(Strict):
    """What updating parameters costs on one device."""

    name: Name  # the optimizer (``adamw``)
    state_bytes: Count  # bytes of optimizer state for one parameter item (two fp32 moments: 8; with an fp32 master: 12)
    seconds_per_item: Seconds  # update time for one item held on the device
    seconds_per_tensor: CallSeconds = 0.0  # fixed time for one parameter tensor
    working_bytes: Annotated[float, Interval(ge=0, le=1e6)] = 0.0  # temporary, for one item updated at once
    working_share: Share = 0.0  # share of the device's items that are updated at once (1: all together, foreach)


@dataclass(frozen=True, slots=True)
class Throughput(Strict):
    """What one device reaches on large single operators, for people and reports."""

    matmul: RateOrNone  # FLOP/s of the fastest shape tried
    attention: RateOrNone  # FLOP/s of attention without a mask
    bandwidth: RateOrNone  # bytes per second read and written by an elementwise addition larger than the caches
    launch: Seconds  # seconds of the smallest operation


BRANCH_HOST = 1.5e-3
"""Estimated ``HostOverhead.branch`` of measured profiles without it (of one process, or older ones): processor time of
a call of one convolution of two, on two gloo processes of a server CPU."""


@dataclass(frozen=True, slots=True)
class HostOverhead(Strict):
    """Fixed host time of the runtime's own machinery, once a layer and micro-batch (seconds)."""

    zero: CallSeconds = 0.0  # around one ZeRO layer beside its collectives (hooks, copies), forward and backward
    data: CallSeconds = 0.0  # bucket handling of one data-parallel layer, once a step
    step: CallSeconds = 0.0  # once a step, of no layer (batch slicing, clipping, zeroing gradients)
    pipeline: CallSeconds = 0.0  # one send or receive of one micro-batch beside the transfer
    # one blocking collective of a tensor group beside the transfer: waiting for the others, waking up
    tensor: CallSeconds = 0.0
    tensor_per_byte: Seconds = 0.0  # what that grows by with each byte of the tensor
    # seconds a byte of a tensor whose tokens are gathered or scattered: copying it into, or out of, the order of its
    # tokens on the device (0 in a measured profile, whose ``tensor_per_byte`` holds it)
    gathered_per_byte: Seconds = 0.0
    microbatch: CallSeconds = 0.0  # once a micro-batch and stage, outside all layers
    # finding out what every function means for shares of pixels, of one layer, both passes together
    spatial: CallSeconds = 0.0
    # what that grows by with each byte the layer keeps for backward: copies of borders, statistics in a pass apart
    spatial_per_byte: Seconds = 0.0
    # one exchange of ranks that share pixels beside the transfer: waiting for the others, waking up
    spatial_exchange: CallSeconds = 0.0
    # zero-bubble schedules, whose gradients of weights have passes of their own: seconds of each product with weights,
    # and the share by which these passes are slower than within backward (what they read has left the caches)
    split_product: CallSeconds = 0.0
    split_share: Share = 0.0
    # one call of a branch with devices of its own, on every rank, forward and backward together beside the transfer:
    # putting it off, and one exchange of what it returns (estimated where it was not measured)
    branch: CallSeconds = BRANCH_HOST


@dataclass(frozen=True, slots=True)
class DeviceFigures(Strict):
    """What layers cost on one type of device in a cluster of several."""

    device: Name  # its name
    layers: tuple[LayerPoint, ...]  # layers, optimizer, overhead: as in ``Profile``
    optimizer: OptimizerCost
    overhead: HostOverhead = HostOverhead()


@dataclass(frozen=True, slots=True)
class Profile(Strict):
    """Everything the planner needs: the model, the cluster, and what each layer and transfer costs there.

    Attributes:
        version: of this schema.
        name: file stem, for people.
        origin: of the layer figures.
        communication_origin: of the collective figures.
        layers: points by kind, samples, tensor degree and recompute choice.
        collectives: raw points; empty for estimates, which come from the cluster's levels.
        fits: straight lines through them.
        overlap: mutual slow-down.
        hidden: share of communication that compute may hide, by its cause (``data``, ``zero``, ``tensor``, ``context``,
            ``expert``), or by cause and moment (``tensor.backward``, ``zero.gather``; see ``cost.communication``); what
            is absent is hidden wholly where its dimension says that it overlaps, else not at all.
        optimizer: update cost.
        overhead: the runtime's own fixed costs.
        straggling: relative growth of the step time with each doubling of the number of nodes.
        sharing: the same with each doubling of the devices of a node, whose host serves all.
        throughput: of single operators on one device; None for estimates.
        gather_precision: precision in which parameters are gathered.
        reduce_precision: precision in which gradients are reduced and kept.
        parameter_precision: precision in which parameters are held at rest.
        bucket_bytes: bytes for one parameter item of gradient buffers beside the gradients, where replicas sum them.
        passing_bytes: bytes for one parameter item of gradients that last for one backward pass only.
        copied_bytes: bytes for one item of copies of weights that all passes of a step share (``cost.points``).
        accumulates: whether gradients under ZeRO stay whole from micro-batch to micro-batch, where there are several,
            and are reduced behind the last one (FSDP's ``no_sync``), whatever the stage; else stages 2 and 3 reduce
            them after each, and under stage 1 they are always whole.
        shard_share: share of a layer's states by which each shard is larger than an even one (padding, flat buffers).
        unbuffered: whether no memory is counted for what ZeRO gathers parameters and reduces gradients in, and for what
            stages send and receive, because the figures of layers have it, or to compare with others that leave it out.
        versions: of the software it was made with.
        scattered_sends: whether pipeline stages send whole boundary tensors in parts, one from each device of a
            tensor group, and gather them on the other side.
        steps_overlap: whether stages begin a step before the others have ended the last, under zero-bubble schedules
            (Qi et al. 2023, section 4); ours wait for the loss of each step.
        stack: training software whose costs are estimated (``stacks.catalog``); empty: our own runtime.
        types: where the cluster has devices of several types, the figures of each; ``layers``, ``optimizer`` and
            ``overhead`` are then those of the slowest at each point, which paces layers that all of them work on.
        transport: how the software sends.
        pictures: how it splits pictures.
        forward_only: whether its figures are of forward passes alone (``cost.forward_only``), not of training steps.
    """

    version: int
    name: Name
    graph: ModelGraph
    cluster: Cluster
    origin: Origin
    communication_origin: Origin
    layers: tuple[LayerPoint, ...]
    optimizer: OptimizerCost
    collectives: tuple[CollectivePoint, ...] = ()
    fits: tuple[CollectiveFit, ...] = ()
    overlap: Overlap = Overlap()
    hidden: dict[str, Share] = field(default_factory=dict)
    overhead: HostOverhead = HostOverhead()
    straggling: Amount = 0.0
    sharing: Amount = 0.0
    throughput: Throughput | None = None
    gather_precision: Precision = "bf16"
    reduce_precision: Precision = "fp32"
    parameter_precision: Precision = "fp32"
    bucket_bytes: Size = 0
    passing_bytes: Size = 0
    copied_bytes: Count = 0
    accumulates: bool = False
    shard_share: Amount = 0.0
    unbuffered: bool = False
    versions: tuple[tuple[str, str], ...] = ()
    scattered_sends: bool = False
    steps_overlap: bool = False
    stack: str = ""
    types: tuple[DeviceFigures, ...] = ()
    transport: Transport = STRAIGHT
    pictures: PictureSplit = SPARING
    forward_only: bool = False

    def on(self, cluster: Cluster) -> Profile:
        """The profile of some of its devices; where they are all of one type, with the figures of that type."""
        moved = replace(self, cluster=cluster)
        return moved.only(0) if self.types and cluster.alike else moved

    def only(self, kind: int) -> Profile:
        """The profile of a cluster of as many devices of one type (a place in ``cluster.types``)."""
        cluster = self.cluster.only(kind)
        matching = (figures for figures in self.types if figures.device == cluster.device.name)
        own = next(matching, None)
        if own is None:
            return replace(self, cluster=cluster, types=())
        return replace(
            self, cluster=cluster, types=(), layers=own.layers, optimizer=own.optimizer, overhead=own.overhead
        )


UNSURE = 0.2  # spread of a profile above which it is told


def spread_note(origin: Origin) -> tuple[str, ...]:
    """That what a plan was made from was measured on a busy machine, where it was: a line, or nothing."""
    if origin.spread <= UNSURE:
        return ()
    return (
        f"repeated measurements differ by {origin.spread:.0%} (spread of the profile; below 10% on a machine that does "
        "nothing else), so other plans may be faster: end what else runs there, and profile again",
    )
