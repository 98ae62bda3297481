"""U-Nets of medical pictures against published counts and figures worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from galvatron_lite.model.graph import ModelGraph, OperatorClass
from galvatron_lite.model.shapes.images.names import canonical, graph_of_name


def graph(name: str) -> ModelGraph:
    found = graph_of_name(canonical(name), 224, "fp16")
    assert found is not None
    return found


def items(name: str) -> int:
    made = graph(name)
    return sum(made.kind_of(layer).parameters.total for layer in made.layers)


def test_the_original_u_net_has_the_published_parameters() -> None:
    """31,030,658 of one input channel and two classes: convolutions of 3 x 3, 2 x 2 and 1 x 1 with biases."""
    widths = (1, 64, 128, 256, 512, 1024)
    down = sum(9 * (a * b + b * b) + 2 * b for a, b in pairwise(widths))
    up = sum(4 * 2 * w * w + w + 9 * (2 * w * w + w * w) + 2 * w for w in (512, 256, 128, 64))
    assert items("unet_medical") == down + up + 64 * 2 + 2 == 31_030_658


def test_nnu_net_s_volumes_have_thirty_one_million_parameters() -> None:
    assert items("nnunet-3d") == pytest.approx(31.2e6, rel=0.005)


def test_pictures_without_padding_end_at_388_pixels() -> None:
    """Figure 1 of the paper: 572 x 572 in, 388 x 388 out."""
    made = graph("unet_medical")
    last = made.kind_of(made.layers[-1])
    head = next(one for one in last.operators if one.kind is OperatorClass.CONVOLUTION)
    assert head.shape[:2] == (64, 2)
    assert head.flops == 2 * 64 * 2 * 388**2


@pytest.mark.parametrize(
    ("name", "sides", "levels"), [("nnunet-2d", 2, 5), ("nnunet-3d", 3, 5), ("unet_medical", 2, 4)]
)
def test_every_level_hands_its_picture_over(name: str, sides: int, levels: int) -> None:
    made = graph(name)
    skips = [one for one in made.tensors if one.readers[-1] != made.layers[_place(made, one.producer) + 1].name]
    assert len(skips) >= levels - 1
    extents = (made.kind_of(made.layers[1]).dims.depth, made.kind_of(made.layers[1]).dims.width)
    assert (min(extents) > 1) == (sides == 3)


def _place(made: ModelGraph, name: str) -> int:
    return next(place for place, layer in enumerate(made.layers) if layer.name == name)
