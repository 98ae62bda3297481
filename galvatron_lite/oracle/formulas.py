"""The closed forms of ParaDL (Kahira et al. 2021, arXiv:2104.09075, table 3), an epoch each. Pure. No torch here.

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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from galvatron_lite.oracle.case import Case, Estimate, Kind, Moved, group_of
from galvatron_lite.oracle.hybrids import data_filter, data_spatial
from galvatron_lite.oracle.layers import OracleLayer, Split
from galvatron_lite.oracle.network import all_reduce
from galvatron_lite.oracle.shares import halo_seconds, layer_collectives, seconds_in_full, sharded_weights
from galvatron_lite.oracle.stages import balanced


def estimate(case: Case) -> Estimate:
    """What a strategy costs on so many devices.

    Raises:
        InputError: more devices than the cluster has, or a hybrid's devices that make no whole groups.
    """
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
    return Estimate(network.samples * network.seconds + update, Moved(), _memory(case, case.batch), update)


def data(case: Case) -> Estimate:
    """Every device has a replica and ``batch`` samples of its own."""
    network = case.network
    update = case.iterations * network.update_seconds
    compute = ceil(network.samples / case.devices) * network.seconds + update
    return Estimate(compute, Moved(gradients=_exchange(case)), _memory(case, case.batch), update)


def spatial(case: Case) -> Estimate:
    """Every device has a part of each picture; halos go between neighbours in both passes."""
    network, p = case.network, case.devices
    update = case.iterations * network.update_seconds
    seconds = seconds_in_full(network, Split.SPATIAL, p)
    halo = case.iterations * halo_seconds(case, case.wires.staged_link(p), case.batch) if p > 1 else 0.0
    split = _activations(network.split_by(Split.SPATIAL))
    held = split / p + network.inputs + network.outputs - split
    return Estimate(
        network.samples * seconds + update,
        Moved(gradients=_exchange(case), halo=halo),
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
        network.samples * network.seconds + update, Moved(messages=messages), _fullest(case, stages), update
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
        Moved(messages=2 * case.iterations * (p + parts - 2) * slowest),
        _fullest(case, stages),
        update,
    )


def filters(case: Case) -> Estimate:
    """Every device has a part of each layer's output channels (filter) or input channels (channel)."""
    network, p = case.network, case.devices
    update = case.iterations / p * network.update_seconds
    compute = case.iterations * case.batch * seconds_in_full(network, Split.FILTER, p) + update
    moved = case.iterations * layer_collectives(case, case.wires.link(p), p, case.batch) if p > 1 else 0.0
    held = case.batch * (network.inputs + network.outputs) + sharded_weights(case, p, twice=True)
    return Estimate(compute, Moved(layers=moved), 2 * network.item_bytes * held, update)


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


_FORMULAS: dict[Kind, Callable[[Case], Estimate]] = {
    Kind.SERIAL: serial,
    Kind.DATA: data,
    Kind.SPATIAL: spatial,
    Kind.LAYER: layer,
    Kind.PIPELINE: pipeline,
    Kind.FILTER: filters,
    Kind.CHANNEL: filters,
    Kind.DATA_FILTER: data_filter,
    Kind.DATA_SPATIAL: data_spatial,
}
