"""Shapes of groups by brute force, and every collective once on real processes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from galvatron_lite.cluster.cluster import Collective
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
