"""U-Net (Ronneberger et al. 2015, arXiv:1505.04597, figure 1) with padded convolutions, which keep extents."""

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
    """Enlarges the picture, concatenates that of the encoder, and applies two convolutions."""

    def __init__(self, inner: int, outer: int, norm: bool, bilinear: bool) -> None:
        super().__init__()
        self.bilinear = bilinear
        if bilinear:
            self.conv = DoubleConv(inner, outer, norm, inner // 2)
        else:
            self.up = nn.ConvTranspose2d(inner, inner // 2, 2, 2)
            self.conv = DoubleConv(inner, outer, norm)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Enlarge ``x`` to the size of ``skip``, concatenate, convolve."""
        if self.bilinear:
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
        else:
            x = self.up(x)
        x = torch.cat([skip, x], dim=1)
        out: Tensor = self.conv(x)
        return out


class UNet(nn.Module):
    """Classifies each pixel of pictures (samples, channels, height, width)."""

    def __init__(self, config: UNetShape) -> None:
        super().__init__()
        self.config = config
        widths = [config.base * 2**level for level in range(config.levels + 1)]
        factor = 2 if config.bilinear else 1
        encoder_widths = [*widths[:-1], widths[-1] // factor]
        self.inc = DoubleConv(config.channels, widths[0], config.norm)
        self.downs = nn.ModuleList(Down(inner, outer, config.norm) for inner, outer in pairwise(encoder_widths))
        self.ups = nn.ModuleList(
            Up(width, max(width // 2 // factor, config.base), config.norm, config.bilinear)
            for width in reversed(widths[1:])
        )
        self.outc = nn.Conv2d(config.base, config.classes, 1)

    def forward(self, pictures: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (samples, classes, height, width), or their mean cross-entropy with labels of each pixel."""
        kept = [self.inc(pictures)]
        for down in self.downs:
            kept.append(down(kept[-1]))
        x = kept.pop()
        for up in self.ups:
            x = up(x, kept.pop())
        return classification_loss(self.outc(x), labels)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random pictures, and labels of each pixel."""
        config, sides = self.config, (self.config.image_size,) * 2
        return random_pictures(samples, (config.channels, *sides), config.classes, sides)
