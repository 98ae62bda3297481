"""CosmoFlow: 3-D convolutions that find four cosmological parameters in a volume of dark matter.

Mathuriya et al. 2018 (arXiv:1808.04728); sizes as Kahira et al. 2021 (arXiv:2104.09075) have them in the layer tables
of their oracle (github.com/TruongThaoNguyen/paraDL-analysis, model/COSMOFLOW.net): 2,128,064 weights. At 512^3 voxels
convolutions are not padded; the table of 256^3 voxels pads them and halves at the fourth convolution, not the third.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.model.shapes.fields import CosmoFlowShape


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
    """Finds ``classes`` numbers for each of the volumes (samples, channels, depth, height, width)."""

    def __init__(self, config: CosmoFlowShape) -> None:
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
        self.output = nn.Linear(sizes[-1], config.classes, bias=config.bias)

    def forward(self, volumes: Tensor, targets: Tensor | None = None) -> Tensor:
        """Numbers (samples, classes), or their mean squared error where the right ones are given."""
        x = torch.flatten(self.convolutions(volumes), 1)
        for layer in self.hidden:
            x = F.leaky_relu(layer(x), inplace=True)
        prediction: Tensor = self.output(x)
        return prediction if targets is None else F.mse_loss(prediction, targets)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random volumes and numbers."""
        config, draw = self.config, torch.Generator().manual_seed(0)
        sides = (config.image_size,) * 3
        return {
            "volumes": torch.rand((samples, config.channels, *sides), generator=draw),
            "targets": torch.rand((samples, config.classes), generator=draw),
        }
