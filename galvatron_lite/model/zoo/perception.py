"""The Parallel Perception Network: two independent encoder-decoders that read the same bird's-eye view of LiDAR scans.

Sah and Chinara 2024 (arXiv:2412.18165). Sixteen scans (15 past ones and the current one), each a picture of 1000 x 1000
pixels, are the channels of what enters; each network gives one picture of that size.

Known: inputs, outputs, six levels of 32 to 1024 channels, the loss, and that one network is trained towards the other's
output. The layers of the segmentation network are those of the authors' notebook (github.com/suwesh/
Parallel-Perception-Network): two convolutions a level, a third one on each pooled picture, transposed convolutions with
kernels of 2, or of 3 where the larger picture is odd, biases and batch normalisation everywhere: 46,482,099 parameters
and 262.4 GFLOPs, of which 46,460,064 parameters never reach the output as published. A transposed convolution of stride
1 there is a convolution here, which is the same with mirrored kernels.

Inferred: the layers of the reconstruction network. Of 4608 combinations (convolutions a level both ways, kernels at the
picture's own size, ways up, skips, biases, normalisation) one alone gives 27.61 M parameters and 188.5 GFLOPs to all
digits told: the segmentation network's way down, its transposed convolutions, one convolution a level on the way up,
nothing beside; 27,607,363 parameters and 188.466 GFLOPs. The same search finds the segmentation network's layers. Work
is that of convolutions and takes a multiply-add as two; as one, the known layers would give 131.2 GFLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.errors import InputError
from galvatron_lite.model.shapes.fields import PerceptionShape
from galvatron_lite.model.zoo.convnets import convolutions


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
        shape = tuple(scans.shape) if isinstance(scans, Tensor) else len(scans)
        raise InputError("scans", shape, f"Give a list of {count} point clouds (points, 3), oldest first.")
    for place, scan in enumerate(scans):
        if not isinstance(scan, Tensor):
            raise InputError(f"scans[{place}]", type(scan).__name__, "Give a tensor (points, 3).")
        if scan.dim() != 2 or scan.shape[1] != 3:
            raise InputError(f"scans[{place}]", tuple(scan.shape), "Give (points, 3): x, y and z of every point.")
        if not scan.is_floating_point():
            raise InputError(f"scans[{place}]", scan.dtype, "Give metres as floating-point numbers (scan.float()).")
    view = torch.zeros(count * grid.side**2, device=scans[0].device)
    view[torch.cat([_cells(scan, grid) + place * grid.side**2 for place, scan in enumerate(scans)])] = 1.0
    return view.view(1, count, grid.side, grid.side)


def _cells(scan: Tensor, grid: VoxelGrid) -> Tensor:
    """Places on the ground, row after row, of the points that are inside the grid; a place may come more than once."""
    sizes = torch.tensor([grid.side, grid.side, grid.depth], device=scan.device)
    voxels = (scan.double() / grid.resolution + sizes / 2).floor()
    inside = ((voxels >= 0) & (voxels < sizes)).all(dim=1)
    rows, columns = voxels[inside][:, :2].long().unbind(1)
    return rows * grid.side + columns


_PICTURE, _EDGES = 0.85, 0.15


def edges(pictures: Tensor) -> Tensor:
    """How steep pictures (..., height, width) are at every pixel with eight neighbours, (..., height - 2, width - 2).

    The length of the slopes along both sides by Sobel's kernels: differences of pixels two apart, weighted 1, 2, 1
    across. Where there is no slope the gradient is 0.
    """
    across, along = _weighted(pictures, -1), _weighted(pictures, -2)
    slopes = torch.stack([across[..., 2:, :] - across[..., :-2, :], along[..., 2:] - along[..., :-2]])
    steep: Tensor = torch.linalg.vector_norm(slopes, dim=0)
    return steep


def _weighted(pictures: Tensor, dim: int) -> Tensor:
    """Sums of three neighbours along a dim, weighted 1, 2, 1; two fewer."""
    inner = pictures.shape[dim] - 2
    one, two, three = (pictures.narrow(dim, start, inner) for start in range(3))
    return one + 2 * two + three


def edge_loss(pictures: Tensor, targets: Tensor) -> Tensor:
    """0.85 MSE + 0.15 MSE of the edges + 0.85 smooth L1 + 0.15 smooth L1 of the edges; a scalar.

    MSSCE of Sah and Chinara 2024 (arXiv:2412.18165), but for the edges: theirs are Canny's, through which no gradient
    flows; these are Sobel's, which can be derived.

    Args:
        pictures: (samples, 1, height, width), at least three pixels along each side.
        targets: what they should be, of the same shape.
    """
    pairs = ((_PICTURE, pictures, targets), (_EDGES, edges(pictures), edges(targets)))
    terms = [weight * (F.mse_loss(x, y) + F.smooth_l1_loss(x, y)) for weight, x, y in pairs]
    return terms[0] + terms[1]


_SLOPE = 0.01  # of leaky ReLU


class Convs(nn.Sequential):
    """Convolutions with bias, batch normalisation and leaky ReLU; see ``convolutions``."""

    def __init__(self, widths: tuple[int, ...], kernel: int = 3) -> None:
        super().__init__(*convolutions(widths, kernel, norm=True, slope=_SLOPE))


class DownBlock(nn.Module):
    """A level of the way down: two convolutions, and max pooling that halves the picture, rounded down."""

    def __init__(self, inner: int, outer: int, kernel: int = 3) -> None:
        super().__init__()
        self.convs = Convs((inner, outer, outer), kernel)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, inner, side, side) to (samples, outer, side // 2, side // 2)."""
        return F.max_pool2d(self.convs(x), 2)


