"""VGG: groups of 3 x 3 convolutions with max pooling between them, three fully connected layers.

Simonyan and Zisserman 2014 (arXiv:1409.1556, table 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from galvatron_lite.model.zoo.pictures import classification_loss, random_pictures


@dataclass(frozen=True, slots=True)
class VGGConfig:
    """Shape of a VGG."""

    depths: tuple[int, ...]  # convolutions a group
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)  # channels a group
    hidden: int = 4096  # outputs of the first two fully connected layers
    pooled: int = 7  # pixels along each side of what enters the first of these
    dropout: float = 0.5  # probability of dropping an output of them
    side: int = 224  # pixels along each side of an example picture
    channels: int = 3  # of the picture
    classes: int = 1000  # outputs of the head


def conv_group(inner: int, outer: int, depth: int) -> nn.Sequential:
    """So many 3 x 3 convolutions with ReLU, then max pooling, which halves the picture."""
    parts: list[nn.Module] = []
    for index in range(depth):
        parts += [nn.Conv2d(outer if index else inner, outer, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, nn.MaxPool2d(2, 2))


def classifier(inner: int, hidden: int, classes: int, dropout: float) -> nn.Sequential:
    """Three fully connected layers with ReLU and dropout between them."""
    return nn.Sequential(
        nn.Linear(inner, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    )


class VGG(nn.Module):
    """Classifier of pictures (samples, channels, height, width)."""

    def __init__(self, config: VGGConfig) -> None:
        super().__init__()
        self.config = config
        inner = (config.channels, *config.widths)
        groups = zip(inner, config.widths, config.depths, strict=False)
        self.features = nn.Sequential(*(conv_group(*group) for group in groups))
        self.avgpool = nn.AdaptiveAvgPool2d(config.pooled)
        self.classifier = classifier(
            config.widths[-1] * config.pooled**2, config.hidden, config.classes, config.dropout
        )

    def forward(self, pictures: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (samples, classes), or their mean cross-entropy where labels (samples,) are given."""
        x = torch.flatten(self.avgpool(self.features(pictures)), 1)
        return classification_loss(self.classifier(x), labels)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random pictures and labels."""
        config = self.config
        return random_pictures(samples, (config.channels, config.side, config.side), config.classes)
