"""Forecasts by the closed forms of ParaDL (Kahira et al. 2021, arXiv:2104.09075, table 3), in seconds of an epoch.

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
from math import ceil, prod

from galvatron_lite.errors import InputError, unknown
from galvatron_lite.oracle.layers import ModelSplit, Network, OracleLayer, WorstLinks, all_gather, all_reduce
from galvatron_lite.oracle.rows import (
    HYBRIDS,
    IN_TURN,
    CommunicationSeconds,
    Forecast,
    ForecastRow,
    Limit,
    LongestCommunication,
    Method,
    RowQuestion,
    balanced_runs,
    limit_by_count,
    strategy_line,
)


class Quirk(StrEnum):
    """A difference of the released code (``parallel_analysis.py``) from the formulas."""

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
    """Return quirks by name; ``all`` stands for all of them."""
    names, quirks = tuple(names), {quirk.value: quirk for quirk in Quirk}
    for name in names:
        if name not in quirks and name != "all":
            raise unknown("--quirk", name, (*quirks, "all"))
    return frozenset(Quirk) if "all" in names else frozenset(quirks[name] for name in names)


_SPLITS = {
    Method.SPATIAL: ModelSplit.SPATIAL, Method.DATA_SPATIAL: ModelSplit.SPATIAL, Method.FILTER: ModelSplit.FILTER,
    Method.CHANNEL: ModelSplit.FILTER, Method.DATA_FILTER: ModelSplit.FILTER,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(RowQuestion):
    """The input of the closed forms: p is ``devices``, p1 ``replicas``, p2 ``width``, B ``global_batch``, I
    ``iterations`` (D / B rounded up, as in the released oracle) and S ``parts``."""

    network: Network
    wires: WorstLinks
    contention: bool = True  # whether flows that share a link slow each other down
    quirks: frozenset[Quirk] = frozenset()

    @property
    def split(self) -> ModelSplit | None:
        """The split of layers among the devices of a group."""
        return _SPLITS.get(self.kind)

    def share(self, layer: OracleLayer) -> int:
        """Return the number of devices that split a layer; 1 if each computes it in full."""
        return self.width if self.split in layer.split else 1

    def phi(self, flows: float) -> float:
        """Return the flows that share a link: ``flows`` in hybrids with contention, else 1."""
        return flows if self.contention and self.kind in HYBRIDS else 1.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Cost of a case."""

    compute: float  # seconds of an epoch
    moved: CommunicationSeconds  # of an epoch
    memory: float  # bytes of a device
    update: float = 0.0  # the part of ``compute`` for weight updates

    @property
    def epoch(self) -> float:
        """Seconds of an epoch, without overlap."""
        return self.compute + self.moved.total


def estimate(case: Case) -> Estimate:
    """Estimate the cost of a case.

    Raises:
        InputError: devices that do not fill groups, or more devices than the cluster has or layers.
    """
    if case.kind in HYBRIDS and case.devices % case.width:
        remedy = f"{case.kind.value} takes whole groups of {case.group}; see --group."
        raise InputError("--gpus", case.devices, remedy)
    if case.kind in IN_TURN:
        return _estimate_stages(case)
    network, by_filters = case.network, case.split is ModelSplit.FILTER
    layers, samples = network.layers, ceil(case.samples / case.replicas)
    if Quirk.STOPS_AT_SPLIT in case.quirks and case.kind is Method.DATA_SPATIAL:
        last = max((place for place, layer in enumerate(layers) if case.split in layer.split), default=-1)
        layers = layers[: last + 1]
    update = case.iterations * network.update_seconds
    if by_filters:
        samples, update = case.iterations * case.batch, update / case.width
    seconds = sum(network.seconds_of(layer) / case.share(layer) for layer in layers)
    items = case.batch * _activations(case, layers) + (_weights(case) if by_filters else network.weights)
    moved = _layer_collectives(case) if by_filters else _halos(case)
    total = replace(moved, gradients=_gradients(case)).times(case.iterations)
    return Estimate(samples * seconds + update, total, 2 * network.item_bytes * items, update)


def _activations(case: Case, layers: Sequence[OracleLayer]) -> float:
    """Return the items of activations of one sample on a device; rounded up for hybrids, as in the released oracle."""
    if case.split is not ModelSplit.SPATIAL:
        return case.network.inputs + case.network.outputs
    counted = [layer for layer in layers if layer.counts_as_memory or Quirk.COUNTS_REUSED in case.quirks]
    if case.kind is Method.DATA_SPATIAL:
        return sum(
            ceil(layer.inputs / case.share(layer)) + ceil(layer.outputs / case.share(layer)) for layer in counted
        )
    return sum((layer.inputs + layer.outputs) / case.share(layer) for layer in layers if layer.counts_as_memory)


def _weights(case: Case) -> float:
    """Return the items of weights on a device if a group splits filters."""
    items = sum(layer.weights / case.share(layer) for layer in case.network.layers)
    twice = Quirk.FILTER_MEMORY in case.quirks and case.kind is not Method.DATA_FILTER
    return items / case.devices if twice else items


