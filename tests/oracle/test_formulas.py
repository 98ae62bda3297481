"""The closed forms against figures worked out by hand, and what must hold for any network."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.errors import InputError
from galvatron_lite.oracle.closed_form import Case, Quirk, balanced, estimate, quirks_named
from galvatron_lite.oracle.layers import Link, ModelSplit, Network, Op, OracleLayer, WorstLinks, all_reduce
from galvatron_lite.oracle.request import network_named
from galvatron_lite.oracle.rows import Method, least_runs

BOTH = (ModelSplit.FILTER, ModelSplit.SPATIAL)
FIRST = OracleLayer("first", Op.CONV, (2, 8, 8), (4, 8, 8), (3, 3), BOTH)  # 72 weights, 128 in, 256 out
MIDDLE = OracleLayer("middle", Op.RELU, (4, 8, 8), (4, 8, 8))  # 256 FLOPs, not counted as memory
LAST = OracleLayer("last", Op.FC, (256, 1, 1), (10, 1, 1), (1, 1))  # 2,560 weights
NET = Network("net", "by hand", 960, 8, 1e-3, "measured", "by hand", (FIRST, MIDDLE, LAST))
NEAR, FAR = Link(1e-5, 1e-9), Link(1e-4, 1e-8)
WIRES = WorstLinks("two nodes", "", 16, 1e9, 4, ((4, NEAR), (16, FAR)), ((4, FAR), (16, FAR)))


def ask(kind: Method, devices: int, batch: int = 8, **changes: object) -> Case:
    return Case(NET, WIRES, kind, devices, batch, **changes)  # type: ignore[arg-type]


def test_pooling_is_counted_as_if_it_mixed_channels() -> None:
    pool = OracleLayer("pool", Op.POOL, (4, 8, 8), (4, 4, 4), (2, 2))
    assert pool.forward_flops == 4 * 4 * 4 * 16
    assert (pool.halo(pool.x), pool.exchanges) == (0, True)  # windows that do not overlap; a message all the same


def test_whole_iterations_count() -> None:
    assert ask(Method.DATA, 16, batch=10).iterations == 6
    assert estimate(ask(Method.DATA, 7, batch=10)).compute == pytest.approx(138 * 1e-3)  # 960 / 7 rounded up


def test_the_last_layer_brings_nothing_together() -> None:
    whole = replace(NET, layers=(FIRST, replace(LAST, split=(ModelSplit.FILTER,))))
    found = estimate(Case(whole, WIRES, Method.FILTER, 4, 8))
    assert found.moved.layers == pytest.approx(120 * 3 * 3 * (1e-5 + 8 * 256 / 4 * 4 * 1e-9))


def test_spatial_by_hand() -> None:
    found = estimate(ask(Method.SPATIAL, 2))
    assert found.moved.gradients == pytest.approx(120 * all_reduce(NEAR, 2, 2632 * 4))
    assert found.moved.halo == pytest.approx(120 * 2 * (2 * 1e-4 + 8 * (16 + 32) * 4 * 1e-8))
    assert found.memory == 2 * 4 * (8 * (384 / 2 + 266) + 2632)


def test_pipeline_by_hand() -> None:
    found = estimate(ask(Method.PIPELINE, 2, segments=4))
    stages = balanced(NET, 2)
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
        kind: estimate(Case(known, WIRES, kind, 2, 8, group=2)).update for kind in Method if kind is not Method.SERIAL
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


def test_formulas_without_the_codes_ways() -> None:
    """Own values that the golden rows' quirks change: systems.md 5.4."""
    resnet, cosmo = network_named("resnet50"), network_named("cosmoflow-512")
    for devices, memory in ((4, 15_310_729_600), (64, 15_271_943_320)):
        assert estimate(Case(resnet, replace(WIRES, direct=((64, FAR),)), Method.FILTER, devices, 64)).memory == memory
    found = estimate(Case(cosmo, WIRES, Method.DATA_SPATIAL, 4, 1))
    assert found.compute / 1584 == pytest.approx(0.6740, abs=5e-5)
    code = estimate(Case(cosmo, WIRES, Method.DATA_SPATIAL, 4, 1, quirks=frozenset(Quirk)))
    assert code.compute / 1584 == pytest.approx(0.554168697)
    assert code.moved.gather > 3 * found.moved.gather


def test_quirks_have_names() -> None:
    assert quirks_named(["filter-memory-divides-twice"]) == {Quirk.FILTER_MEMORY}
    assert quirks_named(["all"]) == set(Quirk)
    with pytest.raises(InputError, match=r"--quirk: 'typo' .*data-spatial-stops-at-split"):
        quirks_named(["typo"])


@pytest.mark.parametrize("devices", [6, 15])
def test_groups_are_whole(devices: int) -> None:
    with pytest.raises(InputError, match="whole groups of 4"):
        estimate(ask(Method.DATA_FILTER, devices, group=4))


def test_more_devices_than_there_are() -> None:
    with pytest.raises(InputError, match="The cluster has 16"):
        estimate(ask(Method.DATA, 17))
    with pytest.raises(InputError, match="net has 3 layers"):
        estimate(ask(Method.PIPELINE, 4))


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=9), data=st.data())
def test_runs_are_as_light_as_can_be(weights: list[int], data: st.DataObject) -> None:
    runs = data.draw(st.integers(1, len(weights)))
    sizes = least_runs([float(weight) for weight in weights], runs)
    assert (len(sizes), sum(sizes), min(sizes) > 0) == (runs, len(weights), True)

    def heaviest(cuts: tuple[int, ...]) -> int:
        ends = (0, *cuts, len(weights))
        return max(sum(weights[start:end]) for start, end in pairwise(ends))

    own = tuple(sum(sizes[: number + 1]) for number in range(runs - 1))
    assert heaviest(own) == min(heaviest(cuts) for cuts in combinations(range(1, len(weights)), runs - 1))


@settings(max_examples=30, deadline=None)
@given(devices=st.integers(2, 16), batch=st.integers(1, 40))
def test_what_grows_and_what_falls(devices: int, batch: int) -> None:
    more, fewer = (estimate(ask(Method.FILTER, p, batch)) for p in (devices, devices - 1))
    assert more.compute < fewer.compute
    assert more.memory < fewer.memory
    assert more.moved.total > fewer.moved.total
