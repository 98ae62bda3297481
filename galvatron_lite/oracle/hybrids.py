"""Closed forms of the hybrids: data parallelism between groups of p2 devices, another strategy within. No torch here.

    data+filter    compute   D/p (FW + BW) + I/p2 WU
                   moved     3 I (p2-1) S_l[a + (B/p1) y_l/p2 d b] + 2 I (p1-1)(a + w/(p2 p1) d b)
                   memory    2 d (B/p1 (x+y) + w/p2)
    data+spatial   compute   D/p (FW + BW) + I WU
                   moved     I times: halos within a group, twice the all-gather where the split ends,
                             2 (p2-1)(a + w/p2 d b) within a group, 2 (p1-1)(a + w/p1 d b) between leaders
                   memory    2 d (B/p1 ((x+y)/p2 of split layers, x+y of the others) + w)

Contention (the paper's phi): 2 p2 flows share a node's adapter and bridge (p2 devices, out and in) where groups talk to
each other and where halos go through host memory; 2 in the all-gather.
"""

from __future__ import annotations

from math import ceil

from galvatron_lite.oracle.case import Case, Estimate, Moved
from galvatron_lite.oracle.layers import OracleLayer, Split
from galvatron_lite.oracle.network import all_gather, all_reduce
from galvatron_lite.oracle.quirks import Quirk
from galvatron_lite.oracle.shares import halo_seconds, layer_collectives, seconds_in_full, sharded_weights


def data_filter(case: Case) -> Estimate:
    """Filter parallelism within groups, data parallelism between them."""
    network, inner = case.network, case.group
    update = case.iterations / inner * network.update_seconds
    compute = case.iterations * case.batch * seconds_in_full(network, Split.FILTER, inner) + update
    within = layer_collectives(case, case.wires.link(inner), inner, case.batch)
    own = sharded_weights(case, inner, twice=False)
    between = _between(case, network.weights if case.has(Quirk.WHOLE_WEIGHTS) else own)
    held = case.batch * (network.inputs + network.outputs) + own
    return Estimate(
        compute,
        Moved(gradients=between, layers=within).times(case.iterations),
        2 * network.item_bytes * held,
        update,
    )


def data_spatial(case: Case) -> Estimate:
    """Spatial parallelism within groups, data parallelism between them."""
    network, layers = case.network, _spatial_layers(case)
    update = case.iterations * network.update_seconds
    seconds = sum(network.seconds_of(one) / _share(case, one) for one in layers)
    compute = ceil(network.samples / case.replicas) * seconds + update
    moved = Moved(gradients=_gradients(case), halo=_halo(case), gather=_gather(case)).times(case.iterations)
    kept = [one for one in layers if one.counted or case.has(Quirk.COUNTS_REUSED)]
    activations = sum(ceil(one.inputs / _share(case, one)) + ceil(one.outputs / _share(case, one)) for one in kept)
    return Estimate(compute, moved, 2 * network.item_bytes * (case.batch * activations + network.weights), update)


def _share(case: Case, layer: OracleLayer) -> int:
    """Devices that share a layer's pixels."""
    return case.group if Split.SPATIAL in layer.split else 1


def _spatial_layers(case: Case) -> tuple[OracleLayer, ...]:
    """All layers; those up to the last split one where the released code's way is asked for."""
    layers = case.network.layers
    if not case.has(Quirk.STOPS_AT_SPLIT):
        return layers
    last = max((place for place, one in enumerate(layers) if Split.SPATIAL in one.split), default=-1)
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
    split = case.network.split_by(Split.SPATIAL)
    if not split or case.group == 1:
        return 0.0
    link = case.wires.staged_link(case.group).contended(case.phi(2))
    parts = 1 if case.has(Quirk.WHOLE_GATHER) else case.group
    return 2 * all_gather(link, case.group, case.batch * split[-1].outputs * case.network.item_bytes / parts)