def _layer_collectives(case: Case) -> CommunicationSeconds:
    """Return 3 (p - 1) sum over l < G of (alpha + B y_l / p delta beta): all-gather and all-reduce of outputs."""
    network, width, link = case.network, case.width, case.wires.link(case.width)
    inner = [layer for layer in network.layers[:-1] if ModelSplit.FILTER in layer.split]
    size = case.batch * sum(layer.outputs for layer in inner) / width * network.item_bytes
    return CommunicationSeconds(layers=3 * (width - 1) * (len(inner) * link.alpha + size * link.beta))


def _halos(case: Case) -> CommunicationSeconds:
    """Return the exchange of borders, 2 sums of (2 alpha + B (halo(x) + halo(dL/dy)) delta beta), and the all-gather of
    the last split layer's output with its scatter in backward.

    Hybrids have halo(x) in both passes, as in the released oracle.
    """
    split = case.network.split_by(ModelSplit.SPATIAL)
    if case.split is None or case.width == 1 or not split:
        return CommunicationSeconds()
    hybrid, direct = case.kind is Method.DATA_SPATIAL, case.wires.link(case.width, staged=True)
    link, item = direct.contended(case.phi(2 * case.width)), case.batch * case.network.item_bytes
    items = [layer.halo(layer.x) + layer.halo(layer.x if hybrid else layer.y) for layer in split if layer.exchanges]
    halo = sum(2 * (2 * link.alpha + count * item * link.beta) for count in items)
    parts = 1 if Quirk.WHOLE_GATHER in case.quirks else case.width
    size = item * split[-1].outputs / parts
    gather = 2 * all_gather(direct.contended(case.phi(2)), case.width, size) if hybrid else 0.0
    return CommunicationSeconds(halo=halo, gather=gather)


def _gradients(case: Case) -> float:
    """Return the seconds of summing gradients within a group that splits pixels, then between groups."""
    wires, item, weights = case.wires, case.network.item_bytes, case.network.weights
    between = wires.link(case.devices).contended(case.phi(2 * case.width))
    if case.split is ModelSplit.FILTER:
        items = weights if Quirk.WHOLE_WEIGHTS in case.quirks else _weights(case)
        return all_reduce(between, case.replicas, items * item)
    within = all_reduce(wires.link(case.width), case.width, weights * item)
    return within + all_reduce(between, case.replicas, weights * item)


