"""Terms that several closed forms have: compute of split layers, collectives of each, halos, weights. No torch."""

from __future__ import annotations

from galvatron_lite.oracle.case import Case, Kind
from galvatron_lite.oracle.layers import Network, Split
from galvatron_lite.oracle.network import Link
from galvatron_lite.oracle.quirks import Quirk


def seconds_in_full(network: Network, split: Split, devices: int) -> float:
    """Forward and backward of one sample where so many devices share the layers a strategy splits."""
    return sum(network.seconds_of(one) / (devices if split in one.split else 1) for one in network.layers)


def layer_collectives(case: Case, link: Link, devices: int, samples: float) -> float:
    """Seconds an iteration: an all-gather and an all-reduce of every split layer's output but the last layer's.

    3 (p - 1) sum over l < G of (alpha + B y_l / p delta beta): 1 for the all-gather, 2 for the all-reduce.
    """
    network = case.network
    inner = [one for one in network.layers[:-1] if Split.FILTER in one.split]
    items = sum(one.outputs for one in inner)
    return 3 * (devices - 1) * (len(inner) * link.alpha + samples * items / devices * network.item_bytes * link.beta)


def halo_seconds(case: Case, link: Link, samples: float) -> float:
    """Seconds an iteration of the borders' exchange: 2 sums of (2 alpha + B (halo(x) + halo(dL/dy)) delta beta).

    Hybrids have halo(x) in both passes, as the released oracle does.
    """
    size = samples * case.network.item_bytes * link.beta
    return sum(
        2 * (2 * link.alpha + (one.halo(one.x) + one.halo(one.x if case.kind is Kind.DATA_SPATIAL else one.y)) * size)
        for one in case.network.split_by(Split.SPATIAL)
        if one.exchanges
    )


def sharded_weights(case: Case, devices: int, *, twice: bool) -> float:
    """Items of weights a device holds where it shares those of the layers that filter parallelism splits."""
    network = case.network
    held = sum(one.weights / (devices if Split.FILTER in one.split else 1) for one in network.layers)
    return held / devices if twice and case.has(Quirk.FILTER_MEMORY) else held
