"""Classifiers of pictures: AlexNet, VGG, ResNet, RegNet; and what all reference models of pictures share.

Krizhevsky 2014 (arXiv:1404.5997; one tower); Simonyan and Zisserman 2014 (arXiv:1409.1556, table 1); He et al. 2015
(arXiv:1512.03385, table 1; the stride is that of the 3 x 3 convolution, version 1.5); Radosavovic et al. 2020
(arXiv:2003.13678, section 3.3 and tables 8 and 9; Y sizes squeeze and excite).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.model.shapes.fields import (
    AlexNetShape,
    PictureShape,
    RegNetShape,
    ResNetShape,
    VggShape,
)
from galvatron_lite.model.shapes.images.convnets import ALEXNET


def classification_loss(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Mean cross-entropy of logits (samples, classes, ...) with labels (samples, ...); the logits without labels."""
    return logits if labels is None else F.cross_entropy(logits.float(), labels)


def random_pictures(samples: int, shape: Sequence[int], classes: int, places: Sequence[int] = ()) -> dict[str, Tensor]:
    """Random pictures (samples, *shape), and labels below ``classes`` of shape (samples, *places)."""
    draw = torch.Generator().manual_seed(0)
    return {
        "pictures": torch.rand((samples, *shape), generator=draw),
        "labels": torch.randint(0, classes, (samples, *places), generator=draw),
    }


class ImageClassifier(nn.Module):
    """A classifier of pictures (samples, channels, height, width); keeps its shape as ``config``."""

    def __init__(self, shape: PictureShape) -> None:
        super().__init__()
        self.config = shape

    def logits(self, pictures: Tensor) -> Tensor:
        """Logits (samples, classes)."""
        raise NotImplementedError

    def forward(self, pictures: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (samples, classes), or their mean cross-entropy where labels (samples,) are given."""
        return classification_loss(self.logits(pictures), labels)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random pictures and labels."""
        extent = getattr(self.config, "extent", (self.config.image_size,) * 2)
        return random_pictures(samples, (self.config.channels, *extent), self.config.classes)


class PlainClassifier(ImageClassifier):
    """Convolutions one after the other, pooling to a fixed extent, two hidden layers with dropout, a linear layer."""

    def __init__(self, config: AlexNetShape | VggShape, features: Iterable[nn.Module], hidden: Iterable[nn.Module]):
        super().__init__(config)
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(config.pooled)
        self.classifier = nn.Sequential(*hidden, nn.Linear(config.hidden, config.classes))

    def logits(self, pictures: Tensor) -> Tensor:
        """Logits (samples, classes)."""
        x = torch.flatten(self.avgpool(self.features(pictures)), 1)
        logits: Tensor = self.classifier(x)
        return logits


def hidden_layers(config: AlexNetShape | VggShape, dropout_first: bool) -> Iterator[nn.Module]:
    """Two linear layers with ReLU, and dropout before or behind each."""
    for pair in pairwise((config.widths[-1] * config.pooled**2, config.hidden, config.hidden)):
        layer = (nn.Linear(*pair), nn.ReLU(inplace=True))
        yield from (nn.Dropout(config.dropout), *layer) if dropout_first else (*layer, nn.Dropout(config.dropout))


class Unit(nn.Module):
    """A convolution with ReLU, and max pooling of 3 x 3 pixels with stride 2 where asked for."""

    def __init__(self, inner: int, outer: int, window: tuple[int, int, int, bool]) -> None:
        super().__init__()
        kernel, stride, padding, self.pool = window
        self.conv = nn.Conv2d(inner, outer, kernel, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, rectify, pool."""
        x = nn.functional.relu(self.conv(x), inplace=True)
        return nn.functional.max_pool2d(x, 3, 2) if self.pool else x


class AlexNet(PlainClassifier):
    """See the sources above."""

    def __init__(self, config: AlexNetShape) -> None:
        pairs = pairwise((config.channels, *config.widths))
        units = (Unit(*pair, window) for pair, window in zip(pairs, ALEXNET, strict=True))
        super().__init__(config, units, hidden_layers(config, dropout_first=True))


def convolutions(
    widths: Sequence[int], kernel: int = 3, *, norm: bool = False, bias: bool = True, slope: float = 0.0
) -> Iterator[nn.Module]:
    """Convolutions that keep the extent, each with an activation in place.

    Args:
        widths: channels that enter, and those after each convolution.
        kernel: of the first convolution; 3 of the others.
        norm: whether batch normalisation follows each convolution.
        bias: whether they have biases.
        slope: of the activation below zero.
    """
    for place, (inner, outer) in enumerate(pairwise(widths)):
        size = 3 if place else kernel
        yield nn.Conv2d(inner, outer, size, padding=size // 2, bias=bias)
        if norm:
            yield nn.BatchNorm2d(outer)
        yield nn.LeakyReLU(slope, inplace=True) if slope else nn.ReLU(inplace=True)


class VGG(PlainClassifier):
    """See the sources above."""

    def __init__(self, config: VggShape) -> None:
        pairs = pairwise((config.channels, *config.widths))
        groups = (
            nn.Sequential(*convolutions((inner, *(outer,) * depth)), nn.MaxPool2d(2, 2))
            for (inner, outer), depth in zip(pairs, config.depths, strict=True)
        )
        super().__init__(config, groups, hidden_layers(config, dropout_first=False))


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


class ResNet(ImageClassifier):
    """See the sources above."""

    def __init__(self, config: ResNetShape) -> None:
        super().__init__(config)
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

    def logits(self, pictures: Tensor) -> Tensor:
        """Logits (samples, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(pictures))))
        x = self.stages(x)
        x = torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1)
        logits: Tensor = self.fc(x)
        return logits


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


class RegNet(ImageClassifier):
    """See the sources above."""

    def __init__(self, config: RegNetShape) -> None:
        super().__init__(config)
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

    def logits(self, pictures: Tensor) -> Tensor:
        """Logits (samples, classes)."""
        x = self.avgpool(self.trunk(self.stem(pictures)))
        logits: Tensor = self.fc(x.flatten(1))
        return logits
