"""The table of the closed forms: every strategy over numbers of devices, with how far each scales.

Limits: Kahira et al. 2021 (arXiv:2104.09075), table 3, last column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from galvatron_lite.errors import InputError
from galvatron_lite.oracle.closed_form import (
    HYBRIDS,
    Case,
    Method,
    balanced,
    estimate,
    group_of,
    largest_batch,
    seconds_in_full,
)
from galvatron_lite.oracle.layers import ModelSplit, Network, OracleLayer
from galvatron_lite.oracle.rows import Forecast, ForecastRow, Limit, Loudest, StrategyLine, beyond

KINDS = tuple(kind for kind in Method if kind is not Method.SERIAL)
"""Strategies of the table; one device is where each of them starts."""


def forecast(case: Case, kinds: Sequence[Method], counts: Sequence[int]) -> Forecast:
    """The table of several strategies (``kinds``) on several numbers of devices (``counts``, ascending)."""
    wires = case.wires
    for devices in counts:
        if devices > wires.devices:
            raise InputError("--gpus", devices, f"{wires.name} has {wires.devices}; give 1 to that many.")
    origin = f"{case.network.seconds_origin}: {case.network.seconds_source}"
    return Forecast(
        case.network.name, f"{wires.name} ({wires.setting})", "paradl", case.network.samples, origin,
        _notes(case), tuple(_line(replace(case, kind=kind), counts) for kind in kinds),
    )  # fmt: skip


def _notes(case: Case) -> tuple[str, ...]:
    said = tuple(f"quirk on: {quirk.value}" for quirk in sorted(case.quirks))
    return said if case.contention else (*said, "contention is left out")


def _line(case: Case, counts: Sequence[int]) -> StrategyLine:
    limit = limit_of(case)
    rows = tuple(_row(replace(case, devices=count), limit) for count in counts)
    return StrategyLine(case.kind.value, rows, limit, case.network.samples * case.network.seconds)


def _row(case: Case, limit: Limit) -> ForecastRow:
    """One row; beyond the limit it says so and has no figures."""
    row = ForecastRow(case.kind.value, case.devices, case.global_batch, case.iterations)
    if limit.devices is not None and case.devices > limit.devices:
        return replace(row, problem=beyond(limit))
    try:
        case = group_of(case)
        found = estimate(case)
    except InputError as error:
        return replace(row, problem=str(error))
    return replace(
        row,
        batch=case.global_batch,
        iterations=case.iterations,
        compute=found.compute - found.update,
        moved=found.moved,
        update=found.update,
        memory=found.memory,
        capacity=case.wires.memory,
        whole=_alike(case),
        loudest=_loudest(case),
        uneven=_uneven(case),
        twice=_twice(case),
        congested=found.moved.total - estimate(replace(case, contention=False)).moved.total,
        shared=case.devices // case.replicas if case.kind not in (Method.LAYER, Method.PIPELINE) else 1,
        largest=largest_batch(case),
    )


def limit_of(case: Case) -> Limit:
    """How many devices a strategy can use.

    Filter and channel parallelism: the fewest channels of a split layer, without the input's; spatial: the fewest
    pixels of one; a pipeline: layers; data: the data set, as the batch grows with the devices.
    """
    network = case.network
    filters = _least(network, ModelSplit.FILTER, lambda one: one.y[0])
    first = next(iter(network.split_by(ModelSplit.FILTER)), None)
    channels = min((one.x[0] for one in network.split_by(ModelSplit.FILTER) if one is not first), default=1)
    pixels = _least(network, ModelSplit.SPATIAL, lambda one: min(prod(one.x[1:]), prod(one.y[1:])))
    side = _least(network, ModelSplit.SPATIAL, lambda one: min(one.x[1], one.y[1]))
    most = network.samples // max(case.batch, 1)
    layers = len(network.layers)
    return {
        Method.SERIAL: Limit(1, "p = 1"),
        Method.DATA: Limit(most, f"p <= B, and B = {case.batch} p is at most the data set"),
        Method.SPATIAL: Limit(pixels, f"p <= {pixels}, the pixels of the smallest split layer"),
        Method.LAYER: Limit(layers, f"p <= {layers} layers"),
        Method.PIPELINE: Limit(layers, f"p <= {layers} layers"),
        Method.FILTER: Limit(filters, f"p <= {filters}, the fewest filters of a split layer"),
        Method.CHANNEL: Limit(channels, f"p <= {channels}, the fewest input channels of a split layer but the first"),
        Method.DATA_FILTER: Limit(most * filters, f"p <= B x {filters} filters; groups of {case.group}"),
        Method.DATA_SPATIAL: Limit(most * side, f"p <= B x {side} rows of the smallest split layer"),
    }[case.kind]


def _least(network: Network, split: ModelSplit, extent: Callable[[OracleLayer], int]) -> int:
    return min((extent(one) for one in network.split_by(split)), default=1)


def _alike(case: Case) -> float:
    """Bytes of the memory that all devices of a group hold alike: weights, activations, or those of unsplit layers."""
    network, size = case.network, 2 * case.network.item_bytes
    activations = case.batch * (network.inputs + network.outputs)
    match case.kind:
        case Method.DATA:
            return size * network.weights
        case Method.SPATIAL | Method.DATA_SPATIAL:
            split = sum(one.inputs + one.outputs for one in network.split_by(ModelSplit.SPATIAL) if one.counted)
            return size * (activations - case.batch * split + network.weights)
        case Method.FILTER | Method.CHANNEL | Method.DATA_FILTER:
            split = sum(one.weights for one in network.split_by(ModelSplit.FILTER))
            return size * (activations + network.weights - split)
    return 0.0


def _loudest(case: Case) -> Loudest:
    """The layers that communicate most: by weights, by outputs of split ones, by halos or a stage's output."""
    network, moved = case.network, estimate(case).moved
    gradients = max(network.layers, key=lambda one: one.weights).name if moved.gradients else ""
    wide = max(network.split_by(ModelSplit.FILTER), key=lambda one: one.outputs, default=None) if moved.layers else None
    if moved.messages:
        ends = [stage[-1] for stage in balanced(network, case.devices)[:-1]]
        return Loudest(messages=max(ends, key=lambda one: one.outputs).name)
    near = (
        max(network.split_by(ModelSplit.SPATIAL), key=lambda one: one.halo(one.x), default=None) if moved.halo else None
    )
    return Loudest(gradients, wide.name if wide else "", near.name if near else "")


def _uneven(case: Case) -> float:
    """The slowest stage over the mean stage."""
    if case.kind not in (Method.PIPELINE, Method.LAYER):
        return 1.0
    network = case.network
    stages = balanced(network, case.devices)
    return max(sum(map(network.seconds_of, stage)) for stage in stages) * case.devices / network.seconds


def _twice(case: Case) -> float:
    """Share of a device's compute in layers that every device of its group computes in full."""
    split = {
        Method.SPATIAL: ModelSplit.SPATIAL, Method.DATA_SPATIAL: ModelSplit.SPATIAL, Method.FILTER: ModelSplit.FILTER,
        Method.CHANNEL: ModelSplit.FILTER, Method.DATA_FILTER: ModelSplit.FILTER,
    }.get(case.kind)  # fmt: skip
    group = case.group if case.kind in HYBRIDS else case.devices
    if split is None or group == 1:
        return 0.0
    network = case.network
    alike = sum(network.seconds_of(one) for one in network.layers if split not in one.split)
    return alike / seconds_in_full(network, split, group)
