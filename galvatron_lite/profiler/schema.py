"""The schema of profiles: costs of layers and communication, measured or estimated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from annotated_types import Interval

from galvatron_lite.cluster.cluster import Cluster, Collective
from galvatron_lite.cluster.transport import STRAIGHT, Transport
from galvatron_lite.errors import InputError
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
    samples: Annotated[int | float, Interval(gt=0, le=SAMPLES)]  # on the device; a fraction if devices split a sample
    tensor: Devices  # tensor-parallel degree of the shard (without communication)
    sequence_parallel: bool  # whether tokens were split, too
    recompute: Recompute  # included in ``backward``
    forward: Seconds
    backward: Seconds
    kept: Size  # bytes kept from forward to backward
    # peak bytes in backward beyond parameters, their gradients, and what earlier layers keep; includes ``kept``
    working: Size
    # peak bytes in forward beyond parameters and what earlier layers keep; includes ``kept``
    forward_working: Size
    spread: Amount = 0.0  # interquartile range / median of forward + backward; 0 for estimates
    expert: Devices = 1  # devices that experts were spread over, each with the tokens of them all
    filters: Devices = 1  # devices that split the output channels of convolutions
    channels: Devices = 1  # devices that split their input channels


class LayerSetting(NamedTuple):
    """The choices under which a layer is measured or estimated; the key of a ``LayerPoint``."""

    kind: str
    samples: float
    tensor: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.NONE
    expert: int = 1
    by: str = ""  # ``filters`` or ``channels`` if devices split the channels of convolutions
    shares: int = 1  # degree of that split
    grid: tuple[int, int, int] = (
        1,
        1,
        1,
    )  # devices that share the pixels of one sample; the first has ``samples`` of it

    def point(self, **figures: Any) -> LayerPoint:
        """Return the point with the other fields of ``LayerPoint``."""
        kind, samples, tensor, sequence_parallel, recompute, expert, by, shares, _ = self
        channels = {by: shares} if by else {}
        return LayerPoint(kind, samples, tensor, sequence_parallel, recompute, expert=expert, **channels, **figures)


@dataclass(frozen=True, slots=True)
class CollectivePoint(Strict):
    """One measured point of communication."""

    collective: Collective
    group: Devices  # ranks in the group
    stride: Devices  # ranks between its members (1: near)
    siblings: Devices  # groups that ran at the same moment
    size: Size  # bytes of the full tensor (what an all-gather yields, what a reduce-scatter takes)
    seconds: Seconds  # time of one call


@dataclass(frozen=True, slots=True)
class CollectiveFit(Strict):
    """The line ``latency + size / bandwidth`` through the points of one collective on one shape of group."""

    collective: Collective  # collective, group, stride, siblings: as in ``CollectivePoint``
    group: Devices
    stride: Devices
    siblings: Devices
    latency: Seconds
    bandwidth: Rate  # bytes of the full tensor per second
    residual: Amount  # median of |predicted - measured| / measured


@dataclass(frozen=True, slots=True)
class Overlap(Strict):
    """Slow-down of compute and communication while both run."""

    compute_slowdown: Factor = 1.0  # factor >= 1 on compute time
    communication_slowdown: Factor = 1.0  # factor >= 1 on communication time


@dataclass(frozen=True, slots=True)
class OptimizerCost(Strict):
    """Cost of the optimizer's update on one device."""

    name: Name  # the optimizer (``adamw``)
    state_bytes: Count  # bytes of optimizer state for an item (two fp32 moments: 8; with an fp32 master: 12)
    seconds_per_item: Seconds  # update time for each parameter item on the device
    seconds_per_tensor: CallSeconds = 0.0  # fixed time for each parameter tensor
    working_bytes: Annotated[float, Interval(ge=0, le=1e6)] = 0.0  # temporary bytes for each item updated at once
    working_share: Share = 0.0  # share of the device's items that are updated at once (1: all together, foreach)


