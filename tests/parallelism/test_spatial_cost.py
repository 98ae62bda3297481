"""Spatial parallelism: bytes by hand, the closed form of Kahira et al. 2021, which grids are offered."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from galvatron_lite.cluster.cluster import RankGroup
from galvatron_lite.cost.communication import Links
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Recompute, SplitDims, TensorSplit
from galvatron_lite.model.shapes.registry import load_model
from galvatron_lite.parallelism.base import Collective, Communication, Moment, Strategy
from galvatron_lite.parallelism.pictures import windows_of
from galvatron_lite.parallelism.spatial.cost import SpatialDimension, splits_pixels
from galvatron_lite.profiler.schema import LayerPoint
from tests.factories import make_cluster, make_graph, make_kind, make_profile
from tests.parallelism.test_states_cost import work

HEIGHT, WIDTH, CHANNELS = 48, 64, 32
Shape = tuple[int, ...]


def convolved(name: str, kernel: int, stride: int = 1, *, gradient: bool = True) -> Operator:
    shape = (CHANNELS, CHANNELS, 1, HEIGHT, WIDTH, kernel, kernel, stride, stride)
    flops = 2 * CHANNELS * CHANNELS * kernel**2 * HEIGHT * WIDTH // stride**2
    return Operator(name, OperatorClass.CONVOLUTION, shape, 1, flops, 2 * flops if gradient else flops, 1, 1, 1)


NORM = Operator("norm", OperatorClass.MEMORY, (CHANNELS * HEIGHT * WIDTH,), 1, 0, 0, 1, 1, statistics=2 * CHANNELS)
STACK = (convolved("a", 3), NORM, convolved("b", 1), convolved("c", 7))


def stack(*operators: Operator) -> LayerKind:
    dims = SplitDims(in_channels=CHANNELS, out_channels=CHANNELS, height=HEIGHT, width=WIDTH)
    plain = make_kind("block", 1000, recompute=list(Recompute))
    return replace(plain, parameters=TensorSplit(whole=1000), operators=operators, dims=dims)


def sends(strategy: Strategy, kind: LayerKind, moment: Moment, samples: float = 4.0) -> list[Communication]:
    return [
        one for one in work(strategy, kind, samples).communications
        if one.collective is Collective.SEND_RECV and one.moment is moment
    ]  # fmt: skip


def test_columns_go_to_two_neighbours() -> None:
    # 3 x 3 sends one column a side, 7 x 7 three, 1 x 1 none: 2 bytes x 4 samples x channels x height x columns.
    kind = stack(*STACK)
    for moment in (Moment.FORWARD, Moment.BACKWARD):
        (one,) = sends(Strategy(width=4), kind, moment)
        assert one.count == 2 * 2
        assert one.size * one.count == 2 * (1 + 3) * 2 * 4 * CHANNELS * HEIGHT
        assert one.group == RankGroup(4, 1, 1)
        assert not one.overlaps
    assert work(Strategy(width=4), kind, 4.0).edge_bytes == 2 * (1 + 3) * 2 * 4 * CHANNELS * HEIGHT


def test_a_grid_sends_rows_of_its_own_columns_and_columns_with_the_rows_that_arrived() -> None:
    rows, columns = sends(Strategy(data=2, height=2, width=4), stack(convolved("a", 3)), Moment.FORWARD)
    share = 2 * 4 / 2 * CHANNELS
    assert (rows.size, rows.count) == (share * WIDTH / 4, 2)
    assert (columns.size, columns.count) == (share * (HEIGHT / 2 + 2), 2)
    assert rows.group == RankGroup(8, 1, 2)


def test_windows_that_do_not_overlap_send_nothing() -> None:
    assert sends(Strategy(height=4), stack(convolved("a", 1), convolved("b", 2, 2)), Moment.FORWARD) == []


def test_a_stride_needs_fewer_neighbours_and_an_image_takes_no_gradient() -> None:
    kind = stack(convolved("a", 7, 2, gradient=False))
    (one,) = sends(Strategy(height=2), kind, Moment.FORWARD)
    assert one.size == 2 * 4 * CHANNELS * WIDTH * 5 / 2
    assert sends(Strategy(height=2), kind, Moment.BACKWARD) == []


def test_a_pooling_window_has_edges_too() -> None:
    items = CHANNELS * HEIGHT * WIDTH // 4
    pool = Operator("pool", OperatorClass.MEMORY, (items, CHANNELS, HEIGHT, WIDTH, 3, 3, 2, 2), 1, 0, 0, 1, 1)
    (one,) = sends(Strategy(height=2), stack(pool), Moment.FORWARD)
    assert one.size * one.count == 2 * 4 * CHANNELS * WIDTH


def test_statistics_of_a_batch_are_summed_over_the_group_in_either_pass() -> None:
    found = [
        one for one in work(Strategy(data=2, height=2), stack(*STACK), 4.0).communications
        if one.collective is Collective.ALL_REDUCE and one.moment is not Moment.STEP
    ]  # fmt: skip
    assert [(one.size, one.moment, one.group) for one in found] == [
        (4 * 2 * CHANNELS, moment, RankGroup(2, 1, 2)) for moment in (Moment.FORWARD, Moment.BACKWARD)
    ]


def test_weights_are_whole_and_their_gradients_summed_over_data_and_space() -> None:
    known = work(Strategy(data=2, height=2, width=2), stack(*STACK), 4.0)
    (summed,) = (one for one in known.communications if one.moment is Moment.STEP)
    assert (known.parameters, known.state_items, known.samples) == (1000, 1000, 4 / 8)
    assert (summed.group, summed.size) == (RankGroup(8, 1, 1), 2 * 1000)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_of_states_go_over_spatial_ranks(stage: int) -> None:
    alone = work(Strategy(height=4, zero_stage=stage), stack(*STACK), 4.0)
    beside = work(Strategy(zero=2, height=4, zero_stage=stage), stack(*STACK), 4.0)
    assert (alone.state_items, beside.state_items) == (1000 / 4, 1000 / 8)


def test_full_recomputation_sends_again_and_keeps_no_edges() -> None:
    strategy = Strategy(height=2, recompute=Recompute.FULL)
    count = sum(one.count for one in sends(strategy, stack(*STACK), Moment.BACKWARD))
    assert count == 2 * 2 * 2
    assert work(strategy, stack(*STACK), 4.0).edge_bytes == 0


@pytest.mark.parametrize("ways", [2, 4])
def test_seconds_are_those_of_the_closed_form(ways: int) -> None:
    """Kahira et al. 2021, table 3, "spatial", without weights: FW / p, and 2 a + B (halo(x) + halo(dL/dy)) d b, twice.

    Halos of one side; a neighbour's link as fast as any.
    """
    alpha, bandwidth, batch = 1e-5, 1e9, 4
    kind = stack(convolved("a", 3), convolved("b", 5))
    kind = replace(kind, parameters=TensorSplit())
    point = LayerPoint("block", 1, 1, False, Recompute.NONE, 1e-3, 2e-3, 1000, 1000, 1000)
    profile = make_profile(make_graph([kind], ["block"]), [point], make_cluster(ways, 0, bandwidth, alpha))
    cost = LayerPricer(profile).price("block", Strategy(width=ways), batch, 1)
    assert cost is not None
    probe = Communication(Collective.SEND_RECV, 1.0, RankGroup(ways, 1, 1), Moment.FORWARD, overlaps=False)
    start = Links(profile).seconds(probe) - 1 / bandwidth
    assert start == pytest.approx(alpha)
    halos = [4 * CHANNELS * HEIGHT * kernel // 2 for kernel in (2, 4)]
    assert cost.forward == pytest.approx(batch * 1e-3 / ways)
    both = cost.forward_exposed + cost.backward_exposed
    assert both == pytest.approx(2 * sum(2 * alpha + batch * 2 * halo / bandwidth for halo in halos))


def test_what_is_kept_is_a_share_and_the_edges() -> None:
    kind = stack(convolved("a", 3))
    point = LayerPoint("block", 1, 1, False, Recompute.NONE, 1e-3, 2e-3, 10**6, 10**6, 10**6)
    profile = make_profile(make_graph([kind], ["block"]), [point], make_cluster(4))
    cost = LayerPricer(profile).price("block", Strategy(width=4), 8, 1)
    assert cost is not None
    edges = 2 * 4 * 8 * CHANNELS * HEIGHT
    assert (cost.kept, cost.working) == (8 * 10**6 // 4 + edges, 8 * 10**6 // 4 + edges)


def offered(kind: LayerKind, devices: int) -> set[tuple[int, int]]:
    pairs = [SpatialDimension(), SpatialDimension(degree="width")]
    heights, widths = (
        [int(str(choice[one.degree])) for choice in one.choices(kind, devices)] for one in pairs
    )  # fmt: skip
    return {(h, w) for h in heights for w in widths if devices % (h * w) == 0}


def test_degrees_share_every_picture_evenly() -> None:
    assert offered(stack(convolved("a", 3)), 6) == {(1, 1), (2, 1), (1, 2), (3, 1), (6, 1), (3, 2)}
    # after a stride of 2 there are 24 rows and 32 columns, of which 16 devices would have 2: enough for one beyond
    assert (1, 16) in offered(stack(convolved("a", 3, 2)), 16)
    assert (1, 32) not in offered(stack(convolved("a", 7)), 32)  # 2 columns each, 3 needed of a neighbour


@pytest.mark.parametrize("model", ["resnet50", "convnext-xl"])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_no_device_needs_more_than_its_neighbours_have(model: str, devices: int) -> None:
    for kind in load_model(model).kinds.values():
        for height, width in offered(kind, devices) - {(1, 1)}:
            for window in windows_of(kind.operators):
                own = (window.extent[0] / height, window.extent[1] / width)
                assert all(side == int(side) for side in own)
                for size, ways, kernel, stride in zip(own, (height, width), window.kernel, window.stride, strict=True):
                    assert ways == 1 or size >= (kernel - stride) / 2


def test_shares_of_what_is_no_picture_have_no_price() -> None:
    point = LayerPoint("block", 1, 1, False, Recompute.NONE, 1e-3, 2e-3, 1000, 1000, 1000)
    profile = make_profile(make_graph([make_kind("block", 100)], ["block"]), [point], make_cluster(4))
    assert LayerPricer(profile).price("block", Strategy(width=4), 8, 1) is None
    assert list(LayerPricer(profile).price_many("block", [Strategy(data=4), Strategy(height=4)], 8, 1).valid) == [
        True, False,
    ]  # fmt: skip


def test_tokens_flat_pictures_and_transformers_are_not_offered() -> None:
    kinds = [kind for name in ("gpt2", "bert-large") for kind in load_model(name).kinds.values()]
    assert not any(splits_pixels(kind) for kind in kinds)
    flat = Operator("fc", OperatorClass.MATMUL, (1, CHANNELS * HEIGHT * WIDTH, 10), 1, 1, 2, 1, 1, 1)
    pooled = replace(flat, shape=(1, CHANNELS, 10))
    assert not splits_pixels(stack(flat))
    assert splits_pixels(stack(pooled))
    assert prod(len(SpatialDimension().choices(kind, 8)) for kind in kinds) == 1
