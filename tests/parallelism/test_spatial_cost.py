"""Spatial parallelism: bytes by hand, the closed form of Kahira et al. 2021, which grids are offered."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.communication import Links
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Recompute, SplitDims, TensorSplit
from galvatron_lite.model.shapes.registry import load_model
from galvatron_lite.model.sides import SIDES, Side
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.sharded.collectives import distribute
from galvatron_lite.parallelism.sharded.tensor import image_specs, to_local
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.spatial.cost import SpatialDimension
from galvatron_lite.parallelism.spatial.grids import (
    layout_on,
    received_pixels,
    sensible_grids,
    splits_pixels,
    window_along,
    window_refusal,
)
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.schema import LayerPoint
from tests.factories import make_cluster, make_graph, make_kind, make_profile
from tests.parallelism.sharded_compare import STRICT, double, grid_of
from tests.parallelism.test_states_cost import work
from tests.parallelism.thread_group import ThreadGroup, run_threads

HEIGHT, WIDTH, CHANNELS = 48, 64, 32


def convolved(name: str, kernel: int, stride: int = 1, *, gradient: bool = True) -> Operator:
    shape = (CHANNELS, CHANNELS, 1, HEIGHT, WIDTH, kernel, kernel, stride, stride)
    flops = 2 * CHANNELS * CHANNELS * kernel**2 * HEIGHT * WIDTH // stride**2
    return Operator(name, OperatorClass.CONVOLUTION, shape, 1, flops, 2 * flops if gradient else flops, 1, 1, 1)


NORM = Operator(
    "norm", OperatorClass.MEMORY, (CHANNELS * HEIGHT * WIDTH, CHANNELS), 1, 0, 0, 1, 1, 8 * CHANNELS,
    statistics=2 * CHANNELS,
)  # fmt: skip
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
    assert (rows.size, rows.count, rows.group) == (share * WIDTH / 4, 1, RankGroup(2, 4, 8))
    assert (columns.size, columns.count, columns.group) == (share * (HEIGHT / 2 + 1), 2, RankGroup(4, 1, 4))


def test_a_stride_needs_fewer_neighbours_and_an_image_takes_no_gradient() -> None:
    kind = stack(convolved("a", 7, 2, gradient=False))
    (one,) = sends(Strategy(height=4), kind, Moment.FORWARD)  # three rows above a share, two below
    assert (one.size * one.count, one.count) == (2 * 4 * CHANNELS * WIDTH * 5, 2)
    assert sends(Strategy(height=4), kind, Moment.BACKWARD) == []


def test_a_pooling_window_has_edges_too() -> None:
    items = CHANNELS * HEIGHT * WIDTH // 4
    pool = Operator("pool", OperatorClass.MEMORY, (items, CHANNELS, HEIGHT, WIDTH, 3, 3, 2, 2), 1, 0, 0, 1, 1)
    (one,) = sends(Strategy(height=2), stack(pool), Moment.FORWARD)
    assert one.size * one.count == 2 * 4 * CHANNELS * WIDTH


def test_statistics_of_a_batch_are_gathered_along_each_side_and_their_gradients_summed() -> None:
    mean = replace(NORM, name="mean", weight_bytes=0)
    found = [
        (one.collective, one.size * one.count, one.moment, one.group)
        for one in work(Strategy(data=2, height=2, width=4), stack(*STACK, mean), 4.0).communications
        if one.collective is not Collective.SEND_RECV and one.moment is not Moment.STEP
    ]  # fmt: skip
    rows, columns, size = RankGroup(2, 4, 8), RankGroup(4, 1, 4), 4 * 2 * CHANNELS
    assert found == [
        (Collective.ALL_GATHER, 2 * size, Moment.FORWARD, rows),
        (Collective.ALL_REDUCE, size, Moment.FORWARD, rows),
        (Collective.ALL_REDUCE, 2 * size, Moment.BACKWARD, rows),
        (Collective.ALL_GATHER, 4 * size, Moment.FORWARD, columns),
        (Collective.ALL_REDUCE, size, Moment.FORWARD, columns),
        (Collective.ALL_REDUCE, 2 * size, Moment.BACKWARD, columns),
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
    assert count == 2 * 2
    assert work(strategy, stack(*STACK), 4.0).edge_bytes == 0


@pytest.mark.parametrize("ways", [4, 8])
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
    edges = 2 * 4 * 8 * CHANNELS * HEIGHT
    assert (cost.kept, cost.working) == (8 * 10**6 // 4 + edges, 8 * 10**6 // 4 + edges)


def offered(kind: LayerKind, devices: int) -> set[tuple[int, ...]]:
    """Grids whose degrees are offered, side by side."""
    sides = [SpatialDimension(degree=name) for name in SIDES]
    degrees = [[int(str(choice[one.degree])) for choice in one.choices(kind, devices)] for one in sides]
    return {grid for grid in product(*degrees) if devices % prod(grid) == 0}


def test_degrees_leave_everybody_what_its_neighbours_need() -> None:
    assert offered(stack(convolved("a", 3)), 6) == {
        (1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 3, 1), (1, 1, 3), (1, 6, 1), (1, 1, 6), (1, 2, 3), (1, 3, 2),
    }  # fmt: skip
    # after a stride of 2 there are 24 rows and 32 columns
    assert (1, 24, 1) in offered(stack(convolved("a", 3, 2)), 24)
    assert (1, 48, 1) not in offered(stack(convolved("a", 3, 2)), 48)
    assert (1, 1, 32) not in offered(stack(convolved("a", 7)), 32)  # 2 columns each, 3 needed of a neighbour


def beyond(side: Side, held: range, outputs: range) -> tuple[int, int]:
    """Pixels before and after a share up to the first and the last one that outputs read, tap by tap."""
    reads = [one * side.stride - side.padding + tap * side.dilation for one in outputs for tap in range(side.kernel)]
    first, last = max(min(reads), 0), min(max(reads), side.extent - 1)
    return max(held.start - first, 0), max(last - held.stop + 1, 0)


def ranges(extent: int, degree: int) -> list[range]:
    """Everybody's share."""
    return [range(start, start + length) for start, length in (share(extent, degree, rank) for rank in range(degree))]


