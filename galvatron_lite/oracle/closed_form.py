"""The closed forms of ParaDL (Kahira et al. 2021, arXiv:2104.09075, table 3), an epoch each. Pure.

D samples, B a batch, p devices, I = D / B iterations, delta bytes an item; sums are over layers.

    strategy   compute                                       communication                          memory a device
    serial     D (FW + BW) + I WU                            0                                      2 d (B (x+y) + w)
    data       D/p (FW + BW) + I WU                          2 I (p-1)(a + w/p d b)                 2 d (B/p (x+y) + w)
    spatial    as data                                       that + 2 I S[2a + B (h(x)+h(dy)) d b]  2 d (B (x+y)/p + w)
    layer      as serial                                     2 I S_i[a + B y_i d b]                 2 d max (B (x+y)+w)
    pipeline   D (p+s-1)/s (max FW_i + max BW_i) + I max WU  2 I (p+s-2) max_i(a + B/s y_i d b)     as layer
    filter     D/p (FW + BW) + I/p WU                        3 I (p-1) S_l[a + B y_l/p d b]         2 d (B (x+y) + w/p)

Channel parallelism costs what filter parallelism does. Layers that a strategy does not split (``OracleLayer.split``)
are computed by every device in full. The factor 2 in memory is values and gradients; activations of ReLU and batch
normalisation are not counted. Where the report misprints (D/B of a pipeline's weight update, a factor 2 in equation
14), this is what its table 3 and the units say.

Hybrids, data parallelism between p1 groups of p2 devices:

    data+filter    compute   D/p (FW + BW) + I/p2 WU
                   moved     3 I (p2-1) S_l[a + (B/p1) y_l/p2 d b] + 2 I (p1-1)(a + w/(p2 p1) d b)
                   memory    2 d (B/p1 (x+y) + w/p2)
    data+spatial   compute   D/p (FW + BW) + I WU
                   moved     I times: halos within a group, twice the all-gather where the split ends,
                             2 (p2-1)(a + w/p2 d b) within a group, 2 (p1-1)(a + w/p1 d b) between leaders
                   memory    2 d (B/p1 ((x+y)/p2 of split layers, x+y of the others) + w)

Contention (the paper's phi): 2 p2 flows share a node's adapter and bridge (p2 devices, out and in) where groups talk to
each other and where halos go through host memory; 2 in the all-gather."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

from galvatron_lite.errors import InputError
from galvatron_lite.oracle.layers import Link, ModelSplit, Network, OracleLayer, Wires, all_gather, all_reduce


class Quirk(StrEnum):
    """One difference between the released code (``parallel_analysis.py``) and the formulas."""

    FILTER_MEMORY = "filter-memory-divides-twice"
    """Filter, channel: a device's weights, those of layers not split too, are divided by p again."""
    WHOLE_WEIGHTS = "data-filter-reduces-whole-weights"
    """Data+filter: whole weights are reduced between groups, not a device's part of them."""
    STOPS_AT_SPLIT = "data-spatial-stops-at-split"
    """Data+spatial: compute and memory leave out the layers after the last split one."""
    COUNTS_REUSED = "data-spatial-counts-reused-activations"
    """Data+spatial: memory counts ReLU and batch normalisation too."""
    WHOLE_GATHER = "data-spatial-gathers-whole-activations"
    """Data+spatial: each step of the all-gather carries the whole activation, not its p2-th part."""


def quirks_named(names: Iterable[str]) -> frozenset[Quirk]:
    """Quirks by their names; ``all`` is every one."""
    given = tuple(names)
    known = {quirk.value: quirk for quirk in Quirk}
    for name in given:
        if name not in known and name != "all":
            raise InputError("--quirk", name, f"Known: {', '.join(known)}, all.")
    return frozenset(Quirk) if "all" in given else frozenset(known[name] for name in given)


