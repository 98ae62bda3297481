"""Bird's-eye views of point clouds against voxels filled one by one."""

from __future__ import annotations

from math import floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.zoo.perception import VoxelGrid, birds_eye_view

SMALL = VoxelGrid(side=6, depth=4, resolution=0.5)


def by_hand(scans: list[list[tuple[float, float, float]]], grid: VoxelGrid) -> Tensor:
    """Every voxel of every scan, the largest over the heights."""
    sizes = (grid.side, grid.side, grid.depth)
    voxels = torch.zeros(len(scans), *sizes)
    for place, scan in enumerate(scans):
        for point in scan:
            where = [floor(axis / grid.resolution + size / 2) for axis, size in zip(point, sizes, strict=True)]
            if all(0 <= index < size for index, size in zip(where, sizes, strict=True)):
                voxels[place, where[0], where[1], where[2]] = 1
    return voxels.amax(dim=3)[None]


quarters = st.integers(-10, 10).map(lambda steps: steps / 4)
"""Metres that are exact in binary: points on the borders of voxels, inside and outside of the grid."""
clouds = st.lists(st.lists(st.tuples(quarters, quarters, quarters), max_size=8), min_size=3, max_size=3)


@given(clouds)
@settings(max_examples=60, deadline=None)
def test_views_are_those_of_voxels_filled_one_by_one(scans: list[list[tuple[float, float, float]]]) -> None:
    tensors = [torch.tensor(scan, dtype=torch.float32).reshape(-1, 3) for scan in scans]
    assert torch.equal(birds_eye_view(tensors, SMALL, count=3), by_hand(scans, SMALL))


def test_the_published_grid() -> None:
    """200 x 200 m around the sensor, 5 m up and down, in steps of 0.2 m."""
    lone = birds_eye_view([torch.tensor([[-100.0, 99.9, 0.1]])] * 16, VoxelGrid())
    assert lone.sum() == 16
    assert lone[0, 0, 0, 999] == 1


def test_points_outside_or_without_a_number_leave_no_mark() -> None:
    far = torch.tensor([[9.0, 0, 0], [0, -9.0, 0], [0, 0, 9.0], [torch.nan, 0, 0], [0, torch.inf, 0], [1e30, 0, 0]])
    assert not birds_eye_view([far], SMALL, count=1).any()


def test_points_below_the_sensor_leave_a_mark() -> None:
    assert birds_eye_view([torch.tensor([[0.1, 0.1, -0.3]])], SMALL, count=1)[0, 0, 3, 3] == 1


CLOUD = torch.zeros(5, 3)


@pytest.mark.parametrize(
    ("scans", "named"),
    [
        ([CLOUD], "scans"),
        (CLOUD, "scans"),
        ([CLOUD, torch.zeros(3, 5)], r"scans\[1\]"),
        ([torch.zeros(3), CLOUD], r"scans\[0\]"),
        ([CLOUD, CLOUD.long()], r"scans\[1\]"),
        ([CLOUD, [[0.0, 0.0, 0.0]]], r"scans\[1\]"),
    ],
)
def test_what_is_no_list_of_clouds_is_refused(scans: list[Tensor], named: str) -> None:
    with pytest.raises(InputError, match=named):
        birds_eye_view(scans, SMALL, count=2)


@pytest.mark.parametrize("field", ["side", "depth", "resolution"])
def test_a_grid_has_an_extent(field: str) -> None:
    with pytest.raises(InputError, match=field):
        VoxelGrid(**{field: 0})
