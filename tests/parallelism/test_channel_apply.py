"""Layers with shared channels train as one device does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.channel.apply import shard_channels
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.sharded.groups import ShapeOnlyAxisGroup
from tests.parallelism import channel_layers as blocks
from tests.parallelism.channel_layers import alone, assert_equal, seeded, shared


class Aliased(nn.Module):
    """Writes a whole picture into shares that have another name."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        z = y * 1.0
        alias = z
        z += x
        return z + self.two(alias)


class Denoiser(nn.Module):
    """Adds what it is given, which takes no gradient, before a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.norm(self.one(x) + x))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "basic": blocks.Basic,
    "basic, first": lambda: blocks.Basic(8, 16, 2),
    "bottleneck": blocks.Bottleneck,
    "bottleneck, first": lambda: blocks.Bottleneck(8, 8, 16, 2),
    "bottleneck, grouped": lambda: blocks.Bottleneck(groups=4),
    "convnext": blocks.ConvNextBlock,
    "squeeze and excite": blocks.SqueezeExcite,
    "squeeze and excite behind a bottleneck": blocks.SqueezedBottleneck,
    "vgg": blocks.VggGroup,
    "inception": blocks.Inception,
    "shuffle": blocks.Shuffle,
    "classifier": blocks.Classifier,
    "a convolution": lambda: nn.Conv2d(8, 12, 3),
    "written to by every name": Aliased,
    "no gradient of the picture": Denoiser,
}


@pytest.mark.parametrize("by", ["filters", "channels"])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.filterwarnings("ignore:.*the whole picture is gathered")
def test_blocks_equal_one_process(name: str, by: str) -> None:
    torch.manual_seed(0)
    layer = seeded(BLOCKS[name]())
    inputs = next(one for one in layer.modules() if isinstance(one, nn.Conv2d)).in_channels
    picture = torch.randn(2, inputs, 6, 5, dtype=torch.float64)
    for degree, gradient in ((2, True), (4, True), *([(2, False)] if name.startswith("no gradient") else [])):
        expected = alone(layer, picture, gradient=gradient)
        for found in shared(layer, picture, by=by, degree=degree, gradient=gradient):
            assert_equal(found, expected)


class Drawn(nn.Module):
    """A convolution, perhaps with a norm, an activation and a shortcut."""

    def __init__(self, convolution: nn.Module, norm: nn.Module, inplace: bool, beside: bool) -> None:
        super().__init__()
        self.convolution, self.norm, self.inplace, self.beside = convolution, norm, inplace, beside

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.norm(self.convolution(x)), inplace=self.inplace)
        if self.beside and y.shape == x.shape:
            y += x
        return y


CONVOLUTIONS = {
    1: (nn.Conv1d, nn.ConvTranspose1d),
    2: (nn.Conv2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.ConvTranspose3d),
}
BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@st.composite
def stacks(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A few convolutions with whatever parameters, the first of them dense, and a picture."""
    sides = draw(st.sampled_from([1, 2, 2, 2, 3]))
    width = draw(st.sampled_from([4, 6, 7, 8]))
    modules, inputs = list[nn.Module](), width
    for place in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["dense", "dense", "grouped", "depthwise"])) if place else "dense"
        outputs = draw(st.sampled_from([4, 5, 8, 12])) if kind == "dense" else inputs
        groups = {"dense": 1, "depthwise": inputs, "grouped": next(g for g in (4, 2, 3, 5, 7) if inputs % g == 0)}[kind]
        plain, back = CONVOLUTIONS[sides]
        size, dilation = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 1, 2]))
        stride, bias = draw(st.sampled_from([1, 1, 2])), draw(st.booleans())
        if draw(st.integers(0, 5)) == 0:
            made = back(inputs, outputs, size, stride, groups=groups, bias=bias)
        else:
            mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "circular"]))
            reach = dilation * (size - 1)
            padding = "same" if stride == 1 and draw(st.booleans()) else reach // 2 + reach % 2
            made = plain(inputs, outputs, size, stride, padding, dilation, groups, bias, mode)
        norm = draw(st.sampled_from(["none", "batch", "group"]))
        parts = next(g for g in (4, 2, 5, 3, 1) if outputs % g == 0)
        norms = {"none": nn.Identity(), "batch": BATCH_NORMS[sides](outputs), "group": nn.GroupNorm(parts, outputs)}
        modules.append(Drawn(made, norms[norm], draw(st.booleans()), draw(st.booleans())))
        inputs = outputs
    return seeded(nn.Sequential(*modules)), torch.randn(2, width, *[7, 6, 5][:sides], dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(drawn=stacks(), by=st.sampled_from(["filters", "channels"]), degree=st.integers(2, 4))
@pytest.mark.filterwarnings("ignore:.*the whole picture is gathered")
def test_random_convolutions_equal_one_process(drawn: tuple[nn.Module, Tensor], by: str, degree: int) -> None:
    layer, picture = drawn
    try:
        expected = alone(layer, picture)
    except RuntimeError:  # a picture has become smaller than its window or padding
        reject()
    for found in shared(layer, picture, by=by, degree=degree):
        assert_equal(found, expected)


def test_features_behind_flattening_stay_shares() -> None:
    layer, picture = seeded(blocks.Classifier()), torch.randn(2, 8, 6, 5, dtype=torch.float64)
    found = shared(layer, picture, by="channels", degree=2)[0]
    assert found.calls == ({"reduce_scatter": 3}, {"all_gather": 3})


def test_the_gradient_of_an_image_is_not_asked_for() -> None:
    layer, image = seeded(blocks.Stem()), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    expected = alone(layer, image, gradient=False)
    for found in shared(layer, image, by="filters", degree=2, gradient=False):
        assert_equal(found, expected)
        assert found.calls[0] == {"all_gather": 1}
        assert not found.calls[1]


def test_a_layer_recomputes_as_any_other() -> None:
    layer = blocks.SqueezeExcite()
    layer.norm = nn.Identity()  # type: ignore[assignment]  # running statistics would be taken twice
    layer, picture = seeded(layer), torch.randn(2, 8, 6, 6, dtype=torch.float64)
    expected = alone(layer, picture)
    for by in ("filters", "channels"):
        for recompute in (Recompute.FULL, Recompute.SELECTIVE):
            for found in shared(layer, picture, by=by, degree=2, recompute=recompute):
                assert_equal(found, expected)


def test_a_plan_for_another_number_of_devices_is_refused() -> None:
    layer = blocks.Basic()
    plan = infer_channels(layer, (torch.zeros(2, 8, 6, 6),), {}, "filters", 2)
    with pytest.raises(InputError, match="plan for 4 devices"):
        shard_channels(layer, plan, ShapeOnlyAxisGroup(4))
