"""Convolutional layers as users write them, for tests of shared channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Basic(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut (He et al. 2015)."""

    def __init__(self, inputs: int = 8, outputs: int = 8, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.project: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            self.project = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.project is None else self.project(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (with the stride, perhaps grouped), 1 x 1 convolutions beside a shortcut."""

    def __init__(self, inputs: int = 16, middle: int = 8, outputs: int = 16, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, middle, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, groups=groups, bias=False)
        self.norm2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.project: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            self.project = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.norm3(self.conv3(out))
        out += x if self.project is None else self.project(x)
        return self.relu(out)


class ConvNextBlock(nn.Module):
    """Depth-wise convolution, LayerNorm, two linears on channels that are last, learned scale (Liu et al. 2022)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).permute(0, 2, 3, 1)
        y = self.gamma * self.down(self.act(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


class SqueezeExcite(nn.Module):
    """Expansion, depth-wise convolution, channels weighed by what is in them, reduction (MBConv; Hu et al. 2017)."""

    def __init__(self, width: int = 8, inner: int = 16, squeezed: int = 4) -> None:
        super().__init__()
        self.expand = nn.Conv2d(width, inner, 1, bias=False)
        self.norm = nn.BatchNorm2d(inner)
        self.depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.squeeze = nn.Linear(inner, squeezed)
        self.excite = nn.Linear(squeezed, inner)
        self.reduce = nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.depthwise(functional.silu(self.norm(self.expand(x)))))
        scale = torch.sigmoid(self.excite(functional.relu(self.squeeze(y.mean((2, 3))))))
        return x + self.reduce(y * scale[:, :, None, None])


class VggGroup(nn.Sequential):
    """Three 3 x 3 convolutions and pooling (Simonyan & Zisserman 2014)."""

    def __init__(self, inputs: int = 8, outputs: int = 16) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2, 2),
        )


class Inception(nn.Module):
    """Branches of several windows, one after the other along the channels (Szegedy et al. 2014)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, 8, 1)
        self.three = nn.Sequential(nn.Conv2d(width, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(width, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([functional.relu(branch(x)) for branch in (self.one, self.three, self.pool)], 1)


class Stem(nn.Sequential):
    """Of a ResNet."""

    def __init__(self, inputs: int = 3, outputs: int = 8) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 7, 2, 3, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )


class SqueezedBottleneck(Bottleneck):
    """A bottleneck whose result is weighed by channel before the shortcut is added."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(16, 4, 1)
        self.excite = nn.Conv2d(4, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.norm3(self.conv3(out))
        scale = self.excite(self.relu(self.squeeze(functional.adaptive_avg_pool2d(out, 1))))
        return self.relu(out * torch.sigmoid(scale) + x)


class Shuffle(nn.Module):
    """Grouped convolutions between which channels are dealt out anew (Zhang et al. 2017), and a learned temperature."""

    def __init__(self, width: int = 8, groups: int = 4) -> None:
        super().__init__()
        self.groups = groups
        self.first = nn.Conv2d(width, 2 * width, 1)
        self.second = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=groups)
        self.temperature = nn.Parameter(torch.zeros(1))
        self.last = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x) / self.temperature.exp())
        samples, channels, height, width = y.shape
        y = y.view(samples, self.groups, channels // self.groups, height, width).transpose(1, 2)
        return self.last(y.reshape(samples, channels, height, width)) + x.mean(1, keepdim=True)


class Classifier(nn.Module):
    """Pooling, flattening and two linears behind a convolution."""

    def __init__(self, width: int = 8, classes: int = 12) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, 2 * width, 3)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.hidden = nn.Linear(8 * width, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.pool(torch.relu(self.conv(x))), 1)
        return self.head(torch.relu(self.hidden(x)))
