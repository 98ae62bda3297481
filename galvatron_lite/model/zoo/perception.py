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

from galvatron_lite.errors import InputError
from galvatron_lite.model.zoo.perception_loss import edge_loss
from galvatron_lite.model.zoo.perception_parts import AutoEncoder, Pyramid
from galvatron_lite.model.zoo.perception_view import VoxelGrid, birds_eye_view


@dataclass(frozen=True, slots=True)
class PerceptionConfig:
    """Shape of a perception network."""

    base: int = 32  # channels of the first level; doubled from level to level
    levels: int = 6  # halvings of the picture, rounded down
    side: int = 1000  # pixels along each side of a bird's-eye view
    channels: int = 16  # scans of a sample, the current one among them
    depth: int = 50  # voxels above each other, of which a bird's-eye view shows the largest
    resolution: float = 0.2  # metres along an edge of a voxel
    # whether each level of the segmentation network's way up takes what the level below gives, so that all of it is
    # used. As published (False) only the finest level reaches the output; the others are computed and dropped
    chained: bool = True
    # whether the reconstruction network's target, the segmentation network's output, takes no gradient
    detached: bool = True

    def __post_init__(self) -> None:
        if self.base % 2:
            raise InputError("base", self.base, "Choose an even number: the last level has half of it.")
        if self.side < 2**self.levels:
            remedy = f"Choose at least {2**self.levels}: {self.levels} halvings leave no pixel."
            raise InputError("side", self.side, remedy)

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, the finest first."""
        return tuple(self.base * 2**level for level in range(self.levels))

    @property
    def sides(self) -> tuple[int, ...]:
        """Pixels along a side of what enters each level."""
        return tuple(self.side // 2**level for level in range(self.levels))


class Perception(nn.Module):
    """Segmentation and reconstruction of bird's-eye views, by two networks that share nothing but their input."""

    def __init__(self, config: PerceptionConfig) -> None:
        super().__init__()
        self.config = config
        self.grid = VoxelGrid(config.side, config.depth, config.resolution)
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
        aim = segmented.detach() if self.config.detached else segmented
        return edge_loss(segmented, targets) + edge_loss(rebuilt, aim)

    def view(self, scans: Sequence[Tensor]) -> Tensor:
        """The bird's-eye view (1, channels, side, side) of one sample's point clouds; see ``birds_eye_view``."""
        return birds_eye_view(scans, self.grid, self.config.channels)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random places of which one in ten holds a point."""
        config, draw = self.config, torch.Generator().manual_seed(0)
        shapes = {"pictures": config.channels, "targets": 1}
        return {
            name: (torch.rand((samples, channels, config.side, config.side), generator=draw) < 0.1).float()
            for name, channels in shapes.items()
        }
