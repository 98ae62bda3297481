"""The two encoder-decoders of the perception network, from levels that halve a bird's-eye view and climb back.

Sah and Chinara 2024 (arXiv:2412.18165): what is published and what was inferred is said in ``perception``.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Convs(nn.Sequential):
    """Convolutions that keep the extent, with bias; each with batch normalisation and leaky ReLU of slope 0.01.

    Args:
        widths: channels that enter, and those after each convolution.
        kernel: of the first convolution; 3 of the others.
    """

    def __init__(self, widths: tuple[int, ...], kernel: int = 3) -> None:
        kernels = (kernel, *(3 for _ in widths[2:]))
        super().__init__(
            *(
                part
                for (inner, outer), size in zip(pairwise(widths), kernels, strict=True)
                for part in (nn.Conv2d(inner, outer, size, padding=size // 2), *_normalised(outer))
            )
        )


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
        half = inner // 2
        self.grow = nn.Sequential(nn.ConvTranspose2d(inner, half, 3 if odd else 2, 2), *_normalised(half))
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
        for up, own, skip in zip(self.ups, reversed(kept), [*kept[-2::-1], pictures], strict=True):
            out = up(out if self.chained else own, skip)
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


def _normalised(channels: int) -> tuple[nn.Module, ...]:
    return nn.BatchNorm2d(channels), nn.LeakyReLU(0.01, inplace=True)


def _downs(channels: int, widths: tuple[int, ...]) -> nn.ModuleList:
    """The way down; the first convolution of all looks at one pixel's scans alone."""
    inner = (channels, *widths[:-1])
    return nn.ModuleList(
        DownBlock(*pair, kernel=3 if level else 1) for level, pair in enumerate(zip(inner, widths, strict=True))
    )
