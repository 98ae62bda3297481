"""A residual network for pictures: a stem, stages of bottleneck blocks, mean of all pixels, linear classifier.

He et al. 2015 (arXiv:1512.03385, table 1); the stride is that of the 3 x 3 convolution (version 1.5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from galvatron_lite.model.zoo.pictures import classification_loss, random_pictures


@dataclass(frozen=True, slots=True)
class ResNetConfig:
    """Shape of a residual network."""

    depths: tuple[int, ...]  # blocks a stage
    width: int = 64  # channels of the first stage's bottleneck; doubled from stage to stage
    expansion: int = 4  # output channels / bottleneck channels
    side: int = 224  # pixels along each side of an example picture
    channels: int = 3  # of the picture
    classes: int = 1000  # outputs of the head


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (with the stride) and 1 x 1 convolutions added to the input.

    Maps (samples, inner, height, width) to (samples, outer, height / stride, width / stride).
    """

    def __init__(self, inner: int, middle: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, outer, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride > 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        """Narrow, convolve, widen, add."""
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.shortcut is None else self.shortcut(x)
        rectified: Tensor = self.relu(out)
        return rectified


class ResNet(nn.Module):
    """Classifier of pictures (samples, channels, height, width)."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv2d(config.channels, config.width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(config.width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        stages, inner = [], config.width
        for stage, depth in enumerate(config.depths):
            middle, blocks = config.width * 2**stage, []
            for index in range(depth):
                stride = 2 if stage and not index else 1
                blocks.append(Bottleneck(inner, middle, middle * config.expansion, stride))
                inner = middle * config.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(inner, config.classes)

    def forward(self, pictures: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (samples, classes), or their mean cross-entropy where labels (samples,) are given."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(pictures))))
        x = self.stages(x)
        x = torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1)
        return classification_loss(self.fc(x), labels)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random pictures and labels."""
        config = self.config
        return random_pictures(samples, (config.channels, config.side, config.side), config.classes)