@given(
    st.builds(Side, st.integers(2, 40), st.integers(1, 7), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3)),
    st.integers(2, 5),
)
def test_what_is_borrowed_is_what_windows_read_beyond_their_share(side: Side, degree: int) -> None:
    assume(side.output >= degree and side.extent >= degree and side.padding < side.reach)
    own = ranges(side.extent, degree)
    spans = [beyond(side, *pair) for pair in zip(own, ranges(side.output, degree), strict=True)]
    assert received_pixels(side, degree)[0] == max(before + after for before, after in spans)
    lenders = [range(0), *own, range(0)]
    assert (not window_refusal(window_along(side), side.extent, degree)) is all(
        before <= len(left) and after <= len(right)
        for (before, after), left, right in zip(spans, lenders, lenders[2:], strict=False)
    )


def test_a_transposed_convolution_needs_what_its_outputs_are_made_of() -> None:
    side = Side(8, 4, 2, 1, 1, transposed=True)  # 16 outputs, one of them made of two or one inputs
    picture = torch.zeros(1, 1, 8, requires_grad=True, dtype=torch.float64)
    out = functional.conv_transpose1d(picture, torch.ones(1, 1, 4, dtype=torch.float64), stride=2, padding=1)
    assert out.shape[-1] == side.output
    for degree in (2, 3, 4):
        most = 0
        for rank in range(degree):
            (start, length), (first, many) = share(8, degree, rank), share(16, degree, rank)
            (grad,) = torch.autograd.grad(out[0, 0, first : first + many].sum(), picture, retain_graph=True)
            read = grad[0, 0].nonzero().flatten().tolist()
            most = max(most, sum(pixel < start or pixel >= start + length for pixel in read))
        assert received_pixels(side, degree)[0] == most


@pytest.mark.parametrize(("extent", "degree", "most"), [(7, 4, 2), (7, 2, 4), (56, 3, 19), (8, 8, 1)])
def test_the_largest_share_decides(extent: int, degree: int, most: int) -> None:
    shape = (CHANNELS, CHANNELS, 1, 4, extent, 1, 1, 1, 1)
    kind = stack(replace(convolved("a", 1), shape=shape))
    kind = replace(kind, dims=replace(kind.dims, height=4, width=extent))
    assert layout_on(kind, (1, 1, degree)).share == most / extent
    point = LayerPoint("block", 1, 1, False, Recompute.NONE, 1e-3, 2e-3, 10**6, 10**6, 10**6)
    profile = make_profile(make_graph([kind], ["block"]), [point], make_cluster(degree))
    cost = LayerPricer(profile).price("block", Strategy(width=degree), 4, 1)
    assert cost.forward == pytest.approx(4e-3 * most / extent)
    assert cost.kept == pytest.approx(4e6 * most / extent, abs=1)


