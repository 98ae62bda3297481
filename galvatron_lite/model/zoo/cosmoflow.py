"""CosmoFlow: 3-D convolutions that find four cosmological parameters in a volume of dark matter.

Mathuriya et al. 2018 (arXiv:1808.04728); sizes as Kahira et al. 2021 (arXiv:2104.09075) have them in the layer tables
of their oracle (github.com/TruongThaoNguyen/paraDL-analysis, model/COSMOFLOW.net): 2,128,064 weights. At 512^3 voxels
convolutions are not padded; the table of 256^3 voxels pads them and halves at the fourth convolution, not the third.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.errors import InputError


@dataclass(frozen=True, slots=True)
class CosmoFlowConfig:
    """Shape of a CosmoFlow."""

    widths: tuple[int, ...] = (16, 32, 64, 128, 256, 256, 128)  # channels of every convolution
    kernels: tuple[int, ...] = (3, 3, 3, 3, 2, 2, 2)  # voxels along each side of their kernels
    strides: tuple[int, ...] = (1, 1, 2, 1, 1, 1, 1)  # along each side
    # whether all convolutions but the last one are padded, so that only strides and pooling shrink volumes
    padded: bool = False
    hidden: tuple[int, ...] = (2048, 256)  # outputs of the fully connected layers before the last one
    bias: bool = False  # whether convolutions and fully connected layers have biases; the tables count none
    side: int = 512  # voxels along each side of a volume; one must be left after the last convolution
    channels: int = 4  # of the volume
    targets: int = 4  # parameters to be found

    def __post_init__(self) -> None:
        sides = self.sides
        if sides[-1] != 1:
            raise InputError("side", self.side, f"One voxel must be left, not {sides[-1]}; sides are {sides}.")

    @property
    def sides(self) -> tuple[int, ...]:
        """Voxels along each side that enter each convolution, and what is left after the last one."""
        sides = [self.side]
        for index, (kernel, stride) in enumerate(zip(self.kernels, self.strides, strict=True)):
            last = index == len(self.kernels) - 1
            around = kernel - 1 if self.padded and not last else 0
            after = (sides[-1] + around - kernel) // stride + 1
            sides.append(after if last else after // 2)
        return tuple(sides)


class ConvUnit(nn.Module):
    """A 3-D convolution with leaky ReLU, and mean pooling of 2 voxels along each side where asked for."""

    def __init__(
        self, inner: int, outer: int, kernel: int, stride: int, *, padded: bool, bias: bool, pool: bool
    ) -> None:
        super().__init__()
        self.around = kernel - 1 if padded else 0
        even = self.around // 2 if self.around % 2 == 0 else 0
        self.conv = nn.Conv3d(inner, outer, kernel, stride, padding=even, bias=bias)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, rectify, pool."""
        if self.around % 2:
            before, behind = self.around // 2, self.around - self.around // 2
            x = F.pad(x, (before, behind) * 3)
        x = F.leaky_relu(self.conv(x), inplace=True)
        return F.avg_pool3d(x, 2) if self.pool else x


class CosmoFlow(nn.Module):
    """Finds ``targets`` numbers for each of the volumes (samples, channels, depth, height, width)."""

    def __init__(self, config: CosmoFlowConfig) -> None:
        super().__init__()
        self.config = config
        inner, last = (config.channels, *config.widths), len(config.widths) - 1
        self.convolutions = nn.Sequential(
            *(
                ConvUnit(
                    inner[i], inner[i + 1], config.kernels[i], config.strides[i], bias=config.bias,
                    padded=config.padded and i < last, pool=i < last,
                )
                for i in range(len(config.widths))
            )
        )  # fmt: skip
        sizes = (config.widths[-1], *config.hidden)
        self.hidden = nn.ModuleList(nn.Linear(*pair, bias=config.bias) for pair in pairwise(sizes))
        self.output = nn.Linear(sizes[-1], config.targets, bias=config.bias)

    def forward(self, volumes: Tensor, targets: Tensor | None = None) -> Tensor:
        """Numbers (samples, targets), or their mean squared error where the right ones are given."""
        x = torch.flatten(self.convolutions(volumes), 1)
        for layer in self.hidden:
            x = F.leaky_relu(layer(x), inplace=True)
        found: Tensor = self.output(x)
        return found if targets is None else F.mse_loss(found, targets)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random volumes and numbers."""
        config, draw = self.config, torch.Generator().manual_seed(0)
        sides = (config.side,) * 3
        return {
            "volumes": torch.rand((samples, config.channels, *sides), generator=draw),
            "targets": torch.rand((samples, config.targets), generator=draw),
        }
