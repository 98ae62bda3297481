"""The closed forms against figures worked out by hand, and what must hold for any network."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph, OperatorClass
from galvatron_lite.oracle.closed_form import Case, Quirk, balanced_stages, estimate, largest_batch, quirks_named
from galvatron_lite.oracle.layers import (
    Link,
    ModelSplit,
    Network,
    Op,
    OracleLayer,
    WorstLinks,
    all_reduce,
    cluster_links,
    fabric_links,
    network_of,
)
from galvatron_lite.oracle.request import fabric_named, graph_named, network_named, network_names
from galvatron_lite.oracle.rows import Method, balanced_runs

from .printed import printed

BOTH = (ModelSplit.FILTER, ModelSplit.SPATIAL)
FIRST = OracleLayer("first", Op.CONV, (2, 8, 8), (4, 8, 8), (3, 3), BOTH)  # 72 weights, 128 in, 256 out
MIDDLE = OracleLayer("middle", Op.RELU, (4, 8, 8), (4, 8, 8))  # 256 FLOPs, not counted as memory
LAST = OracleLayer("last", Op.FC, (256, 1, 1), (10, 1, 1), (1, 1))  # 2,560 weights
NET = Network("net", "by hand", 960, 8, 1e-3, "measured", "by hand", (FIRST, MIDDLE, LAST))
NEAR, FAR = Link(1e-5, 1e-9), Link(1e-4, 1e-8)
WIRES = WorstLinks("two nodes", "", 16, 1e9, 4, ((4, NEAR), (16, FAR)), ((4, FAR), (16, FAR)))


def ask(
    kind: Method, devices: int, batch: int = 8, network: Network = NET, wires: WorstLinks = WIRES, **changes: Any
) -> Case:
    return Case(kind, devices, batch, network.samples, network=network, wires=wires, **changes)


def test_whole_iterations_count() -> None:
    assert ask(Method.DATA, 16, batch=10).iterations == 6
    assert estimate(ask(Method.DATA, 7, batch=10)).compute == pytest.approx(138 * 1e-3)  # 960 / 7 rounded up


def test_the_last_layer_gathers_nothing() -> None:
    whole = replace(NET, layers=(FIRST, replace(LAST, split=(ModelSplit.FILTER,))))
    found = estimate(ask(Method.FILTER, 4, network=whole))
    assert found.moved.layers == pytest.approx(120 * 3 * 3 * (1e-5 + 8 * 256 / 4 * 4 * 1e-9))


def test_spatial_by_hand() -> None:
    found = estimate(ask(Method.SPATIAL, 2))
    assert found.moved.gradients == pytest.approx(120 * all_reduce(NEAR, 2, 2632 * 4))
    assert found.moved.halo == pytest.approx(120 * 2 * (2 * 1e-4 + 8 * (16 + 32) * 4 * 1e-8))
    assert found.memory == 2 * 4 * (8 * (384 / 2 + 266) + 2632)


def test_pipeline_by_hand() -> None:
    found = estimate(ask(Method.PIPELINE, 2, segments=4))
    stages = balanced_stages(NET, 2)
    assert [len(stage) for stage in stages] == [1, 2]
    forward = [sum(map(NET.forward_of, stage)) for stage in stages]
    backward = [sum(NET.seconds_of(one) - NET.forward_of(one) for one in stage) for stage in stages]
    assert found.compute == pytest.approx(960 * (2 + 4 - 1) / 4 * (max(forward) + max(backward)))
    assert found.moved.messages == pytest.approx(2 * 120 * (2 + 4 - 2) * (1e-5 + 8 / 4 * 256 * 4 * 1e-9))
    assert found.memory == 2 * 4 * max(8 * 384 + 72, 8 * 266 + 2560)
    in_turn = estimate(ask(Method.LAYER, 2))
    assert in_turn.compute == pytest.approx(0.96)
    assert in_turn.moved.messages == pytest.approx(2 * 120 * (1e-5 + 8 * 256 * 4 * 1e-9))


def test_weight_update_counts_where_it_is_known() -> None:
    known = replace(NET, update_seconds=0.5)
    times = {
        kind: estimate(ask(kind, 2, network=known, group=2)).update for kind in Method if kind is not Method.SERIAL
    }
    assert times[Method.SPATIAL] == times[Method.DATA_SPATIAL] == 60.0
    assert times[Method.DATA] == 30.0  # half the iterations
    assert times[Method.FILTER] == times[Method.DATA_FILTER] == 30.0  # half the weights
    assert times[Method.PIPELINE] == pytest.approx(60 * 2560 / 2632)


@pytest.mark.parametrize("kind", list(Method))
def test_one_device_is_the_serial_case(kind: Method) -> None:
    alone, found = estimate(ask(Method.SERIAL, 1)), estimate(ask(kind, 1))
    assert found.moved.total == 0
    assert found.compute == pytest.approx(alone.compute)
    assert found.memory == pytest.approx(alone.memory)


def test_formulas_without_the_quirks_of_the_published_code() -> None:
    """Own values that the golden rows' quirks change: systems.md 5.4."""
    resnet, cosmo = network_named("resnet50"), network_named("cosmoflow-512")
    for devices, memory in ((4, 15_310_729_600), (64, 15_271_943_320)):
        wide = replace(WIRES, direct=((64, FAR),))
        assert estimate(ask(Method.FILTER, devices, 64, resnet, wide)).memory == memory
    found = estimate(ask(Method.DATA_SPATIAL, 4, 1, cosmo))
    assert found.compute / 1584 == pytest.approx(0.6740, abs=5e-5)
    code = estimate(ask(Method.DATA_SPATIAL, 4, 1, cosmo, quirks=frozenset(Quirk)))
    assert code.compute / 1584 == pytest.approx(0.554168697)
    assert code.moved.gather > 3 * found.moved.gather


