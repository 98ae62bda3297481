"""AlexNet in one tower: five convolutions, three fully connected layers (Krizhevsky 2014, arXiv:1404.5997)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from galvatron_lite.model.zoo.pictures import classification_loss, random_pictures


@dataclass(frozen=True, slots=True)
class AlexNetConfig:
    """Shape of an AlexNet."""

    widths: tuple[int, int, int, int, int] = (64, 192, 384, 256, 256)  # channels of the five convolutions
    hidden: int = 4096  # outputs of the first two fully connected layers
    pooled: int = 6  # pixels along each side of what enters the first of these
    dropout: float = 0.5  # probability of dropping an input of them
    side: int = 224  # pixels along each side of an example picture
    channels: int = 3  # of the picture
    classes: int = 1000  # outputs of the head


_WINDOWS = ((11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1))
"""Kernel, stride and padding of each convolution."""
_POOLED = (0, 1, 4)  # convolutions that max pooling follows


class Unit(nn.Module):
    """A convolution with ReLU, and max pooling of 3 x 3 pixels with stride 2 where asked for."""

    def __init__(self, inner: int, outer: int, window: tuple[int, int, int], pool: bool) -> None:
        super().__init__()
        kernel, stride, padding = window
        self.conv = nn.Conv2d(inner, outer, kernel, stride, padding)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, rectify, pool."""
        x = nn.functional.relu(self.conv(x), inplace=True)
        return nn.functional.max_pool2d(x, 3, 2) if self.pool else x


class AlexNet(nn.Module):
    """Classifier of pictures (samples, channels, height, width)."""

    def __init__(self, config: AlexNetConfig) -> None:
        super().__init__()
        self.config = config
        inner = (config.channels, *config.widths)
        self.features = nn.Sequential(
            *(Unit(inner[i], inner[i + 1], window, i in _POOLED) for i, window in enumerate(_WINDOWS))
        )
        self.avgpool = nn.AdaptiveAvgPool2d(config.pooled)
        self.classifier = nn.Sequential(
            nn.Dropout(config.dropout),
            nn.Linear(config.widths[-1] * config.pooled**2, config.hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.hidden),
            nn.ReLU(inplace=True),
            nn.Linear(config.hidden, config.classes),
        )

    def forward(self, pictures: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (samples, classes), or their mean cross-entropy where labels (samples,) are given."""
        x = torch.flatten(self.avgpool(self.features(pictures)), 1)
        return classification_loss(self.classifier(x), labels)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random pictures and labels."""
        config = self.config
        return random_pictures(samples, (config.channels, config.side, config.side), config.classes)