def balanced_stages(network: Network, devices: int) -> list[list[OracleLayer]]:
    """Split layers into runs, one for each device, that minimise the slowest forward and backward."""
    layers = list(network.layers)
    if devices > len(layers):
        remedy = f"{network.name} has {len(layers)} layers; a pipeline takes at most one each."
        raise InputError("--gpus", devices, remedy)
    sizes = balanced_runs([network.seconds_of(layer) for layer in layers], devices)
    ends = [sum(sizes[: number + 1]) for number in range(devices)]
    return [layers[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _estimate_stages(case: Case) -> Estimate:
    """Estimate runs of layers on a device each: one works at a time, or a batch passes in S segments (GPipe)."""
    network, p = case.network, case.devices
    parts, stages = case.parts, balanced_stages(network, p)
    size = case.batch / parts * network.item_bytes
    sends = [case.wires.link(at + 2).seconds(size * stage[-1].outputs) for at, stage in enumerate(stages[:-1])]
    counted = [[layer for layer in stage if layer.counts_as_memory] for stage in stages]
    activations = [case.batch * sum(layer.inputs + layer.outputs for layer in stage) for stage in counted]
    weights = [sum(layer.weights for layer in stage) for stage in stages]
    memory = 2 * network.item_bytes * max(map(sum, zip(activations, weights, strict=True)))
    if case.kind is Method.LAYER:
        update = case.iterations * network.update_seconds
        moved = CommunicationSeconds(messages=2 * case.iterations * sum(sends))
        return Estimate(case.samples * network.seconds + update, moved, memory, update)
    forward = max(sum(map(network.forward_of, stage)) for stage in stages)
    backward = max(sum(network.seconds_of(layer) - network.forward_of(layer) for layer in stage) for stage in stages)
    update = case.iterations * max(sum(map(network.update_of, stage)) for stage in stages)
    moved = CommunicationSeconds(messages=2 * case.iterations * (p + parts - 2) * max(sends, default=0.0))
    return Estimate(case.samples * (p + parts - 1) / parts * (forward + backward) + update, moved, memory, update)


def largest_batch(case: Case) -> float:
    """Return the samples of a replica that fit a device, (M - m(0)) / (m(1) - m(0)) with memory m linear in the batch.

    0 if the weights do not fit. The released oracle checks its rows against it, (items / 2 - w) / (x + y).
    """
    single, double = (estimate(replace(case, batch=batch)).memory for batch in (1, 2))
    return max((case.wires.memory - 2 * single + double) / (double - single), 0.0)


KINDS = tuple(kind for kind in Method if kind is not Method.SERIAL)
"""Methods of the table."""


def closed_forecast(case: Case, kinds: Sequence[Method], counts: Sequence[int]) -> Forecast:
    """Return the table of several methods on several numbers of devices, ascending."""
    wires, network = case.wires, case.network
    for devices in counts:
        if devices > wires.devices:
            raise InputError("--gpus", devices, f"{wires.name} has {wires.devices}; give 1 to that many.")
    notes = [f"quirk on: {quirk.value}" for quirk in sorted(case.quirks)]
    notes += [] if case.contention else ["contention is left out"]
    alone = case.samples * network.seconds
    cases = [replace(case, kind=kind) for kind in kinds]
    lines = [strategy_line(of_kind, counts, limit_of(of_kind), _row, alone) for of_kind in cases]
    return Forecast(
        network.name, f"{wires.name} ({wires.setting})", "paradl", case.samples,
        f"{network.seconds_origin}: {network.seconds_source}", tuple(notes), tuple(lines),
    )  # fmt: skip


def _row(case: Case, row: ForecastRow) -> ForecastRow:
    try:
        total = estimate(case)
    except InputError as error:
        return replace(row, problem=str(error))
    network = case.network
    alone = sum(network.seconds_of(layer) for layer in network.layers if case.share(layer) == 1)
    full = sum(network.seconds_of(layer) / case.share(layer) for layer in network.layers)
    return replace(
        row,
        compute=total.compute - total.update,
        moved=total.moved,
        update=total.update,
        memory=total.memory,
        capacity=case.wires.memory,
        replicated=_replicated(case),
        longest=_longest_communication(case, total.moved),
        imbalance=_imbalance(case),
        duplicated=alone / full if case.shared > 1 else 0.0,
        congested=total.moved.total - estimate(replace(case, contention=False)).moved.total,
        shared=case.shared,
        largest=largest_batch(case),
    )


def limit_of(case: Case) -> Limit:
    """Return the number of devices that a method can use (the paper's table 3, last column).

    Filter and channel parallelism: the fewest channels of a split layer, without the input's; spatial: the fewest
    pixels of one; a pipeline: layers; data: the data set, as the batch grows with the devices.
    """
    network = case.network
    by_filters, by_pixels = (network.split_by(split) for split in (ModelSplit.FILTER, ModelSplit.SPATIAL))
    filters = min((layer.y[0] for layer in by_filters), default=1)
    channels = min((layer.x[0] for layer in by_filters[1:]), default=1)
    pixels = min((min(prod(layer.x[1:]), prod(layer.y[1:])) for layer in by_pixels), default=1)
    side = min((min(layer.x[1], layer.y[1]) for layer in by_pixels), default=1)
    most = case.samples // max(case.batch, 1)
    return (
        limit_by_count(case, len(network.layers))
        or {
            Method.SPATIAL: Limit(pixels, f"p <= {pixels}, the pixels of the smallest split layer"),
            Method.FILTER: Limit(filters, f"p <= {filters}, the fewest filters of a split layer"),
            Method.CHANNEL: Limit(
                channels, f"p <= {channels}, the fewest input channels of a split layer but the first"
            ),
            Method.DATA_FILTER: Limit(most * filters, f"p <= B x {filters} filters; groups of {case.group}"),
            Method.DATA_SPATIAL: Limit(most * side, f"p <= B x {side} rows of the smallest split layer"),
        }[case.kind]
    )


def _replicated(case: Case) -> float:
    """Return the bytes that are equal on all devices of a group: weights, activations, or those of unsplit layers."""
    network, activations = case.network, case.batch * (case.network.inputs + case.network.outputs)
    items = 0
    if case.kind is Method.DATA:
        items = network.weights
    elif case.split is ModelSplit.SPATIAL:
        counted = (layer for layer in network.split_by(case.split) if layer.counts_as_memory)
        items = activations - case.batch * sum(layer.inputs + layer.outputs for layer in counted) + network.weights
    elif case.split is ModelSplit.FILTER:
        items = activations + network.weights - sum(layer.weights for layer in network.split_by(case.split))
    return 2 * network.item_bytes * items


def _longest_communication(case: Case, moved: CommunicationSeconds) -> LongestCommunication:
    """Return the layers that communicate most: by weights, by outputs of split layers, by halos or stage outputs."""

    def most(layers: Iterable[OracleLayer], items: Callable[[OracleLayer], int] = lambda layer: layer.outputs) -> str:
        return max(layers, key=items).name

    network, split = case.network, case.network.split_by
    if moved.messages:
        return LongestCommunication(messages=most(stage[-1] for stage in balanced_stages(network, case.devices)[:-1]))
    return LongestCommunication(
        most(network.layers, lambda layer: layer.weights) if moved.gradients else "",
        most(split(ModelSplit.FILTER)) if moved.layers else "",
        most(split(ModelSplit.SPATIAL), lambda layer: layer.halo(layer.x)) if moved.halo else "",
    )


def _imbalance(case: Case) -> float:
    """Return the seconds of the slowest stage over the mean."""
    if case.kind not in IN_TURN:
        return 1.0
    network = case.network
    stages = balanced_stages(network, case.devices)
    return max(sum(map(network.seconds_of, stage)) for stage in stages) * case.devices / network.seconds
