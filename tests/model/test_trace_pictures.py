"""A captured convolutional network says what windows pass over its pictures and what is summed over their pixels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.model.graph import OperatorClass
from galvatron_lite.parallelism.pictures import extents_of, windows_of

CHANNELS, SIDE = 8, 16


class Volume(nn.Module):
    """Layers in a row."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            picture = layer(picture)
        return picture.mean()


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