@pytest.mark.parametrize(
    ("kind", "devices", "message"),
    [
        (Method.DATA_FILTER, 6, "whole groups of 4"),
        (Method.DATA_FILTER, 15, "whole groups of 4"),
        (Method.DATA, 17, "The cluster has 16"),
        (Method.PIPELINE, 4, "net has 3 layers"),
    ],
)
def test_numbers_of_devices_that_cannot_be(kind: Method, devices: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        estimate(ask(kind, devices, group=4))


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=9), data=st.data())
def test_pipeline_stages_are_balanced_optimally(weights: list[int], data: st.DataObject) -> None:
    runs = data.draw(st.integers(1, len(weights)))
    sizes = balanced_runs([float(weight) for weight in weights], runs)
    assert (len(sizes), sum(sizes), min(sizes) > 0) == (runs, len(weights), True)

    def heaviest(cuts: tuple[int, ...]) -> int:
        ends = (0, *cuts, len(weights))
        return max(sum(weights[start:end]) for start, end in pairwise(ends))

    own = tuple(sum(sizes[: number + 1]) for number in range(runs - 1))
    assert heaviest(own) == min(heaviest(cuts) for cuts in combinations(range(1, len(weights)), runs - 1))


ABCI = fabric_named("abci")
assert ABCI is not None
MICRO = 1e-6  # seconds


@pytest.mark.parametrize(
    ("setting", "figures"),
    [
        (None, {4: 9, 5: 30.31, 68: 30.31, 69: 30.49, 136: 30.49, 137: 30.98, 4096: 30.98}),
        ("plx-20us", {1: 9, 8: 40.31, 128: 40.49, 1024: 40.98}),
    ],
)
def test_two_settings_of_the_same_network(setting: str | None, figures: dict[int, float]) -> None:
    wires = fabric_links(ABCI, setting)
    for devices, micros in figures.items():
        assert wires.link(devices).alpha == pytest.approx(micros * MICRO)
        assert 1 / wires.link(devices).beta == (50e9 if devices <= 4 else 12.5e9)


def test_messages_through_host_memory() -> None:
    wires = fabric_links(ABCI)
    assert wires.link(4, staged=True).alpha == pytest.approx(3.00011e-3)
    assert wires.link(4, staged=True).beta == 1 / 16e9
    assert wires.link(8, staged=True).alpha == pytest.approx((4 * 15.11 + 0.09) * MICRO)
    assert wires.link(8, staged=True).beta == 1 / 12.5e9


def test_any_cluster_has_links() -> None:
    cluster = load_cluster("abci", 128)
    wires = cluster_links(cluster)
    near, leaf, far = (wires.link(devices) for devices in (4, 64, 128))
    levels = cluster.levels
    assert [near.alpha, leaf.alpha, far.alpha] == [level.latency for level in levels]
    assert 1 / near.beta == pytest.approx(levels[0].bandwidth * levels[0].efficiency)
    assert near.beta < leaf.beta == far.beta  # one adapter; what leaves a leaf switch is no slower
    slow = replace(cluster, levels=(replace(levels[0], bandwidth=1e6), *levels[1:]))
    assert cluster_links(slow).link(128).beta == cluster_links(slow).link(4).beta


