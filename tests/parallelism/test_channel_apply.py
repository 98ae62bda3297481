"""Layers with shared channels train as one device does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parallelism import channel_blocks as blocks
from tests.parallelism.channel_runs import alone, assert_equal, seeded, shared

LAYERS = {
    "basic": lambda: blocks.Basic(),
    "basic, first": lambda: blocks.Basic(8, 16, 2),
    "bottleneck": lambda: blocks.Bottleneck(),
    "bottleneck, first": lambda: blocks.Bottleneck(8, 8, 16, 2),
    "bottleneck, grouped": lambda: blocks.Bottleneck(groups=4),
    "convnext": lambda: blocks.ConvNextBlock(),
    "squeeze and excite": lambda: blocks.SqueezeExcite(),
    "vgg": lambda: blocks.VggGroup(),
    "inception": lambda: blocks.Inception(),
}


@pytest.mark.parametrize("by", ["filters", "channels"])
@pytest.mark.parametrize("name", LAYERS)
def test_blocks(name: str, by: str) -> None:
    torch.manual_seed(0)
    layer = seeded(LAYERS[name]())
    inputs = next(one for one in layer.modules() if isinstance(one, nn.Conv2d)).in_channels
    picture = torch.randn(2, inputs, 6, 5, dtype=torch.float64)
    expected = alone(layer, picture)
    for degree in (2, 4):
        for found in shared(layer, picture, by, degree):
            assert_equal(found, expected)