@dataclass(frozen=True, slots=True)
class Throughput(Strict):
    """Rates of one device in large single operators, for people and reports."""

    matmul: RateOrNone  # FLOP/s of the fastest measured shape
    attention: RateOrNone  # FLOP/s of attention without a mask
    bandwidth: RateOrNone  # bytes per second read and written by an elementwise addition larger than the caches
    launch: Seconds  # seconds of the smallest operation


BRANCH_HOST = 1.5e-3
"""Default of ``HostOverhead.branch`` for profiles that did not measure it (of one process, or older ones): processor
time of a call of one convolution of two, on two gloo processes of a server CPU."""


@dataclass(frozen=True, slots=True)
class HostOverhead(Strict):
    """Host seconds of the runtime's machinery besides communication, by default for each layer and micro-batch."""

    zero: CallSeconds = 0.0  # of a ZeRO layer (hooks, copies), forward and backward
    data: CallSeconds = 0.0  # bucket handling of a data-parallel layer, once a step
    step: CallSeconds = 0.0  # once a step, outside all layers (batch slicing, clipping, zeroing gradients)
    pipeline: CallSeconds = 0.0  # of a send or receive of one micro-batch
    tensor: CallSeconds = 0.0  # of a blocking collective of a tensor group: waiting for the others, waking up
    tensor_per_byte: Seconds = 0.0  # growth of ``tensor`` with each byte of the tensor
    # seconds a byte of a tensor whose tokens are gathered or scattered, copied into or out of the order of its tokens
    # on the device (0 in a measured profile, where ``tensor_per_byte`` includes it)
    gathered_per_byte: Seconds = 0.0
    microbatch: CallSeconds = 0.0  # once a micro-batch and stage, outside all layers
    spatial: CallSeconds = 0.0  # dispatch of functions on shares of pixels, of a layer, forward and backward
    # growth of ``spatial`` with each byte the layer keeps for backward: copies of borders, separate statistics
    spatial_per_byte: Seconds = 0.0
    spatial_exchange: CallSeconds = 0.0  # of an exchange of ranks that share pixels: waiting, waking up
    # zero-bubble schedules, which compute gradients of weights in separate passes: seconds of each product with
    # weights, and the share by which these passes are slower than in backward (their inputs have left the caches)
    split_product: CallSeconds = 0.0
    split_share: Share = 0.0
    # of a call of a branch on separate devices, on every rank, forward and backward: deferring it, and an exchange of
    # its result
    branch: CallSeconds = BRANCH_HOST


@dataclass(frozen=True, slots=True)
class DeviceFigures(Strict):
    """Costs of layers on one type of device in a cluster of several types."""

    device: Name  # name of the device
    layers: tuple[LayerPoint, ...]  # layers, optimizer, overhead: as in ``Profile``
    optimizer: OptimizerCost
    overhead: HostOverhead = HostOverhead()


@dataclass(frozen=True, slots=True)
class PlanNeeds(Strict):
    """What plans for training keep to, so that the model trains like in one process; tried on its example batch."""

    fix: tuple[str, ...] = ()  # fix, forbid: as options of ``galvatron plan``
    forbid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # on plans that keep to it
    reasons: tuple[str, ...] = ()  # why other plans are ruled out, for errors
    least_samples: int = 1  # of a share of the batch
    alike: str = ""  # why all layers must share the batch alike; empty: they need not

    @property
    def restrict(self) -> bool:
        """Whether they rule plans out."""
        return bool(self.fix or self.forbid)

    def without_plan(self, devices: int, pins: str) -> InputError:
        """Return the error that no plan on so many devices keeps to it; ``pins``: the user's, if there are any."""
        lift = f"Lift {pins}, or train" if pins else "Train"
        remedy = (
            f"{'Beside it no' if pins else 'No'} plan on {devices} devices trains like one process: "
            f"{'; '.join(self.reasons)}. {lift} in one process; "
            "galvatron profile --no-check and auto_parallelize(check=False) leave this out."
        )
        return InputError("fix" if pins else "devices", pins or devices, remedy)


