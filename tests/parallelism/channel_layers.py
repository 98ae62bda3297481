"""Convolutional layers as users write them, with shared channels as threads, beside the same on one device."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.channel.apply import shard_channels
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.channel.parts import ChannelPlan
from galvatron_lite.parallelism.recompute.apply import apply_recompute
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.shards import Placement
from tests.parallelism.sharded_compare import gather_full, gather_running, gather_shares
from tests.parallelism.thread_group import ThreadGroup, run_threads


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


@dataclass
class Outcome:
    """Of a step: what one device and each rank have."""

    output: Tensor
    input_gradients: list[Tensor | None]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    calls: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    moved: tuple[Counter[str], Counter[str]] = (Counter(), Counter())


def seeded(layer: nn.Module) -> nn.Module:
    """The layer in double precision, every parameter drawn at random (also those that begin as 0 or 1)."""
    layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return layer


def alone(layer: nn.Module, *pictures: Tensor, gradient: bool = True) -> Outcome:
    """One device."""
    layer, own = copy.deepcopy(layer), [one.clone().requires_grad_(gradient) for one in pictures]
    output = layer(*own)
    (output * weights_of(output)).sum().backward()
    return Outcome(
        output.detach(),
        [one.grad for one in own],
        _gradients(layer),
        dict(layer.named_parameters()),
        dict(layer.named_buffers()),
    )


def weights_of(output: Tensor) -> Tensor:
    """A fixed gradient of the outcome."""
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)


def _gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}


def shared(
    layer: nn.Module,
    *pictures: Tensor,
    by: str,
    degree: int,
    gradient: bool = True,
    recompute: Recompute = Recompute.NONE,
) -> list[Outcome]:
    """What each rank has, brought together as the runtime does."""
    plan = infer_channels(layer, pictures, {}, by, degree)
    layers = [copy.deepcopy(layer) for _ in range(degree)]

    def work(group: ThreadGroup) -> Outcome:
        return _step(layers[group.rank], pictures, plan, Counted(group), gradient, recompute)

    return run_threads(degree, work)


@dataclass
class Counted:
    """A line whose calls, and the bytes of what comes of them, are counted."""

    group: ThreadGroup

    def __post_init__(self) -> None:
        self.size, self.rank = self.group.size, self.group.rank
        self.bytes: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def run(*args: Any) -> Any:
            result = getattr(self.group, name)(*args)
            if name == "exchange":
                self.bytes[name] += sum(one.nbytes for _, one in args[0])
            else:
                self.bytes[name] += (args[0] if name == "reduce_scatter" else result).nbytes
            return result

        return run


def _step(
    layer: nn.Module,
    pictures: tuple[Tensor, ...],
    plan: ChannelPlan,
    line: Counted,
    gradient: bool,
    recompute: Recompute,
) -> Outcome:
    group, shares = line.group, plan.by == "channels"
    shards = shard_channels(layer, plan, line)
    apply_recompute(layer, recompute)
    mine = [(_share(one, group) if shares else one).detach().clone().requires_grad_(gradient) for one in pictures]
    output = layer(*mine)
    assert type(output) is Tensor
    forward = Counter(group.calls), Counter(line.bytes)
    whole = gather_shares(output.detach(), group, plan.outputs[0], 1) if shares else output.detach()
    group.calls, line.bytes = Counter(), Counter()
    weights = weights_of(whole)
    (output * (_share(weights, group) if shares else weights)).sum().backward()
    backward = Counter(group.calls), Counter(line.bytes)
    extents = plan.inputs if shares else [0] * len(mine)
    return Outcome(
        whole,
        [
            gather_shares(one.grad, group, extent, 1) if extent and one.grad is not None else one.grad
            for one, extent in zip(mine, extents, strict=True)
        ],
        {name: _whole(one, shards[name], group) for name, one in _gradients(layer).items()},
        {name: gather_full(one.detach(), shards[name], group) for name, one in layer.named_parameters()},
        _buffers(layer, group),
        (forward[0], backward[0]),
        (forward[1], backward[1]),
    )


def _share(tensor: Tensor, group: ThreadGroup) -> Tensor:
    return tensor.narrow(1, *share(tensor.shape[1], group.size, group.rank))


def _whole(gradient: Tensor, shard: Any, group: ThreadGroup) -> Tensor:
    if shard.placement is Placement.PARTIAL:
        return group.all_reduce(gradient)
    return gather_full(gradient, shard, group)


def _buffers(layer: nn.Module, group: ThreadGroup) -> dict[str, Tensor]:
    gather_running(layer, group)
    return dict(layer.named_buffers())


def assert_equal(found: Outcome, expected: Outcome) -> None:
    """To 1e-10 of what is compared."""
    close(found.output, expected.output)
    for mine, its in zip(found.input_gradients, expected.input_gradients, strict=True):
        assert (mine is None) == (its is None)
        if mine is not None and its is not None:
            close(mine, its)
    for one, other in (
        (found.gradients, expected.gradients),
        (found.parameters, expected.parameters),
        (found.buffers, expected.buffers),
    ):
        assert one.keys() == other.keys()
        for name, tensor in other.items():
            close(one[name], tensor)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-10)