class Method(StrEnum):
    """The strategies of the paper's table 3."""

    SERIAL = "serial"
    DATA = "data"
    SPATIAL = "spatial"
    LAYER = "layer"
    PIPELINE = "pipeline"
    FILTER = "filter"
    CHANNEL = "channel"
    DATA_FILTER = "data+filter"
    DATA_SPATIAL = "data+spatial"


HYBRIDS = (Method.DATA_FILTER, Method.DATA_SPATIAL)
"""Strategies of groups: data parallelism between them, another within."""


@dataclass(frozen=True, slots=True)
class Case:
    """One question to the closed forms."""

    network: Network  # what is trained
    wires: Wires  # on which links
    kind: Method  # how it is split
    devices: int  # p
    batch: int  # samples of a replica: of a device under data, of a group (p2 devices) under hybrids, of all elsewhere
    group: int = 4  # p2, devices of a group of a hybrid
    segments: int = 0  # S, micro-batches of a pipeline; 0: as many as devices
    contention: bool = True  # whether flows that share a link slow each other down
    quirks: frozenset[Quirk] = frozenset()  # see ``Quirk``

    @property
    def replicas(self) -> int:
        """p1: replicas that take samples of their own."""
        if self.kind in HYBRIDS:
            return max(self.devices // self.group, 1)
        return self.devices if self.kind is Method.DATA else 1

    @property
    def global_batch(self) -> int:
        """B: samples of an iteration."""
        return self.batch * self.replicas

    @property
    def iterations(self) -> int:
        """I: of an epoch, whole ones (D / B rounded up, as the released oracle does)."""
        return ceil(self.network.samples / self.global_batch)

    @property
    def parts(self) -> int:
        """S, at most the batch."""
        return max(min(self.segments or self.devices, self.batch), 1)

    def phi(self, flows: float) -> float:
        """Flows that share a link; 1 where contention is left out."""
        return flows if self.contention else 1.0

    def has(self, quirk: Quirk) -> bool:
        """Whether the released code's way is asked for."""
        return quirk in self.quirks


@dataclass(frozen=True, slots=True)
class CommunicationSeconds:
    """Seconds of communication an epoch, by what they are for."""

    gradients: float = 0.0  # gradient exchange, once an iteration
    layers: float = 0.0  # collectives of each layer
    halo: float = 0.0  # borders of pictures
    messages: float = 0.0  # between pipeline stages
    gather: float = 0.0  # all-gather and scatter where a spatial split ends

    @property
    def total(self) -> float:
        """All together."""
        return self.gradients + self.layers + self.halo + self.messages + self.gather

    def times(self, count: float) -> CommunicationSeconds:
        """So many times as much."""
        parts = (self.gradients, self.layers, self.halo, self.messages, self.gather)
        return CommunicationSeconds(*(part * count for part in parts))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a strategy costs on so many devices."""

    compute: float  # seconds of an epoch
    moved: CommunicationSeconds  # communication of an epoch
    memory: float  # bytes a device
    update: float = 0.0  # the part of ``compute`` that is weight update

    @property
    def epoch(self) -> float:
        """Seconds of an epoch: nothing overlaps."""
        return self.compute + self.moved.total


def group_of(case: Case) -> Case:
    """The case with a group that its devices fill."""
    if case.kind not in HYBRIDS or case.devices % case.group == 0:
        return case
    if case.devices < case.group:
        return replace(case, group=case.devices)
    raise InputError("--gpus", case.devices, f"{case.kind.value} takes whole groups of {case.group}; see --group.")


Stages = list[list[OracleLayer]]


def balanced(network: Network, devices: int) -> Stages:
    """Layers in as many runs as devices, whose slowest takes the least time (forward and backward)."""
    layers = network.layers
    if devices > len(layers):
        raise InputError(
            "--gpus", devices, f"{network.name} has {len(layers)} layers; a pipeline takes at most one each."
        )
    seconds = [network.seconds_of(one) for one in layers]
    sizes = least_runs(seconds, devices)
    ends = [sum(sizes[: number + 1]) for number in range(devices)]
    return [list(layers[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def least_runs(weights: Sequence[float], runs: int) -> list[int]:
    """Lengths of non-empty consecutive runs, of which the heaviest is as light as can be.

    Halves the interval that holds the least limit until no number lies between.
    """
    low, high = max(weights), sum(weights)
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if len(_filled(weights, middle, runs)) <= runs else (middle, high)
    return _filled(weights, high if len(_filled(weights, low, runs)) > runs else low, runs)


def _filled(weights: Sequence[float], limit: float, runs: int) -> list[int]:
    """Runs up to the limit each, cut sooner where what is left would not give every run a member."""
    sizes, held = [0], 0.0
    for place, weight in enumerate(weights):
        left = len(weights) - place
        if sizes[-1] and (held + weight > limit or left <= runs - len(sizes)):
            sizes, held = [*sizes, 0], 0.0
        sizes[-1] += 1
        held += weight
    return sizes


def seconds_in_full(network: Network, split: ModelSplit, devices: int) -> float:
    """Forward and backward of one sample where so many devices share the layers a strategy splits."""
    return sum(network.seconds_of(one) / (devices if split in one.split else 1) for one in network.layers)


def layer_collectives(case: Case, link: Link, devices: int, samples: float) -> float:
    """Seconds an iteration: an all-gather and an all-reduce of every split layer's output but the last layer's.

    3 (p - 1) sum over l < G of (alpha + B y_l / p delta beta): 1 for the all-gather, 2 for the all-reduce.
    """
    network = case.network
    inner = [one for one in network.layers[:-1] if ModelSplit.FILTER in one.split]
    items = sum(one.outputs for one in inner)
    return 3 * (devices - 1) * (len(inner) * link.alpha + samples * items / devices * network.item_bytes * link.beta)


def halo_seconds(case: Case, link: Link, samples: float) -> float:
    """Seconds an iteration of the borders' exchange: 2 sums of (2 alpha + B (halo(x) + halo(dL/dy)) delta beta).

    Hybrids have halo(x) in both passes, as the released oracle does.
    """
    size = samples * case.network.item_bytes * link.beta
    return sum(
        2 * (2 * link.alpha + (one.halo(one.x) + one.halo(one.x if case.kind is Method.DATA_SPATIAL else one.y)) * size)
        for one in case.network.split_by(ModelSplit.SPATIAL)
        if one.exchanges
    )


def sharded_weights(case: Case, devices: int, *, twice: bool) -> float:
    """Items of weights a device holds where it shares those of the layers that filter parallelism splits."""
    network = case.network
    held = sum(one.weights / (devices if ModelSplit.FILTER in one.split else 1) for one in network.layers)
    return held / devices if twice and case.has(Quirk.FILTER_MEMORY) else held


def data_filter(case: Case) -> Estimate:
    """Filter parallelism within groups, data parallelism between them."""
    network, inner = case.network, case.group
    update = case.iterations / inner * network.update_seconds
    compute = case.iterations * case.batch * seconds_in_full(network, ModelSplit.FILTER, inner) + update
    within = layer_collectives(case, case.wires.link(inner), inner, case.batch)
    own = sharded_weights(case, inner, twice=False)
    between = _between(case, network.weights if case.has(Quirk.WHOLE_WEIGHTS) else own)
    held = case.batch * (network.inputs + network.outputs) + own
    return Estimate(
        compute,
        CommunicationSeconds(gradients=between, layers=within).times(case.iterations),
        2 * network.item_bytes * held,
        update,
    )


def data_spatial(case: Case) -> Estimate:
    """Spatial parallelism within groups, data parallelism between them."""
    network, layers = case.network, _spatial_layers(case)
    update = case.iterations * network.update_seconds
    seconds = sum(network.seconds_of(one) / _share(case, one) for one in layers)
    compute = ceil(network.samples / case.replicas) * seconds + update
    moved = CommunicationSeconds(gradients=_gradients(case), halo=_halo(case), gather=_gather(case)).times(
        case.iterations
    )
    kept = [one for one in layers if one.counted or case.has(Quirk.COUNTS_REUSED)]
    activations = sum(ceil(one.inputs / _share(case, one)) + ceil(one.outputs / _share(case, one)) for one in kept)
    return Estimate(compute, moved, 2 * network.item_bytes * (case.batch * activations + network.weights), update)


def _share(case: Case, layer: OracleLayer) -> int:
    """Devices that share a layer's pixels."""
    return case.group if ModelSplit.SPATIAL in layer.split else 1


def _spatial_layers(case: Case) -> tuple[OracleLayer, ...]:
    """All layers; those up to the last split one where the released code's way is asked for."""
    layers = case.network.layers
    if not case.has(Quirk.STOPS_AT_SPLIT):
        return layers
    last = max((place for place, one in enumerate(layers) if ModelSplit.SPATIAL in one.split), default=-1)
    return layers[: last + 1]


def _between(case: Case, items: float) -> float:
    """Seconds of the gradients' sum between groups, whose flows share what leaves a node."""
    link = case.wires.link(case.devices).contended(case.phi(2 * case.group))
    return all_reduce(link, case.replicas, items * case.network.item_bytes)


def _gradients(case: Case) -> float:
    """Seconds an iteration: the gradients' sum within a group, then between the groups' leaders."""
    size = case.network.weights * case.network.item_bytes
    return all_reduce(case.wires.link(case.group), case.group, size) + _between(case, case.network.weights)


def _halo(case: Case) -> float:
    link = case.wires.staged_link(case.group).contended(case.phi(2 * case.group))
    return halo_seconds(case, link, case.batch) if case.group > 1 else 0.0


def _gather(case: Case) -> float:
    """Seconds an iteration: all-gather of the last split layer's output, and its scatter in backward."""
    split = case.network.split_by(ModelSplit.SPATIAL)
    if not split or case.group == 1:
        return 0.0
    link = case.wires.staged_link(case.group).contended(case.phi(2))
    parts = 1 if case.has(Quirk.WHOLE_GATHER) else case.group
    return 2 * all_gather(link, case.group, case.batch * split[-1].outputs * case.network.item_bytes / parts)


def estimate(case: Case) -> Estimate:
    """What a strategy costs on so many devices."""
    return _FORMULAS[case.kind](group_of(case))


def largest_batch(case: Case) -> float:
    """Samples of a replica that a device's memory holds: (M - m(0)) / (m(1) - m(0)) of memory m linear in the batch.

    0 where not even the weights fit. The released oracle checks its rows against it, (items / 2 - w) / (x + y).
    """
    one, two = (estimate(replace(case, batch=batch)).memory for batch in (1, 2))
    return max((case.wires.memory - 2 * one + two) / (two - one), 0.0)


def serial(case: Case) -> Estimate:
    """One device does everything."""
    network = case.network
    update = case.iterations * network.update_seconds
    return Estimate(
        network.samples * network.seconds + update, CommunicationSeconds(), _memory(case, case.batch), update
    )


def data(case: Case) -> Estimate:
    """Every device has a replica and ``batch`` samples of its own."""
    network = case.network
    update = case.iterations * network.update_seconds
    compute = ceil(network.samples / case.devices) * network.seconds + update
    return Estimate(compute, CommunicationSeconds(gradients=_exchange(case)), _memory(case, case.batch), update)


def spatial(case: Case) -> Estimate:
    """Every device has a part of each picture; halos go between neighbours in both passes."""
    network, p = case.network, case.devices
    update = case.iterations * network.update_seconds
    seconds = seconds_in_full(network, ModelSplit.SPATIAL, p)
    halo = case.iterations * halo_seconds(case, case.wires.staged_link(p), case.batch) if p > 1 else 0.0
    split = _activations(network.split_by(ModelSplit.SPATIAL))
    held = split / p + network.inputs + network.outputs - split
    return Estimate(
        network.samples * seconds + update,
        CommunicationSeconds(gradients=_exchange(case), halo=halo),
        2 * network.item_bytes * (case.batch * held + network.weights),
        update,
    )


def layer(case: Case) -> Estimate:
    """Every device has a run of layers, one works at a time (no pipeline)."""
    network = case.network
    stages = balanced(network, case.devices)
    update = case.iterations * network.update_seconds
    messages = 2 * case.iterations * sum(_sends(case, stages, case.batch))
    return Estimate(
        network.samples * network.seconds + update,
        CommunicationSeconds(messages=messages),
        _fullest(case, stages),
        update,
    )


def pipeline(case: Case) -> Estimate:
    """GPipe: every device has a run of layers, a batch passes in S segments."""
    network, p, parts = case.network, case.devices, case.parts
    stages = balanced(network, p)
    forward = max(sum(network.forward_of(one) for one in stage) for stage in stages)
    backward = max(sum(network.seconds_of(one) - network.forward_of(one) for one in stage) for stage in stages)
    update = case.iterations * max(sum(network.update_of(one) for one in stage) for stage in stages)
    slowest = max(_sends(case, stages, case.batch / parts), default=0.0)
    return Estimate(
        network.samples * (p + parts - 1) / parts * (forward + backward) + update,
        CommunicationSeconds(messages=2 * case.iterations * (p + parts - 2) * slowest),
        _fullest(case, stages),
        update,
    )


def filters(case: Case) -> Estimate:
    """Every device has a part of each layer's output channels (filter) or input channels (channel)."""
    network, p = case.network, case.devices
    update = case.iterations / p * network.update_seconds
    compute = case.iterations * case.batch * seconds_in_full(network, ModelSplit.FILTER, p) + update
    moved = case.iterations * layer_collectives(case, case.wires.link(p), p, case.batch) if p > 1 else 0.0
    held = case.batch * (network.inputs + network.outputs) + sharded_weights(case, p, twice=True)
    return Estimate(compute, CommunicationSeconds(layers=moved), 2 * network.item_bytes * held, update)


def _memory(case: Case, samples: float) -> float:
    """Bytes of whole layers with so many samples."""
    network = case.network
    return 2 * network.item_bytes * (samples * (network.inputs + network.outputs) + network.weights)


def _activations(layers: Sequence[OracleLayer]) -> int:
    return sum(one.inputs + one.outputs for one in layers if one.counted)


def _exchange(case: Case) -> float:
    """Seconds an epoch of the gradients' all-reduce."""
    network = case.network
    size = network.weights * network.item_bytes
    return case.iterations * all_reduce(case.wires.link(case.devices), case.devices, size)


def _sends(case: Case, stages: Sequence[Sequence[OracleLayer]], samples: float) -> list[float]:
    """Seconds of one message from each stage to the next, over the worst way there is up to it."""
    size = case.network.item_bytes
    return [
        case.wires.link(number + 2).seconds(samples * stage[-1].outputs * size)
        for number, stage in enumerate(stages[:-1])
    ]


def _fullest(case: Case, stages: Sequence[Sequence[OracleLayer]]) -> float:
    """Bytes of the stage that holds most."""
    held = (case.batch * _activations(stage) + sum(one.weights for one in stage) for stage in stages)
    return 2 * case.network.item_bytes * max(held)


_FORMULAS: dict[Method, Callable[[Case], Estimate]] = {
    Method.SERIAL: serial,
    Method.DATA: data,
    Method.SPATIAL: spatial,
    Method.LAYER: layer,
    Method.PIPELINE: pipeline,
    Method.FILTER: filters,
    Method.CHANNEL: filters,
    Method.DATA_FILTER: data_filter,
    Method.DATA_SPATIAL: data_spatial,
}
