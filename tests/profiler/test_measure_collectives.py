"""Shapes of groups by brute force, and every collective once on real processes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.profiler.measure import fit_collectives, fit_line
from galvatron_lite.profiler.measure_hardware import (
    group_shapes,
    make_group,
    measure_collective,
    measure_overlap,
    prepare,
    ranks_of,
)
from galvatron_lite.profiler.schema import CollectivePoint, Overlap
from galvatron_lite.profiler.timing import TimingRule
from tests.pool import WorkerPool

QUICK = TimingRule(warmup=1, least=2, most=2, seconds=0.05)


@pytest.mark.parametrize("world", [1, 2, 4, 6, 8, 12])
def test_shapes_tile_the_world(world: int) -> None:
    shapes = group_shapes(world)
    for shape in shapes:
        groups = ranks_of(shape, world)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert len(groups) == shape.siblings
        for group in groups:
            assert {after - before for before, after in pairwise(group)} == {shape.stride}
    wanted = {
        (size, stride) for size in range(2, world + 1) for stride in range(1, world + 1) if world % (size * stride) == 0
    }
    assert {(shape.size, shape.stride) for shape in shapes} == wanted


def measure_everything() -> list[CollectivePoint]:
    device, points = torch.device("cpu"), list[CollectivePoint]()
    for shape in group_shapes(dist.get_world_size()):
        group = make_group(shape)
        for kind in Collective:
            if kind is not Collective.SEND_RECV or shape.size == 2:
                points += measure_collective(kind, shape, group, device, sizes=(4096, 16384), rule=QUICK)
    return points


def test_every_collective_is_measured(pool: WorkerPool) -> None:
    ranks = pool.run(4, measure_everything)
    assert all(points == ranks[0] for points in ranks)
    found = {(point.collective, point.group, point.stride) for point in ranks[0]}
    shapes = [(2, 1), (2, 2), (4, 1)]
    assert found == {
        (kind, size, stride)
        for kind in Collective
        for size, stride in shapes
        if kind is not Collective.SEND_RECV or size == 2
    }
    assert all(point.seconds > 0 and point.siblings * point.group == 4 for point in ranks[0])


def prepared_sizes() -> bool:
    """What is communicated runs, with sizes that do not divide evenly too."""
    for kind in Collective:
        for size in (4, 4096, 10_000):
            prepare(kind, size, None, torch.device("cpu"))()
    return True


def test_odd_sizes_run(pool: WorkerPool) -> None:
    assert pool.run(2, prepared_sizes) == [True, True]


def overlap_here() -> Overlap:
    return measure_overlap(torch.device("cpu"), QUICK)


def test_overlap_slows_down(pool: WorkerPool) -> None:
    ranks = pool.run(2, overlap_here)
    assert ranks[0] == ranks[1]
    assert ranks[0].compute_slowdown >= 1
    assert ranks[0].communication_slowdown >= 1


def test_alone_there_is_no_overlap() -> None:
    assert overlap_here() == Overlap()


SIZES = [4096 * 4**power for power in range(8)]
latencies = st.floats(1e-6, 1e-2)
bandwidths = st.floats(1e7, 1e12)


@given(latencies, bandwidths)
def test_recovers_a_line(latency: float, bandwidth: float) -> None:
    line = fit_line(SIZES, [latency + size / bandwidth for size in SIZES])
    for size in SIZES:
        assert line(size) == pytest.approx(latency + size / bandwidth, rel=1e-3)
    assert line.residual < 1e-3


@given(latencies, bandwidths, st.lists(st.floats(-0.05, 0.05), min_size=8, max_size=8))
def test_noise_moves_it_little(latency: float, bandwidth: float, noise: list[float]) -> None:
    exact = [latency + size / bandwidth for size in SIZES]
    line = fit_line(SIZES, [value * (1 + shift) for value, shift in zip(exact, noise, strict=True)])
    assert all(abs(line(size) / value - 1) < 0.2 for size, value in zip(SIZES, exact, strict=True))


@given(latencies, bandwidths, st.integers(2, 5))
def test_an_outlier_is_outvoted(latency: float, bandwidth: float, place: int) -> None:
    exact = [latency + size / bandwidth for size in SIZES]
    line = fit_line(SIZES, [value * (10 if index == place else 1) for index, value in enumerate(exact)])
    others = [abs(line(SIZES[i]) / exact[i] - 1) for i in range(8) if i != place]
    assert max(others) < 0.1


def test_figures_stay_physical() -> None:
    falling = fit_line([1.0, 2.0, 3.0], [3.0, 2.0, 1.0])
    assert falling.slope > 0
    assert falling.latency >= 0
    steep = fit_line([1e6, 2e6], [1e-6, 1.0])
    assert steep.latency == 0.0
    assert fit_line([1e6], [0.5])(2e6) == pytest.approx(1.0)


def test_one_fit_for_each_shape_of_group() -> None:
    def points(group: int, stride: int, bandwidth: float) -> list[CollectivePoint]:
        return [
            CollectivePoint(Collective.ALL_REDUCE, group, stride, 1, size, 1e-4 + size / bandwidth) for size in SIZES
        ]

    fits = fit_collectives([*points(2, 1, 1e9), *points(2, 2, 1e8)])
    assert [(fit.stride, round(fit.bandwidth / 1e8)) for fit in fits] == [(1, 10), (2, 1)]
    assert all(fit.latency == pytest.approx(1e-4, rel=1e-3) and fit.residual < 1e-3 for fit in fits)