class UpBlock(nn.Module):
    """A level of the way up: the picture at twice the size with half of its channels, and convolutions.

    Args:
        inner: channels that enter.
        odd: whether the larger picture has an odd side: the kernel is 3 then, else 2, as levels round down.
        beside: channels of a picture of the larger size that is put beside; 0: none.
        widths: channels after each convolution.
        kernel: of the first convolution; 3 of the others.
    """

    def __init__(self, inner: int, odd: bool, beside: int, widths: tuple[int, ...], kernel: int = 3) -> None:
        super().__init__()
        half, activation = inner // 2, nn.LeakyReLU(_SLOPE, inplace=True)
        grown = nn.ConvTranspose2d(inner, half, 3 if odd else 2, 2)
        self.grow = nn.Sequential(grown, nn.BatchNorm2d(half), activation)
        self.convs = Convs((half + beside, *widths), kernel)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """(samples, inner, side, side), and ``skip`` of the larger size, to (samples, widths[-1], larger, larger)."""
        x = self.grow(x)
        if skip is not None:
            x = torch.cat([x, skip], dim=1)
        out: Tensor = self.convs(x)
        return out


class Pyramid(nn.Module):
    """The segmentation network: every level of the way down gives a picture to the way up through a convolution.

    Args:
        channels: of what enters.
        widths: channels of each level, doubled from level to level.
        sides: pixels along a side of what enters each level.
        chained: whether a level of the way up takes what the level below it gives. As published it takes the way
            down's picture of its own level instead, so that all levels but the finest are computed and dropped.
    """

    def __init__(self, channels: int, widths: tuple[int, ...], sides: tuple[int, ...], chained: bool) -> None:
        super().__init__()
        self.chained = chained
        self.downs = _downs(channels, widths)
        self.sides = nn.ModuleList(Convs((width, width)) for width in widths)
        inner = [
            UpBlock(wide, side % 2 == 1, wide // 2, (wide // 2, wide // 2))
            for wide, side in list(zip(widths, sides, strict=True))[:0:-1]
        ]
        half = widths[0] // 2
        self.ups = nn.ModuleList([*inner, UpBlock(widths[0], sides[0] % 2 == 1, channels, (half, 1), kernel=1)])

    def forward(self, pictures: Tensor) -> Tensor:
        """(samples, channels, side, side) to (samples, 1, side, side)."""
        x, kept = pictures, []
        for down, side in zip(self.downs, self.sides, strict=True):
            x = down(x)
            kept.append(side(x))
        out: Tensor = kept[-1]
        for up, lateral, skip in zip(self.ups, reversed(kept), [*kept[-2::-1], pictures], strict=True):
            out = up(out if self.chained else lateral, skip)
        return out


class AutoEncoder(nn.Module):
    """The reconstruction network: down to the lowest level and up again, nothing beside; arguments as ``Pyramid``'s."""

    def __init__(self, channels: int, widths: tuple[int, ...], sides: tuple[int, ...]) -> None:
        super().__init__()
        self.downs = _downs(channels, widths)
        outer = (1, *(width // 2 for width in widths[1:]))
        rows = list(zip(widths, sides, outer, strict=True))
        self.ups = nn.ModuleList(UpBlock(wide, side % 2 == 1, 0, (out,)) for wide, side, out in reversed(rows))

    def forward(self, pictures: Tensor) -> Tensor:
        """(samples, channels, side, side) to (samples, 1, side, side)."""
        out = pictures
        for level in (*self.downs, *self.ups):
            out = level(out)
        return out


def _downs(channels: int, widths: tuple[int, ...]) -> nn.ModuleList:
    """The way down; the first convolution of all looks at one pixel's scans alone."""
    inner = (channels, *widths[:-1])
    return nn.ModuleList(
        DownBlock(*pair, kernel=3 if level else 1) for level, pair in enumerate(zip(inner, widths, strict=True))
    )


class Perception(nn.Module):
    """Segmentation and reconstruction of bird's-eye views, by two networks that share nothing but their input.

    Args:
        config: its shape.
        depth: voxels above each other, of which a bird's-eye view shows the largest.
        resolution: metres along an edge of a voxel.
        detached: whether the reconstruction network's target, the segmentation network's output, takes no gradient.
    """

    def __init__(
        self, config: PerceptionShape, depth: int = 50, resolution: float = 0.2, detached: bool = True
    ) -> None:
        super().__init__()
        self.config, self.detached = config, detached
        self.grid = VoxelGrid(config.image_size, depth, resolution)
        self.segmentation = Pyramid(config.channels, config.widths, config.sides, config.chained)
        self.reconstruction = AutoEncoder(config.channels, config.widths, config.sides)

    def forward(
        self, pictures: Tensor | Sequence[Tensor], targets: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Both networks' pictures, each (samples, 1, side, side), or the sum of their losses where targets are given.

        Args:
            pictures: bird's-eye views (samples, channels, side, side), or the point clouds (points, 3) of one sample,
                oldest first.
            targets: what the segmentation network should give, (samples, 1, side, side); the reconstruction network
                should give what the segmentation network does.
        """
        views = pictures if isinstance(pictures, Tensor) else self.view(pictures)
        segmented, rebuilt = self.segmentation(views), self.reconstruction(views)
        if targets is None:
            return segmented, rebuilt
        aim = segmented.detach() if self.detached else segmented
        return edge_loss(segmented, targets) + edge_loss(rebuilt, aim)

    def view(self, scans: Sequence[Tensor]) -> Tensor:
        """The bird's-eye view (1, channels, side, side) of one sample's point clouds; see ``birds_eye_view``."""
        return birds_eye_view(scans, self.grid, self.config.channels)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random places of which one in ten holds a point."""
        config, draw = self.config, torch.Generator().manual_seed(0)
        shapes = {"pictures": config.channels, "targets": 1}
        return {
            name: (torch.rand((samples, channels, config.image_size, config.image_size), generator=draw) < 0.1).float()
            for name, channels in shapes.items()
        }
