"""U-Net: levels that halve the picture, and the way back with the pictures of the way down beside it.

Ronneberger et al. 2015 (arXiv:1505.04597, figure 1) with padded convolutions, so that pictures keep their size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.model.shapes.fields import UNetShape
from galvatron_lite.model.zoo.convnets import classification_loss, convolutions, random_pictures


class DoubleConv(nn.Sequential):
    """Two 3 x 3 convolutions with ReLU; maps ``inner`` channels to ``outer``, with ``middle`` between."""

    def __init__(self, inner: int, outer: int, norm: bool, middle: int = 0) -> None:
        super().__init__(*convolutions((inner, middle or outer, outer), norm=norm, bias=not norm))


class Down(nn.Module):
    """Max pooling, which halves the picture, and two convolutions."""

    def __init__(self, inner: int, outer: int, norm: bool) -> None:
        super().__init__()
        self.conv = DoubleConv(inner, outer, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Pool and convolve."""
        out: Tensor = self.conv(F.max_pool2d(x, 2))
        return out


class Up(nn.Module):
    """The picture enlarged, that of the way down beside it, and two convolutions."""

    def __init__(self, inner: int, outer: int, norm: bool, bilinear: bool) -> None:
        super().__init__()
        self.bilinear = bilinear
        if bilinear:
            self.conv = DoubleConv(inner, outer, norm, inner // 2)
        else:
            self.up = nn.ConvTranspose2d(inner, inner // 2, 2, 2)
            self.conv = DoubleConv(inner, outer, norm)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Enlarge ``x`` to the size of ``skip``, put both side by side, convolve."""
        if self.bilinear:
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
        else:
            x = self.up(x)
        x = torch.cat([skip, x], dim=1)
        out: Tensor = self.conv(x)
        return out


class UNet(nn.Module):
    """Classifier of every pixel of pictures (samples, channels, height, width)."""

    def __init__(self, config: UNetShape) -> None:
        super().__init__()
        self.config = config
        widths = [config.base * 2**level for level in range(config.levels + 1)]
        less = 2 if config.bilinear else 1
        lowest = [*widths[:-1], widths[-1] // less]
        self.inc = DoubleConv(config.channels, widths[0], config.norm)
        self.downs = nn.ModuleList(Down(inner, outer, config.norm) for inner, outer in pairwise(lowest))
        self.ups = nn.ModuleList(
            Up(width, max(width // 2 // less, config.base), config.norm, config.bilinear)
            for width in reversed(widths[1:])
        )
        self.outc = nn.Conv2d(config.base, config.classes, 1)

    def forward(self, pictures: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (samples, classes, height, width), or their mean cross-entropy where labels (samples, height, width)
        are given."""
        kept = [self.inc(pictures)]
        for down in self.downs:
            kept.append(down(kept[-1]))
        x = kept.pop()
        for up in self.ups:
            x = up(x, kept.pop())
        return classification_loss(self.outc(x), labels)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random pictures and labels of every pixel."""
        config, sides = self.config, (self.config.image_size,) * 2
        return random_pictures(samples, (config.channels, *sides), config.classes, sides)
