"""A captured convolutional network says what windows pass over its pictures and what is summed over their pixels."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from galvatron_lite.capture.trace import trace
from galvatron_lite.model.graph import ModelGraph, OperatorClass
from galvatron_lite.model.sides import Side
from galvatron_lite.parallelism.channel.parts import divides
from galvatron_lite.parallelism.pictures import extents_of, has_weights, items_of, windows_of
from galvatron_lite.parallelism.spatial.grids import splits_pixels

CHANNELS, SIDE = 8, 16


class Block(nn.Module):
    """Two convolutions, each normalised, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2))
        self.one, self.two = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.two(self.second(functional.relu(self.one(self.first(x))))))


class Network(nn.Module):
    """A stem that pools, blocks, mean and classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(CHANNELS, 10)

    def forward(self, picture: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.stem(picture)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean(dim=(2, 3))), target)


class Volume(nn.Module):
    """Layers in a row."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            picture = layer(picture)
        return picture.mean()


def captured() -> ModelGraph:
    picture, target = torch.randn(2, 3, 2 * SIDE, 2 * SIDE), torch.zeros(2, dtype=torch.int64)
    return trace(Network(), {"picture": picture, "target": target})


def test_windows_statistics_and_channels_of_a_captured_network() -> None:
    graph = captured()
    block = graph.kinds["block"]
    flat, side = Side(1), Side(SIDE, 3, 1, 1)
    assert [(one.channels, one.sides) for one in windows_of(block.operators)] == [
        ((CHANNELS, CHANNELS), (flat, side, side))
    ] * 2
    assert sum(one.statistics for one in block.operators) == 2 * 2 * CHANNELS
    assert [items_of(one) for one in block.operators if has_weights(one)] == [
        (CHANNELS * SIDE**2, CHANNELS * SIDE**2, 9 * CHANNELS**2)
    ] * 2
    assert splits_pixels(block)
    assert divides(block, "filters", 4)
    pool = windows_of(graph.kinds["before"].operators)[-1]
    assert (pool.channels, pool.sides[1:]) == ((CHANNELS, CHANNELS), (Side(2 * SIDE, 3, 2, 1),) * 2)


@pytest.mark.parametrize("sides", [1, 2, 3])
def test_windows_of_lines_pictures_and_volumes_tell_the_extent_after_them(sides: int) -> None:
    """Convolutions, transposed ones and pools of every number of sides, against the shapes that PyTorch makes."""
    convolution, back, pool = (getattr(nn, f"{name}{sides}d") for name in ("Conv", "ConvTranspose", "MaxPool"))
    layers = [convolution(2, 4, 3, 2, 2, dilation=2), back(4, 6, 4, 3, 1, groups=2), pool(3, 2, 1)]
    graph = trace(Volume(nn.ModuleList(layers)), {"picture": torch.randn(2, 2, *(17,) * sides)}, blocks=())
    kind = graph.kind_of(graph.layers[0])
    x, found = torch.randn(2, 2, *(17,) * sides), windows_of(kind.operators)
    assert extents_of(kind) == (1,) * (3 - sides) + (17,) * sides
    for layer, window in zip(layers, found, strict=True):
        y = layer(x)
        assert tuple(side.extent for side in window.sides[3 - sides :]) == x.shape[2:]
        assert tuple(side.output for side in window.sides[3 - sides :]) == y.shape[2:]
        assert window.items == (x[0].numel(), y[0].numel())
        x = y


@pytest.mark.parametrize("groups", [1, 4])
def test_either_gradient_of_a_convolution_takes_what_forward_does(groups: int) -> None:
    layers = nn.ModuleList([nn.Conv2d(4, 8, 3, padding=1, groups=groups), nn.ConvTranspose2d(8, 4, 2, 2)])
    graph = trace(Volume(layers), {"picture": torch.randn(2, 4, 6, 6)}, blocks=())
    plain, back = (one for one in graph.kind_of(graph.layers[0]).operators if one.kind is OperatorClass.CONVOLUTION)
    assert plain.flops == 2 * 36 * 8 * (4 // groups) * 9
    assert plain.backward_flops == plain.flops  # a picture takes no gradient
    assert back.flops == 2 * 36 * 8 * 4 * 4
    assert back.backward_flops == 2 * back.flops
