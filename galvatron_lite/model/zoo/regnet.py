"""RegNet: blocks of grouped convolutions whose widths follow a quantised line; Y sizes squeeze and excite.

Radosavovic et al. 2020 (arXiv:2003.13678, section 3.3 and tables 8 and 9).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.zoo.pictures import classification_loss, random_pictures


@dataclass(frozen=True, slots=True)
class RegNetConfig:
    """Shape of a RegNet."""

    widths: tuple[int, ...]  # channels of every block; the picture is halved where they grow
    group: int  # channels of a group of the 3 x 3 convolutions; divides all widths above it
    squeeze: bool  # whether blocks squeeze and excite (Y)
    stem: int = 32  # channels of the first convolution
    side: int = 224  # pixels along each side of an example picture
    channels: int = 3  # of the picture
    classes: int = 1000  # outputs of the head

    def __post_init__(self) -> None:
        uneven = [width for width in self.widths if width % min(self.group, width)]
        if uneven:
            raise InputError("group", self.group, f"Choose a number that divides the widths {uneven}.")


class ConvNorm(nn.Sequential):
    """A convolution without bias, batch normalisation, and ReLU where asked for."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int = 1, groups: int = 1, relu: bool = True):
        conv = nn.Conv2d(inner, outer, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outer), *([nn.ReLU(inplace=True)] if relu else []))


class SqueezeExcitation(nn.Module):
    """Each channel times a factor that two 1 x 1 convolutions find from the mean of its pixels (Hu et al. 2018)."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, hidden, 1)
        self.fc2 = nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Mean, two convolutions, product."""
        factor = x.mean([-2, -1], keepdim=True)
        factor = torch.sigmoid(self.fc2(torch.relu(self.fc1(factor))))
        return factor * x


class RegNetBlock(nn.Module):
    """1 x 1, grouped 3 x 3 (with the stride) and 1 x 1 convolutions added to the input."""

    def __init__(self, inner: int, outer: int, stride: int, group: int, squeeze: bool) -> None:
        super().__init__()
        self.a = ConvNorm(inner, outer, 1)
        self.b = ConvNorm(outer, outer, 3, stride, outer // min(group, outer))
        self.se = SqueezeExcitation(outer, round(inner / 4)) if squeeze else nn.Identity()
        self.c = ConvNorm(outer, outer, 1, relu=False)
        changes = stride > 1 or inner != outer
        self.shortcut = ConvNorm(inner, outer, 1, stride, relu=False) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Convolve and add."""
        return torch.relu(self.shortcut(x) + self.c(self.se(self.b(self.a(x)))))


class RegNet(nn.Module):
    """Classifier of pictures (samples, channels, height, width)."""

    def __init__(self, config: RegNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = ConvNorm(config.channels, config.stem, 3, 2)
        stages, inner = [], config.stem
        for width, same in groupby(config.widths):
            blocks = []
            for index, _ in enumerate(same):
                blocks.append(RegNetBlock(inner, width, 1 if index else 2, config.group, config.squeeze))
                inner = width
            stages.append(nn.Sequential(*blocks))
        self.trunk = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inner, config.classes)

    def forward(self, pictures: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (samples, classes), or their mean cross-entropy where labels (samples,) are given."""
        x = self.avgpool(self.trunk(self.stem(pictures)))
        return classification_loss(self.fc(x.flatten(1)), labels)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random pictures and labels."""
        config = self.config
        return random_pictures(samples, (config.channels, config.side, config.side), config.classes)
