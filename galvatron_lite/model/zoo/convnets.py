"""AlexNet, VGG, ResNet, RegNet, ConvNeXt and CosmoFlow, and the base classes of all image networks.

Krizhevsky 2014 (arXiv:1404.5997; one tower); Simonyan and Zisserman 2014 (arXiv:1409.1556, table 1); He et al. 2015
(arXiv:1512.03385, table 1; the stride is that of the 3 x 3 convolution, version 1.5); Radosavovic et al. 2020
(arXiv:2003.13678, section 3.3 and tables 8 and 9; Y sizes squeeze and excite); Liu et al. 2022 (ConvNeXt,
arXiv:2201.03545, section 3; no stochastic depth).

CosmoFlow predicts four cosmological parameters from a volume of dark matter: Mathuriya et al. 2018 (arXiv:1808.04728);
sizes as in the layer tables of the oracle of Kahira et al. 2021 (arXiv:2104.09075;
github.com/TruongThaoNguyen/paraDL-analysis, model/COSMOFLOW.net): 2,128,064 weights. At 512^3 voxels convolutions are
not padded; the table of 256^3 voxels pads them and halves at the fourth convolution, not the third.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.model.shapes.fields import (
    AlexNetShape,
    ConvNextShape,
    CosmoFlowShape,
    PictureShape,
    RegNetShape,
    ResNetShape,
    VggShape,
)
from galvatron_lite.model.shapes.images.convnets import ALEXNET


def classification_loss(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Mean cross-entropy of logits (samples, classes, ...) with labels (samples, ...); the logits without labels."""
    return logits if labels is None else F.cross_entropy(logits.float(), labels)


