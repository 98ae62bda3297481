"""A bird's-eye view of LiDAR scans: which places of a grid around the sensor hold a point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from galvatron_lite.errors import InputError


@dataclass(frozen=True, slots=True)
class VoxelGrid:
    """Voxels around a sensor, which stands in the middle of them."""

    side: int = 1000  # voxels along each side of the ground; rows are x, columns y
    depth: int = 50  # voxels from the lowest to the highest
    resolution: float = 0.2  # metres along an edge of a voxel

    def __post_init__(self) -> None:
        for field in ("side", "depth", "resolution"):
            if not getattr(self, field) > 0:
                raise InputError(field, getattr(self, field), "Choose a positive number.")


def birds_eye_view(scans: Sequence[Tensor], grid: VoxelGrid, count: int = 16) -> Tensor:
    """Scans as the channels of one picture: 1 where a voxel at any height holds a point, else 0.

    The largest occupancy over the heights, binarised, of Sah and Chinara 2024 (arXiv:2412.18165), without the voxels
    in between: a place is marked where any point inside the grid stands above it. Voxel i along an axis of n begins at
    (i - n / 2) x resolution metres. Points outside the grid are dropped, and so are points without a number (a LiDAR's
    missing returns, nan). Their notebook writes the height of a point into its voxel and keeps what is above 0, so that
    points at or below the sensor leave no mark there; here they do.

    Args:
        scans: point clouds (points, 3) of x, y and z in metres, oldest first, the current one last; on one device.
        grid: where to look.
        count: scans that are needed.
    """
    if isinstance(scans, Tensor) or len(scans) != count:
        given = tuple(scans.shape) if isinstance(scans, Tensor) else len(scans)
        raise InputError("scans", given, f"Give a list of {count} point clouds (points, 3), oldest first.")
    for place, scan in enumerate(scans):
        _check(scan, place)
    view = torch.zeros(count * grid.side**2, device=scans[0].device)
    view[torch.cat([_cells(scan, grid) + place * grid.side**2 for place, scan in enumerate(scans)])] = 1.0
    return view.view(1, count, grid.side, grid.side)


def _check(scan: Tensor, place: int) -> None:
    if not isinstance(scan, Tensor):
        raise InputError(f"scans[{place}]", type(scan).__name__, "Give a tensor (points, 3).")
    if scan.dim() != 2 or scan.shape[1] != 3:
        raise InputError(f"scans[{place}]", tuple(scan.shape), "Give (points, 3): x, y and z of every point.")
    if not scan.is_floating_point():
        raise InputError(f"scans[{place}]", scan.dtype, "Give metres as floating-point numbers (scan.float()).")


def _cells(scan: Tensor, grid: VoxelGrid) -> Tensor:
    """Places on the ground, row after row, of the points that are inside the grid; a place may come more than once."""
    sizes = torch.tensor([grid.side, grid.side, grid.depth], device=scan.device)
    voxels = (scan.double() / grid.resolution + sizes / 2).floor()
    inside = ((voxels >= 0) & (voxels < sizes)).all(dim=1)
    rows, columns = voxels[inside][:, :2].long().unbind(1)
    return rows * grid.side + columns