@dataclass(frozen=True, slots=True)
class Profile(Strict):
    """The input of the planner: a model, a cluster, and the costs of its layers and communication there.

    Attributes:
        version: version of this schema.
        name: file stem, for people.
        graph: the model.
        cluster: the cluster.
        origin: origin of the layer figures.
        communication_origin: origin of the collective figures.
        layers: points by kind, samples, tensor degree and recomputation.
        optimizer: cost of the update.
        collectives: measured points; empty for estimates, which come from the cluster's levels.
        fits: lines through them.
        overlap: slow-down of compute and communication while both run.
        hidden: share of communication that compute may hide, by its cause (``data``, ``zero``, ``tensor``, ``context``,
            ``expert``), or by cause and moment (``tensor.backward``, ``zero.gather``; see ``cost.communication``); an
            absent cause is hidden completely if its dimension overlaps, else not at all.
        overhead: host time of the runtime.
        straggling: relative growth of the step time with each doubling of the number of nodes.
        sharing: the same with each doubling of the devices of a node, which share its host.
        throughput: rates of single operators on one device; None for estimates.
        gather_precision: precision in which parameters are gathered.
        reduce_precision: precision in which gradients are reduced and kept.
        parameter_precision: precision of parameters at rest.
        bucket_bytes: gradient buffers besides the gradients if replicas sum them, bytes for each parameter item.
        passing_bytes: gradients that exist during one backward pass only, bytes for each parameter item.
        copied_bytes: copies of weights that all passes of a step share, bytes for each item (``cost.layer_memory``).
        accumulates: whether ZeRO of any stage keeps full gradients over the micro-batches of a step and reduces them
            after the last one (FSDP's ``no_sync``). Otherwise stages 2 and 3 reduce them after each micro-batch, and
            stage 1 always keeps them.
        shard_share: relative excess of each shard of a layer's states over an even one (padding, flat buffers).
        unbuffered: whether memory for gathered parameters, reduced gradients, and messages of stages is left out,
            because layer figures include it, or to compare with planners that leave it out.
        versions: versions of the software that made the profile.
        scattered_sends: whether each device of a tensor group sends a part of the boundary tensor between pipeline
            stages, which the other side gathers.
        steps_overlap: whether stages begin a step before the others have ended the last, under zero-bubble schedules
            (Qi et al. 2023, section 4); our runtime waits for the loss of each step.
        stack: training software whose costs are estimated (``stacks.catalog``); empty: our runtime.
        types: figures of each type of device, if there are several. ``layers``, ``optimizer`` and ``overhead`` are then
            those of the slowest type at each point, which paces layers that all types share.
        transport: how the software sends.
        pictures: how the software splits pictures.
        forward_only: whether figures are of forward passes only (``cost.forward_only``).
        needs: what plans for training keep to; empty if the model was not tried.
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
    needs: PlanNeeds = PlanNeeds()

    @property
    def least_samples(self) -> int:
        """The fewest samples that the model trains on."""
        return max(self.graph.least_samples, self.needs.least_samples)

    @property
    def folded(self) -> str:
        """Why all layers must share the batch alike; empty if they need not."""
        return self.graph.folded or self.needs.alike

    def on(self, cluster: Cluster) -> Profile:
        """Return the profile on some of its devices, with the figures of their type if they are all of one type."""
        moved = replace(self, cluster=cluster)
        return moved.only(0) if self.types and cluster.alike else moved

    def only(self, kind: int) -> Profile:
        """Return the profile on as many devices of the type ``cluster.types[kind]``."""
        cluster = self.cluster.only(kind)
        profile = replace(self, cluster=cluster, types=())
        for figures in self.types:
            if figures.device == cluster.device.name:
                return replace(profile, layers=figures.layers, optimizer=figures.optimizer, overhead=figures.overhead)
        return profile


NOISY_SPREAD = 0.2  # spread of a profile from which plans carry a note


def spread_note(origin: Origin) -> tuple[str, ...]:
    """Return a line for plans whose profile was measured on a busy machine, else nothing."""
    if origin.spread <= NOISY_SPREAD:
        return ()
    return (
        f"repeated measurements differ by {origin.spread:.0%} (spread of the profile; below 10% on a machine that does "
        "nothing else), so other plans may be faster: end what else runs there, and profile again",
    )