def test_bad_settings_and_counts() -> None:
    with pytest.raises(InputError, match="abci has plx-15us, plx-20us"):
        fabric_links(ABCI, "plx-10us")
    with pytest.raises(InputError, match="leave it out"):
        cluster_links(load_cluster("v100", 8), "plx-15us")
    with pytest.raises(InputError, match=r"--gpus: 5000 .*4096"):
        fabric_links(ABCI).link(5000)


def table(graph: ModelGraph) -> Network:
    return network_of(graph, 1e-3, "by hand", 1000, 8)


@pytest.mark.parametrize("name", ["resnet50", "regnety_032"])
def test_flops_and_weights_are_those_of_the_model(name: str) -> None:
    graph = graph_named(name, "fp32")
    found = table(graph)
    convolutions = sum(
        one.flops
        for layer in graph.layers
        for one in graph.kind_of(layer).operators
        if one.kind is OperatorClass.CONVOLUTION
    )
    windows = [one for one in found.layers if one.op is Op.CONV and len(one.kernel) > 1]
    assert sum(one.forward_flops for one in windows) == convolutions
    # Norms and biases apart, every parameter is a weight of a layer.
    assert 0.97 * graph.parameters < found.weights <= graph.parameters
    assert sum(map(found.seconds_of, found.layers)) == pytest.approx(1e-3)


def test_the_made_table_is_near_the_published_one() -> None:
    """Pictures of 224 pixels for 226; the projections of He et al. 2015, which the published table leaves out."""
    made, published = table(graph_named("resnet50", "fp32")), network_named("resnet50")
    assert made.weights == pytest.approx(published.weights, rel=0.13)
    split = [sum(one.outputs for one in net.split_by(ModelSplit.FILTER)) for net in (made, published)]
    assert split[0] == pytest.approx(split[1], rel=0.25)
    assert made.outputs == pytest.approx(published.outputs, rel=0.25)


@pytest.mark.parametrize("name", network_names())
def test_every_published_table_has_a_model_of_the_planner(name: str) -> None:
    """Of the same network: pictures of 226 pixels, projections and biases apart."""
    published = network_named(name)
    graph = graph_named(published.graph, "fp32")
    assert graph.parameters == pytest.approx(published.weights, rel=0.25)
    assert len(graph.layers) <= len(published.layers)


def test_spatial_splits_are_of_layers_with_pixels() -> None:
    found = table(graph_named("vgg16", "fp32"))
    assert {one.op for one in found.split_by(ModelSplit.SPATIAL)} == {Op.CONV, Op.POOL}
    assert all(ModelSplit.FILTER in one.split for one in found.layers if one.op is Op.CONV)
    assert not any(one.split for one in found.layers if one.op in (Op.FC, Op.RELU, Op.NORM))


def test_half_precision_has_small_items_and_transformers_have_no_such_table() -> None:
    assert table(graph_named("resnet50", "fp16")).item_bytes == 2
    with pytest.raises(InputError, match="closed forms are of convolutional networks"):
        table(graph_named("vit-huge", "fp32"))


shown = "{:.12g}".format
"""A float as Python 2 prints it: 12 significant digits."""


@pytest.mark.parametrize(
    ("name", "kind", "quirks", "samples"),
    [
        ("resnet50", Method.DATA, (), "66.3713327303"),
        ("vgg16", Method.DATA, (), "58.5511784785"),
        ("alexnet", Method.DATA, (), "1132.35276269"),
        ("cosmoflow-512", Method.DATA_SPATIAL, ("all",), "0.266622834017"),
        ("cosmoflow-256", Method.DATA_SPATIAL, ("all",), "2.10765393012"),
        ("vgg16", Method.DATA_SPATIAL, ("all",), "51.3001363286"),
    ],
)
def test_the_largest_batch_to_every_printed_digit(
    name: str, kind: Method, quirks: tuple[str, ...], samples: str
) -> None:
    """``maxSamplePerNode`` of the logs."""
    case = ask(kind, 4, 1, network_named(name), fabric_links(ABCI), quirks=quirks_named(quirks))
    assert shown(largest_batch(case)) == samples


def test_every_printed_digit() -> None:
    for one in printed():
        for devices, figures in one.rows.items():
            found = estimate(one.case(network_named(one.model), ABCI, devices))
            computed = (found.compute, found.moved.total, found.memory)
            name = f"{one.model} {one.strategy.value} {one.batch} {devices}"
            assert list(map(shown, computed)) == list(map(shown, figures)), name