def test_volumes_are_cut_along_three_sides() -> None:
    shape = (4, 8, 1, *(32,) * 3, *(3,) * 3, *(1,) * 3, *(1,) * 3, *(1,) * 3)
    operator = Operator("conv", OperatorClass.CONVOLUTION, shape, 1, 1000, 2000, 1, 1, 1)
    kind = replace(stack(operator), dims=SplitDims(in_channels=4, out_channels=8, depth=32, height=32, width=32))
    assert sensible_grids(kind, 8) == ((1, 1, 8), (2, 2, 2))
    planes, rows, columns = sends(Strategy(depth=2, height=2, width=2), kind, Moment.FORWARD)
    item = 2 * 4 * 4  # bytes, samples, channels
    assert (planes.size, planes.group) == (item * 16 * 16, RankGroup(2, 4, 4))
    assert (rows.size, rows.group) == (item * 17 * 16, RankGroup(2, 2, 4))
    assert (columns.size, columns.group) == (item * 17 * 17, RankGroup(2, 1, 4))
    assert layout_on(kind, (2, 2, 2)).share == 1 / 8


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


# Bytes of borders that ranks really send, against what the cost says of the rank that sends most.


SAMPLES, PLANES, ITEM = 2, 3, 8


def layer_of(extents: tuple[int, int], kernel: int, stride: int, padding: int, dilation: int) -> LayerKind:
    shape = (PLANES, 4, 1, *extents, kernel, kernel, stride, stride, padding, padding, dilation, dilation)
    operator = Operator("conv", OperatorClass.CONVOLUTION, shape, 1, 1, 2, 1, 1, 1)
    dims = SplitDims(in_channels=PLANES, out_channels=4, height=extents[0], width=extents[1])
    return replace(make_kind("block", 0), operators=(operator,), dims=dims)


@pytest.mark.parametrize("grid", [(1, 2), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize(
    ("extents", "kernel", "stride", "padding", "dilation"),
    [
        ((12, 12), 3, 1, 1, 1),
        ((13, 11), 5, 1, 2, 1),
        ((14, 16), 3, 1, 2, 2),
        ((15, 13), 3, 2, 1, 1),
        ((16, 12), 2, 2, 0, 1),
        ((13, 14), 4, 1, 0, 1),
        ((17, 13), 7, 2, 3, 1),
    ],
)
def test_bytes_on_the_wire_are_those_of_the_formula(
    grid: tuple[int, int], extents: tuple[int, int], kernel: int, stride: int, padding: int, dilation: int
) -> None:
    kind, strategy = layer_of(extents, kernel, stride, padding, dilation), Strategy(height=grid[0], width=grid[1])
    picture, weight = double(SAMPLES, PLANES, *extents), double(4, PLANES, kernel, kernel)

    def work(group: ThreadGroup) -> tuple[list[int], list[int]]:
        """Bytes that a rank sends along each side in forward, and in backward."""
        lines = grid_of(group, *grid)
        used = [line for line in lines if isinstance(line, ThreadGroup)]
        leaf = picture.clone().requires_grad_()
        out = functional.conv2d(
            distribute(leaf, image_specs(picture.shape, lines), STRICT), weight, None, stride, padding, dilation
        )
        forward = [line.sent_bytes for line in used]
        to_local(out).sum().backward()
        return forward, [line.sent_bytes - there for line, there in zip(used, forward, strict=True)]

    ranks = run_threads(grid[0] * grid[1], work)
    # a rank gives the gradients of all that it borrowed back
    borrowed = [max(back[side] for _, back in ranks) for side in range(len(ranks[0][0]))]
    for moment in (Moment.FORWARD, Moment.BACKWARD):
        priced = [one.size * one.count * ITEM / 2 / 4 * SAMPLES for one in sends(strategy, kind, moment)]
        assert priced == pytest.approx([size for size in borrowed if size])
    for side in range(len(borrowed)):
        assert sum(there[side] for there, _ in ranks) == sum(back[side] for _, back in ranks)
