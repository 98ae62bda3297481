"""Pools and shuffles of shared pictures against the whole picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.parallelism.sharded.collectives import distribute
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, image_specs, to_local
from galvatron_lite.parallelism.spatial.grids import SideWindow, output_extent, received_counts, window_refusal
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from tests.parallelism.sharded_compare import (
    GRIDS,
    STRICT,
    check_shared,
    close,
    double,
    grid_of,
    kept,
    shared,
)
from tests.parallelism.thread_group import ThreadGroup, run_threads

Layer = Callable[[Tensor], Tensor]


def fits(windows: list[SideWindow], extents: list[int], grid: tuple[int, ...]) -> bool:
    pairs = list(zip(windows, extents, strict=True))
    return all(output_extent(window, extent) > 0 for window, extent in pairs) and not any(
        window_refusal(window, extent, degree)
        for (window, extent), degree in zip(pairs[-2:], grid[-len(pairs) :], strict=True)
    )


def check(layer: Layer, extents: list[int], grid: tuple[int, int], seed: int = 0) -> None:
    torch.manual_seed(seed)
    picture = double(2, 3, *extents)
    check_shared(layer, picture, [], grid, seed)


@st.composite
def pools(draw: st.DrawFn, sides: int, dilated: bool) -> tuple[dict[str, Any], list[SideWindow]]:
    every = range(sides)
    kernel = [draw(st.integers(1, 4)) for _ in every]
    stride = [draw(st.integers(1, 3)) for _ in every]
    padding = [draw(st.integers(0, one // 2)) for one in kernel]
    dilation = [draw(st.integers(1, 2)) if dilated else 1 for _ in every]
    ceil = draw(st.booleans())
    steps: dict[str, Any] = {"stride": tuple(stride), "padding": tuple(padding), "ceil_mode": ceil}
    if dilated:
        steps["dilation"] = tuple(dilation)
    windows = [SideWindow(k, s, q, q, d, ceil) for k, s, q, d in zip(kernel, stride, padding, dilation, strict=True)]
    return {"kernel_size": tuple(kernel), **steps}, windows


SIZES = st.integers(3, 13)


@settings(max_examples=40, deadline=None)
@given(pools(2, True), SIZES, SIZES, st.sampled_from(GRIDS))
def test_max_pooling_equals_one_device(drawn: Any, height: int, width: int, grid: tuple[int, int]) -> None:
    assume(fits(drawn[1], [height, width], grid))
    check(lambda picture: functional.max_pool2d(picture, **drawn[0]), [height, width], grid)


@settings(max_examples=60, deadline=None)
@given(
    pools(2, False),
    st.booleans(),
    st.sampled_from([None, 1, 5]),
    SIZES,
    SIZES,
    st.sampled_from(GRIDS),
)
def test_average_pooling_equals_one_device(
    drawn: Any, counted: bool, divisor: int | None, height: int, width: int, grid: tuple[int, int]
) -> None:
    assume(fits(drawn[1], [height, width], grid))
    steps = {**drawn[0], "count_include_pad": counted, "divisor_override": divisor}
    check(lambda picture: functional.avg_pool2d(picture, **steps), [height, width], grid)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.booleans(), st.sampled_from([1, 3]), st.sampled_from([(1, 2), (1, 3)]))
def test_pools_of_one_side_and_of_volumes(
    data: st.DataObject, largest: bool, sides: int, grid: tuple[int, int]
) -> None:
    steps, windows = data.draw(pools(sides, largest))
    extents = [5, 6, data.draw(SIZES)][-sides:]
    # torch's means of volumes want no kernel longer than the side
    assume(
        fits(windows, extents, grid) and all(one.kernel <= extent for one, extent in zip(windows, extents, strict=True))
    )
    function = getattr(functional, f"{'max' if largest else 'avg'}_pool{sides}d")
    check(lambda picture: function(picture, **steps), extents, grid)


@pytest.mark.parametrize(
    "function",
    [
        lambda picture: torch.max_pool2d(picture, 3, 2, 1),
        lambda picture: functional.max_pool2d(picture, 3, stride=2, padding=1, return_indices=False),
        lambda picture: functional.max_pool2d(input=picture, kernel_size=[2, 2], stride=[]),
        lambda picture: functional.adaptive_max_pool2d(picture, (None, 1)),
        lambda picture: functional.pixel_shuffle(torch.cat([picture, picture * 2, picture, picture], 1), 2),
        lambda picture: functional.pixel_unshuffle(picture, 2),
    ],
)
def test_functional_and_module_pools_equal_one_device(function: Layer) -> None:
    check(function, [20, 8], (2, 2))


@pytest.mark.filterwarnings("ignore:.*the whole picture is gathered")
@settings(max_examples=30, deadline=None)
@given(
    st.booleans(),
    st.sampled_from([1, 2, 3, 4, None]),
    st.sampled_from([1, 2, 3, 6, None]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from(GRIDS),
)
def test_pools_to_given_extents(
    largest: bool, rows: int | None, columns: int | None, high: int, wide: int, grid: tuple[int, int]
) -> None:
    height, width = (rows or 4) * high + (4 if rows == 1 else 0), (columns or 5) * wide + (4 if columns == 1 else 0)
    assume(height >= grid[0] and width >= grid[1])
    function = functional.adaptive_max_pool2d if largest else functional.adaptive_avg_pool2d
    picture = double(2, 3, height, width)

    def layer(given: Tensor) -> Tensor:
        made: Tensor = function(given, (rows, columns))
        return made

    check_shared(layer, picture, [], grid, 0, PIXELS_RULES)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(3, 4, 3, padding=1),
        nn.ConvTranspose1d(3, 4, 3, 2, 1),
        nn.MaxPool1d(3, 2, 1),
        nn.AdaptiveMaxPool1d(8),
        nn.ReflectionPad1d(1),
        nn.ZeroPad1d(0),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        nn.AdaptiveAvgPool2d((1, 8)),
        nn.ZeroPad2d((0, 0, -1, 0)),
    ],
    ids=str,
)
def test_what_comes_out_may_be_written_to(layer: nn.Module) -> None:
    module, picture = layer.double(), double(1, 3, *[8] * int(type(layer).__name__[-2]))

    def run(given: Tensor) -> Tensor:
        return functional.relu(module(given), inplace=True)

    check_shared(run, picture, [], (1, 2))


def test_a_mean_over_the_picture_is_whole_and_moves_no_picture() -> None:
    picture = double(2, 3, 9, 8)

    def work(group: ThreadGroup) -> dict[str, int]:
        cut = distribute(picture, image_specs(picture.shape, grid_of(group, 3, 1)), STRICT)
        mean = functional.adaptive_avg_pool2d(cut, 1)
        assert not isinstance(mean, ShardedTensor)
        close(mean, picture.mean((2, 3), keepdim=True))
        line = cut.specs[0].group  # type: ignore[attr-defined]
        return dict(line.calls)

    assert run_threads(3, work) == [{"all_reduce": 1}] * 3


@pytest.mark.parametrize(
    "function",
    [
        lambda picture: functional.max_pool2d(picture, 2, return_indices=True)[0],
        lambda picture: functional.adaptive_avg_pool2d(picture, (5, 3)),
        lambda picture: functional.adaptive_max_pool2d(picture, 2, return_indices=True)[0],
        lambda picture: torch.adaptive_max_pool1d(picture.flatten(2), 4)[0],
        lambda picture: functional.pixel_shuffle(picture.repeat(1, 4, 1, 1), 2),
        lambda picture: functional.pixel_unshuffle(picture[:, :, :6], 2),
        lambda picture: functional.avg_pool2d(picture, 7),
        lambda picture: functional.lp_pool2d(picture.square(), 2, 3, 1),
        lambda picture: functional.avg_pool2d(picture, 9, ceil_mode=True),
        lambda picture: functional.max_pool2d(picture, (7, 2)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*the whole picture is gathered")
def test_what_is_not_shared_is_gathered(function: Layer) -> None:
    picture = double(2, 3, 7, 8)
    check_shared(function, picture, [], (2, 1), 0, PIXELS_RULES)


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (lambda picture: functional.max_pool2d(picture, 3, 2, 1), SideWindow(3, 2, 1, 1)),
        (lambda picture: functional.avg_pool2d(picture, 3, 1, 1), SideWindow(3, 1, 1, 1)),
        (lambda picture: functional.avg_pool2d(picture, 2), SideWindow(2, 2)),
    ],
)
def test_borders_on_the_wire_are_those_of_the_windows(function: Layer, window: SideWindow) -> None:
    picture = double(2, 3, 24, 10)
    ranks = shared(function, picture, [], (4, 1), 0)
    items = sum(sum(received_counts(window, 24, 4, rank)) for rank in range(4)) * 2 * 3 * 10
    # the borders in forward, their gradients in backward
    assert sum(one.sent_bytes for one in ranks) == 2 * items * 8


def test_pools_keep_neither_shares_nor_borders() -> None:
    picture = double(2, 3, 8, 10)

    def work(group: ThreadGroup) -> list[list[tuple[int, ...]]]:
        cut = distribute(picture.clone().requires_grad_(), image_specs(picture.shape, grid_of(group, 2, 1)), STRICT)
        pools = (lambda: functional.max_pool2d(cut, 3, 2, 1), lambda: functional.avg_pool2d(cut, 3, 2, 1))
        return [[tuple(one.shape) for one in kept(pool)] for pool in pools]

    # which place of each window was the largest
    assert run_threads(2, work) == [[[(2, 3, 2, 5)], []]] * 2


@pytest.mark.parametrize("pool", [functional.avg_pool3d, functional.max_pool3d])
def test_a_share_of_less_than_a_window_that_ends_behind_the_picture(pool: Callable[..., Tensor]) -> None:
    picture = double(1, 2, 2, 2, 5)

    def function(one: Tensor) -> Tensor:
        return pool(one, (1, 1, 3), ceil_mode=True)

    check_shared(function, picture, [], (1, 2))


def test_a_pool_of_lower_precision_stays_so() -> None:
    picture = torch.randn(2, 3, 9, 8, dtype=torch.bfloat16)

    def work(group: ThreadGroup) -> Tensor:
        cut = distribute(picture, image_specs(picture.shape, grid_of(group, 2, 1)), STRICT)
        return to_local(functional.avg_pool2d(cut, 3, 2, 1, count_include_pad=False))

    wanted = functional.avg_pool2d(picture, 3, 2, 1, count_include_pad=False)
    found = torch.cat(run_threads(2, work), 2)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted)
