"""The Parallel Perception Network: two independent encoder-decoders that read the same bird's-eye view of LiDAR scans.

Sah and Chinara 2024 (arXiv:2412.18165). The channels of the input are sixteen scans (15 past ones and the current one),
each a picture of 1000 x 1000 pixels; each network returns one picture of that size.

Published: inputs, outputs, six levels of 32 to 1024 channels, the loss, and that one network's target is the other's
output. The layers of the segmentation network are those of the authors' notebook (github.com/suwesh/
Parallel-Perception-Network): two convolutions a level, a third one on each pooled picture, transposed convolutions with
kernels of 2, or of 3 if the larger picture is odd, biases and batch normalisation everywhere: 46,482,099 parameters and
262.4 GFLOPs, of which 46,460,064 parameters never reach the output as published. A transposed convolution of stride 1
in the notebook is a convolution here, which is the same with mirrored kernels.

Inferred: the layers of the reconstruction network. Of 4608 combinations (convolutions a level in encoder and decoder,
kernels at full resolution, upsampling, skip connections, biases, normalisation) only one agrees with the published
27.61 M parameters and 188.5 GFLOPs in all digits: the segmentation network's encoder, its transposed convolutions, one
convolution a level in the decoder, no skip connections; 27,607,363 parameters and 188.466 GFLOPs. The same search finds
the segmentation network's layers. FLOPs are those of convolutions, with a multiply-add as two; as one, the published
layers would have 131.2 GFLOPs.
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
    """Voxels around a sensor, which is in their centre."""

    side: int = 1000  # voxels along each side of the ground; rows are x, columns y
    depth: int = 50  # voxels from the lowest to the highest
    resolution: float = 0.2  # metres along an edge of a voxel

    def __post_init__(self) -> None:
        for field in ("side", "depth", "resolution"):
            if not getattr(self, field) > 0:
                raise InputError(field, getattr(self, field), "Choose a positive number.")


def birds_eye_view(scans: Sequence[Tensor], grid: VoxelGrid, count: int = 16) -> Tensor:
    """Scans as the channels of one picture (1, count, side, side): 1 where a voxel at any height has a point, else 0.

    This is the largest occupancy over the heights, binarised, of Sah and Chinara 2024 (arXiv:2412.18165), without the
    voxels. Voxel i along an axis of n begins at (i - n / 2) x resolution metres. Points outside the grid are
    dropped, and so are nan (a LiDAR's missing returns). The authors' notebook writes the height of a point into its
    voxel and keeps what is above 0, which drops points at or below the sensor; here they count.

    Args:
        scans: point clouds (points, 3) of x, y and z in metres, oldest first, the current one last; on one device.
        grid: of the picture.
        count: of scans that are needed.

    Raises:
        InputError: another number of scans, or a scan that is no floating-point tensor (points, 3).
    """
    if isinstance(scans, Tensor) or len(scans) != count:
        shape = tuple(scans.shape) if isinstance(scans, Tensor) else len(scans)
        raise InputError("scans", shape, f"Give a list of {count} point clouds (points, 3), oldest first.")
    for index, scan in enumerate(scans):
        if not isinstance(scan, Tensor):
            raise InputError(f"scans[{index}]", type(scan).__name__, "Give a tensor (points, 3).")
        if scan.dim() != 2 or scan.shape[1] != 3:
            raise InputError(f"scans[{index}]", tuple(scan.shape), "Give (points, 3): x, y and z of every point.")
        if not scan.is_floating_point():
            raise InputError(f"scans[{index}]", scan.dtype, "Give metres as floating-point numbers (scan.float()).")
    view = torch.zeros(count * grid.side**2, device=scans[0].device)
    view[torch.cat([_cells(scan, grid) + index * grid.side**2 for index, scan in enumerate(scans)])] = 1.0
    return view.view(1, count, grid.side, grid.side)


def _cells(scan: Tensor, grid: VoxelGrid) -> Tensor:
    """Pixels of the points inside the grid, as row-major indices; a pixel may appear more than once."""
    sizes = torch.tensor([grid.side, grid.side, grid.depth], device=scan.device)
    voxels = (scan.double() / grid.resolution + sizes / 2).floor()
    inside = ((voxels >= 0) & (voxels < sizes)).all(dim=1)
    rows, columns = voxels[inside][:, :2].long().unbind(1)
    return rows * grid.side + columns


_PICTURE, _EDGES = 0.85, 0.15  # weights in the loss


def edges(pictures: Tensor) -> Tensor:
    """Sobel edges of pictures (..., height, width): lengths of slopes at inner pixels (..., height - 2, width - 2).

    Slopes along both sides are differences of pixels two apart, weighted 1, 2, 1 across. A slope of 0 has gradient 0.
    """
    across, along = _weighted(pictures, -1), _weighted(pictures, -2)
    slopes = torch.stack([across[..., 2:, :] - across[..., :-2, :], along[..., 2:] - along[..., :-2]])
    steep: Tensor = torch.linalg.vector_norm(slopes, dim=0)
    return steep


def _weighted(pictures: Tensor, dim: int) -> Tensor:
    """Sums of three neighbours along a dim, weighted 1, 2, 1; the dim has two items less."""
    inner = pictures.shape[dim] - 2
    left, middle, right = (pictures.narrow(dim, start, inner) for start in range(3))
    return left + 2 * middle + right


def edge_loss(pictures: Tensor, targets: Tensor) -> Tensor:
    """0.85 MSE + 0.15 MSE of the edges + 0.85 smooth L1 + 0.15 smooth L1 of the edges; a scalar.

    MSSCE of Sah and Chinara 2024 (arXiv:2412.18165), except that its edges are Canny's, which have no gradient.

    Args:
        pictures: (samples, 1, height, width), at least three pixels along each side.
        targets: of the same shape.
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
    """A level of an encoder: two convolutions, and max pooling that halves the picture, rounded down."""

    def __init__(self, inner: int, outer: int, kernel: int = 3) -> None:
        super().__init__()
        self.convs = Convs((inner, outer, outer), kernel)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, inner, side, side) to (samples, outer, side // 2, side // 2)."""
        return F.max_pool2d(self.convs(x), 2)


class UpBlock(nn.Module):
    """A level of a decoder: a transposed convolution to twice the size and half the channels, and convolutions.

    Args:
        inner: channels of the input.
        odd: whether the larger picture has an odd side, so that the transposed kernel is 3, not 2.
        skip: channels of a skip connection; 0: none.
        widths: channels after each convolution.
        kernel: of the first convolution; that of the others is 3.
    """

    def __init__(self, inner: int, odd: bool, skip: int, widths: tuple[int, ...], kernel: int = 3) -> None:
        super().__init__()
        half, activation = inner // 2, nn.LeakyReLU(_SLOPE, inplace=True)
        grown = nn.ConvTranspose2d(inner, half, 3 if odd else 2, 2)
        self.grow = nn.Sequential(grown, nn.BatchNorm2d(half), activation)
        self.convs = Convs((half + skip, *widths), kernel)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """(samples, inner, side, side), and ``skip`` of the larger size, to (samples, widths[-1], larger, larger)."""
        x = self.grow(x)
        if skip is not None:
            x = torch.cat([x, skip], dim=1)
        out: Tensor = self.convs(x)
        return out


class Pyramid(nn.Module):
    """The segmentation network: an encoder, convolutions on each of its pictures, and a decoder.

    Args:
        channels: of the input.
        widths: channels of each level.
        sides: pixels along a side of each level's input.
        chained: whether a level of the decoder reads the output of the level below. As published it reads the encoder's
            picture of its level instead, so that all levels except the finest are computed and dropped.
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
    """The reconstruction network: encoder and decoder without skip connections; arguments as of ``Pyramid``."""

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
    """The levels of an encoder; the kernel of its very first convolution is 1."""
    inner = (channels, *widths[:-1])
    return nn.ModuleList(
        DownBlock(*pair, kernel=3 if level else 1) for level, pair in enumerate(zip(inner, widths, strict=True))
    )


class Perception(nn.Module):
    """Segmentation and reconstruction of bird's-eye views, by two networks that share only their input.

    Args:
        config: its shape.
        depth: voxels from the lowest to the highest.
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
        """Both networks' pictures, each (samples, 1, side, side), or the sum of their losses with targets.

        Args:
            pictures: bird's-eye views (samples, channels, side, side), or the point clouds (points, 3) of one sample,
                oldest first.
            targets: of the segmentation network, (samples, 1, side, side); the reconstruction network's target is the
                segmentation network's output.
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
        """Random pixels of which one in ten has a point."""
        config, draw = self.config, torch.Generator().manual_seed(0)
        shapes = {"pictures": config.channels, "targets": 1}
        return {
            name: (torch.rand((samples, channels, config.image_size, config.image_size), generator=draw) < 0.1).float()
            for name, channels in shapes.items()
        }