def random_pictures(samples: int, shape: Sequence[int], classes: int, pixels: Sequence[int] = ()) -> dict[str, Tensor]:
    """Random pictures (samples, *shape), and labels below ``classes`` of shape (samples, *pixels)."""
    generator = torch.Generator().manual_seed(0)
    return {
        "pictures": torch.rand((samples, *shape), generator=generator),
        "labels": torch.randint(0, classes, (samples, *pixels), generator=generator),
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
        """Logits (samples, classes), or their mean cross-entropy with labels (samples,)."""
        return classification_loss(self.logits(pictures), labels)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random pictures and labels."""
        extent = getattr(self.config, "extent", (self.config.image_size,) * 2)
        return random_pictures(samples, (self.config.channels, *extent), self.config.classes)


class PlainClassifier(ImageClassifier):
    """A chain of convolutions, pooling to a fixed extent, two hidden layers with dropout, a linear layer."""

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
    """Two linear layers with ReLU, and dropout before or after each."""
    for pair in pairwise((config.widths[-1] * config.pooled**2, config.hidden, config.hidden)):
        layer = (nn.Linear(*pair), nn.ReLU(inplace=True))
        yield from (nn.Dropout(config.dropout), *layer) if dropout_first else (*layer, nn.Dropout(config.dropout))


class Unit(nn.Module):
    """A convolution with ReLU, and optionally max pooling of 3 x 3 pixels with stride 2 (see ``ALEXNET``)."""

    def __init__(self, inner: int, outer: int, window: tuple[int, int, int, bool]) -> None:
        super().__init__()
        kernel, stride, padding, self.pool = window
        self.conv = nn.Conv2d(inner, outer, kernel, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, rectify, pool."""
        x = nn.functional.relu(self.conv(x), inplace=True)
        return nn.functional.max_pool2d(x, 3, 2) if self.pool else x


class AlexNet(PlainClassifier):
    """See the module's sources."""

    def __init__(self, config: AlexNetShape) -> None:
        pairs = pairwise((config.channels, *config.widths))
        units = (Unit(*pair, window) for pair, window in zip(pairs, ALEXNET, strict=True))
        super().__init__(config, units, hidden_layers(config, dropout_first=True))


def convolutions(
    widths: Sequence[int], kernel: int = 3, *, norm: bool = False, bias: bool = True, slope: float = 0.0
) -> Iterator[nn.Module]:
    """Convolutions that keep the extent, each with an activation in place.

    Args:
        widths: channels before, and after each convolution.
        kernel: of the first convolution; that of the others is 3.
        norm: whether batch normalisation follows each convolution.
        bias: whether convolutions have biases.
        slope: of the activation below zero.
    """
    for index, (inner, outer) in enumerate(pairwise(widths)):
        size = 3 if index else kernel
        yield nn.Conv2d(inner, outer, size, padding=size // 2, bias=bias)
        if norm:
            yield nn.BatchNorm2d(outer)
        yield nn.LeakyReLU(slope, inplace=True) if slope else nn.ReLU(inplace=True)


class VGG(PlainClassifier):
    """See the module's sources."""

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
    """See the module's sources."""

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
    """A convolution without bias, batch normalisation, and optionally ReLU."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int = 1, groups: int = 1, relu: bool = True):
        conv = nn.Conv2d(inner, outer, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outer), *([nn.ReLU(inplace=True)] if relu else []))


class SqueezeExcitation(nn.Module):
    """Scales channels by factors that two 1 x 1 convolutions compute from the mean of all pixels (Hu et al. 2018)."""

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
    """See the module's sources."""

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


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of each pixel of (samples, channels, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        """Channels last, normalise, channels first again."""
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, norm, MLP of four times the width, learned scale, residual; keeps the shape."""

    def __init__(self, width: int, kernel: int, scale: float) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), scale))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Mix pixels, then channels, and add."""
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.pwconv2(self.act(self.pwconv1(self.norm(y))))
        out: Tensor = x + (self.gamma * y).permute(0, 3, 1, 2)
        return out


class ConvNeXt(ImageClassifier):
    """A ConvNeXt.

    Args:
        config: its shape.
        scale: first value of the learned factor on each block's result.
    """

    def __init__(self, config: ConvNextShape, scale: float = 1e-6) -> None:
        super().__init__(config)
        widths = config.widths
        self.stem = nn.Sequential(nn.Conv2d(config.channels, widths[0], 4, 4), LayerNorm2d(widths[0], eps=1e-6))
        self.downsamples = nn.ModuleList(
            nn.Sequential(LayerNorm2d(inner, eps=1e-6), nn.Conv2d(inner, outer, 2, 2))
            for inner, outer in pairwise(widths)
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(ConvNeXtBlock(width, config.kernel, scale) for _ in range(depth)))
            for depth, width in zip(config.depths, widths, strict=True)
        )
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], config.classes)
        self.apply(self._init_weights)

    def logits(self, pictures: Tensor) -> Tensor:
        """Logits (samples, classes)."""
        x = self.stem(pictures)
        for stage, blocks in enumerate(self.stages):
            x = blocks(x if stage == 0 else self.downsamples[stage - 1](x))
        logits: Tensor = self.head(self.norm(x.mean([-2, -1])))
        return logits

    def _init_weights(self, module: nn.Module) -> None:
        # called by this name when a model on the meta device gets its initial values
        if isinstance(module, (nn.Conv2d, nn.Linear)) and module.bias is not None:
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        if isinstance(module, ConvNeXtBlock):
            nn.init.constant_(module.gamma, module.scale)


class ConvUnit(nn.Module):
    """A 3-D convolution with leaky ReLU, and optionally mean pooling of 2 voxels along each side."""

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
    """Regression of ``classes`` numbers from volumes (samples, channels, depth, height, width)."""

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
        """Numbers (samples, classes), or their mean squared error with targets."""
        x = torch.flatten(self.convolutions(volumes), 1)
        for layer in self.hidden:
            x = F.leaky_relu(layer(x), inplace=True)
        prediction: Tensor = self.output(x)
        return prediction if targets is None else F.mse_loss(prediction, targets)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random volumes and numbers."""
        config, generator = self.config, torch.Generator().manual_seed(0)
        sides = (config.image_size,) * 3
        return {
            "volumes": torch.rand((samples, config.channels, *sides), generator=generator),
            "targets": torch.rand((samples, config.classes), generator=generator),
        }
