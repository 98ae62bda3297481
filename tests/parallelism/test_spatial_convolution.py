"""Convolutions and pads of shared pictures: as on one device, borders counted, and what autograd keeps."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import groupby, product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.collectives import distribute, full_tensor, sum_over
from galvatron_lite.parallelism.sharded.tensor import (
    ShardedTensor,
    ShardSpec,
    ShardSpecs,
    from_local,
    image_specs,
    specs_of,
    to_local,
)
from galvatron_lite.parallelism.spatial import convolution
from galvatron_lite.parallelism.spatial.convolution import overlaps
from galvatron_lite.parallelism.spatial.grids import (
    SideWindow,
    output_extent,
    window_refusal,
)
from galvatron_lite.parallelism.spatial.halo import halo_sides, shards_in
from tests.parallelism.sharded_compare import (
    GRIDS,
    STRICT,
    assert_equal,
    check_shared,
    close,
    double,
    grid_of,
    kept,
    on_whole,
    shared,
)
from tests.parallelism.thread_group import ThreadGroup, grid_groups, run_threads


def fits(windows: list[SideWindow], extents: list[int], cut: list[int]) -> bool:
    return all(
        output_extent(window, extent) > 0
        and not ((degree > 1 or window.before != window.after) and window_refusal(window, extent, degree))
        for window, extent, degree in zip(windows, extents, cut, strict=True)
    )


@st.composite
def layers(draw: st.DrawFn, sides: int, transposed: bool) -> tuple[dict[str, Any], list[int], list[SideWindow]]:
    """Arguments of a convolution, its kernel, and its windows."""
    every = range(sides)
    kernel = [draw(st.integers(1, 4)) for _ in every]
    stride = [draw(st.integers(1, 3)) for _ in every]
    dilation = [draw(st.integers(1, 2)) for _ in every]
    padding = [draw(st.integers(0, 2)) for _ in every]
    steps = {"stride": tuple(stride), "dilation": tuple(dilation), "padding": tuple(padding)}
    if transposed:
        extra = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
        steps["output_padding"] = tuple(extra)
        parts = zip(kernel, stride, padding, extra, dilation, strict=True)
        return steps, kernel, [SideWindow(k, s, q, q - e, d, transposed=True) for k, s, q, e, d in parts]
    parts = zip(kernel, stride, padding, dilation, strict=True)
    return steps, kernel, [SideWindow(k, s, q, q, d) for k, s, q, d in parts]


def layer_of(name: str, steps: dict[str, Any], groups: int) -> Callable[..., Tensor]:
    function = getattr(functional, name)
    return lambda picture, weight, bias=None: function(picture, weight, bias, groups=groups, **steps)


def check(
    name: str,
    drawn: tuple[dict[str, Any], list[int], list[SideWindow]],
    extents: list[int],
    grid: tuple[int, int],
    seed: int,
) -> None:
    """A convolution of 2 groups with biases (or without, by the seed) on shared pictures against the whole picture."""
    steps, kernel, _ = drawn
    torch.manual_seed(seed)
    groups, bias = 1 + seed % 2, seed % 3 > 0
    channels = (4, 6 // groups) if "transpose" in name else (6, 4 // groups)
    parameters = [double(*channels, *kernel), *([double(6)] if bias else [])]
    layer, picture = layer_of(name, steps, groups), double(2, 4, *extents)
    check_shared(layer, picture, parameters, grid, seed)


SEEDS = st.integers(0, 1000)


@settings(max_examples=40, deadline=None)
@given(layers(2, False), st.integers(3, 14), st.integers(3, 14), st.sampled_from(GRIDS), SEEDS)
def test_convolutions_of_rows_and_columns(
    drawn: Any, height: int, width: int, grid: tuple[int, int], seed: int
) -> None:
    assume(fits(drawn[2], [height, width], list(grid)))
    check("conv2d", drawn, [height, width], grid, seed)


@settings(max_examples=40, deadline=None)
@given(layers(2, True), st.integers(2, 9), st.integers(2, 9), st.sampled_from(GRIDS), SEEDS)
def test_transposed_convolutions_of_rows_and_columns(
    drawn: Any, height: int, width: int, grid: tuple[int, int], seed: int
) -> None:
    assume(fits(drawn[2], [height, width], list(grid)))
    check("conv_transpose2d", drawn, [height, width], grid, seed)


@settings(max_examples=20, deadline=None)
@given(st.data(), st.booleans(), st.integers(4, 20), st.sampled_from([(1, 2), (1, 3), (1, 4)]), SEEDS)
def test_convolutions_of_one_side(
    data: st.DataObject, transposed: bool, extent: int, grid: tuple[int, int], seed: int
) -> None:
    drawn = data.draw(layers(1, transposed))
    assume(fits(drawn[2], [extent], [grid[1]]))
    check("conv_transpose1d" if transposed else "conv1d", drawn, [extent], grid, seed)


@settings(max_examples=15, deadline=None)
@given(st.data(), st.booleans(), st.integers(4, 8), st.sampled_from([(2, 1), (2, 2), (1, 3)]), SEEDS)
def test_convolutions_of_volumes(
    data: st.DataObject, transposed: bool, extent: int, grid: tuple[int, int], seed: int
) -> None:
    drawn = data.draw(layers(3, transposed))
    extents = [3, extent, extent + 1]
    assume(fits(drawn[2], extents, [1, *grid]))
    check("conv_transpose3d" if transposed else "conv3d", drawn, extents, grid, seed)


def test_volumes_may_be_cut_along_all_sides() -> None:
    picture, weight = double(1, 2, 5, 6, 7), double(3, 2, 3, 3, 3)
    wanted = functional.conv3d(picture, weight, padding=1)

    def work(group: ThreadGroup) -> Tensor:
        plane, rest = divmod(group.rank, 4)
        inner = ThreadGroup(4, rest, group.meeting.show(group.rank, type(group.meeting)(4))[plane * 4])
        planes = ThreadGroup(2, plane, group.meeting.show(group.rank, type(group.meeting)(2))[rest])
        cuts = image_specs(picture.shape, (planes, *grid_groups(inner, 2, 2)))
        return full_tensor(functional.conv3d(distribute(picture, cuts, STRICT), weight, padding=1))

    for found in run_threads(8, work):
        close(found, wanted)


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
def test_padding_by_name() -> None:
    for padding, kernel, grid in product(("same", "valid"), (3, 4), ((2, 1), (2, 2))):
        picture, weight = double(1, 2, 7, 8), double(3, 2, kernel, kernel)
        layer = layer_of("conv2d", {"padding": padding}, 1)
        for found in shared(layer, picture, [weight], grid, 0):
            assert_equal(found, on_whole(layer, picture, [weight], 0))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["constant", "reflect", "replicate", "circular"]),
    st.tuples(*[st.integers(-2, 4)] * 4),
    st.integers(5, 10),
    st.integers(5, 10),
    st.sampled_from(GRIDS),
)
def test_pads_and_crops(mode: str, amounts: tuple[int, ...], height: int, width: int, grid: tuple[int, int]) -> None:
    if mode != "constant":
        amounts = tuple(max(one, 0) for one in amounts)
    assume(height + sum(amounts[2:]) >= grid[0] and width + sum(amounts[:2]) >= grid[1])
    value = 1.5 if mode == "constant" else None

    def layer(picture: Tensor) -> Tensor:
        return functional.pad(picture, amounts, mode, value)

    picture = double(2, 3, height, width)
    check_shared(layer, picture, [], grid)


def big() -> tuple[Tensor, Tensor, Tensor]:
    """Large enough that outputs that need no borders are computed on their own."""
    return torch.randn(1, 96, 64, 64), torch.randn(96, 96, 3, 3), torch.randn(96)


ONE_SIDE = ["send", "outputs", "wait", "outputs", "send", "weight", "wait"]
TWO_SIDES = ["send", "wait", "send", "outputs", "wait", "outputs", "send", "weight", "wait", "send", "wait"]


@pytest.mark.parametrize(("grid", "steps"), [((2, 1), ONE_SIDE), ((1, 2), ONE_SIDE), ((2, 2), TWO_SIDES)])
def test_outputs_and_weights_are_computed_while_borders_travel(
    grid: tuple[int, int], steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "OVERLAP_WORK", 2**10)
    monkeypatch.setattr(convolution, "OVERLAP_DEPTH", 4)
    picture, parameters = double(2, 4, 48, 52), [double(6, 4, 3, 3), double(6)]
    layers = [layer_of("conv2d", {"padding": 1, "stride": stride}, 1) for stride in (1, 2)]
    results = [on_whole(layer, picture, parameters, 3) for layer in layers]
    order: dict[int, list[str]] = defaultdict(list)

    def noting(what: str, function: Callable[..., Any], result: Any = None) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            order[threading.get_ident()].append(what)
            made = function(*args, **kwargs)
            return result or made

        return noted

    class Slow:
        wait = staticmethod(noting("wait", lambda: None))

    monkeypatch.setattr(functional, "conv2d", noting("outputs", torch.conv2d))
    gradients = convolution._gradients
    weights = noting("weight", gradients)
    monkeypatch.setattr(
        convolution, "_gradients", lambda *args: (weights if args[-1] is convolution._OF_WEIGHT else gradients)(*args)
    )
    monkeypatch.setattr(ThreadGroup, "exchange", noting("send", ThreadGroup.exchange, Slow()))
    for layer, wanted in zip(layers, results, strict=True):
        for found in shared(layer, picture, parameters, grid, 3):
            assert_equal(found, wanted)
    for calls in order.values():
        # of forward and backward of the first layer that the thread runs
        assert [what for what, _ in groupby(calls)][: len(steps)] == steps


def test_large_pictures_are_split_and_small_or_shallow_ones_are_not() -> None:
    picture, weight, _ = big()

    def plan(extent: int, kernel: Tensor, group: ThreadGroup) -> bool:
        cuts = image_specs((1, 96, extent, extent), (None, group, None))
        sides = halo_sides((extent, extent), (SideWindow(3, 1, 1, 1),) * 2, shards_in(cuts), "conv2d")
        return overlaps(sides, picture.new_empty(1, 96, extent // 2, extent), kernel)

    def work(group: ThreadGroup) -> tuple[bool, ...]:
        shallow = torch.randn(96, 1, 3, 3)
        return plan(256, weight, group), plan(16, weight, group), plan(6, weight, group), plan(2048, shallow, group)

    assert run_threads(2, work) == [(True, False, False, False)] * 2


@pytest.mark.parametrize(
    ("layer", "borrowed"),
    [
        (layer_of("conv2d", {"padding": 2}, 1), 2 * 3 * 2 * 10),
        (layer_of("conv2d", {"stride": 2, "padding": 2}, 1), 2 * 3 * 1 * 10),
        (layer_of("conv_transpose2d", {"stride": 2, "padding": 2}, 1), 2 * 3 * 1 * 10),
    ],
)
def test_share_and_borders_are_kept_and_no_picture_made_of_them(layer: Callable[..., Tensor], borrowed: int) -> None:
    picture, weight = double(2, 3, 8, 10), double(3, 3, 5, 5)

    def work(group: ThreadGroup) -> list[int]:
        cut = distribute(picture, image_specs(picture.shape, grid_of(group, 2, 1)), STRICT)
        leaf = weight.clone().requires_grad_()
        return [one.numel() for one in kept(lambda: layer(cut, leaf)) if one.shape != weight.shape]

    first, last = run_threads(2, work)
    assert first[0] == last[0] == 2 * 3 * 4 * 10
    assert first[1:] == [borrowed]


def test_what_is_not_asked_for_is_neither_kept_nor_computed() -> None:
    picture, weight = double(2, 3, 8, 10), double(3, 3, 5, 5)

    def work(group: ThreadGroup) -> tuple[int, int, int]:
        cuts = image_specs(picture.shape, grid_of(group, 2, 1))
        line = cuts[0].group
        assert isinstance(line, ThreadGroup)
        frozen = distribute(picture.clone().requires_grad_(), cuts, STRICT)
        # a frozen weight: only the weight
        sizes = [one.numel() for one in kept(lambda: functional.conv2d(frozen, weight, padding=2))]
        image, leaf = distribute(picture, cuts, STRICT), weight.clone().requires_grad_()
        output = to_local(functional.conv2d(image, leaf, padding=2))
        before = line.calls["exchange"]
        output.sum().backward()
        assert leaf.grad is not None
        return sum(sizes), weight.numel(), line.calls["exchange"] - before

    for size, of_weight, calls in run_threads(2, work):
        assert size == of_weight
        assert calls == 0


def test_autocast_runs_and_keeps_the_lower_dtype() -> None:
    picture, weight, bias = torch.randn(2, 3, 8, 10), torch.randn(4, 3, 3, 3), torch.randn(4)

    def run(given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.conv2d(given, leaf, bias, padding=1)

    leaf = weight.clone().requires_grad_()
    wanted = run(picture)
    wanted.float().sum().backward()
    gradient = leaf.grad

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor, set[torch.dtype]]:
        mine = weight.clone().requires_grad_()
        cut = distribute(picture, image_specs(picture.shape, grid_of(group, 2, 1)), STRICT)
        with torch.autocast("cpu", torch.bfloat16):
            found: list[Tensor] = []
            dtypes = {one.dtype for one in kept(lambda: found.append(functional.conv2d(cut, mine, bias, padding=1)))}
        to_local(found[0]).float().sum().backward()
        return full_tensor(found[0]), sum_over(mine.grad, [group]), dtypes

    for found, mine, dtypes in run_threads(2, work):
        assert found.dtype == torch.bfloat16
        assert dtypes == {torch.bfloat16}
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(mine, gradient, rtol=2e-2, atol=5e-2)


def test_channels_last_stays() -> None:
    picture, weight = double(2, 4, 8, 10), double(4, 4, 3, 3)
    last = torch.channels_last

    def work(group: ThreadGroup) -> tuple[bool, bool]:
        cut = distribute(picture, image_specs(picture.shape, grid_of(group, 1, 2)), STRICT)
        share = to_local(cut).detach().contiguous(memory_format=last).requires_grad_()
        halved = from_local(share.view_as(share), specs_of(cut), STRICT)
        output = to_local(functional.conv2d(halved, weight.contiguous(memory_format=last), padding=1))
        output.backward(torch.ones_like(output))
        return output.is_contiguous(memory_format=last), share.grad.is_contiguous(memory_format=last)

    assert run_threads(2, work) == [(True, True)] * 2


def test_no_second_derivatives() -> None:
    def work(group: ThreadGroup) -> None:
        weight = double(2, 2, 3, 3).requires_grad_()
        cut = distribute(double(1, 2, 6, 6).requires_grad_(), image_specs((1, 2, 6, 6), grid_of(group, 2, 1)), STRICT)
        output = to_local(functional.conv2d(cut, weight)).square().sum()
        (gradient,) = torch.autograd.grad(output, weight, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    run_threads(2, work)


@pytest.mark.parametrize(
    ("shape", "kernel", "degree", "said"),
    [
        ((1, 2, 3, 8), 1, 4, "an extent of 3 -> 3 leaves a rank of 4 without a share"),
        ((1, 2, 4, 8), 3, 4, "an extent of 4 -> 2 leaves a rank of 4 without a share"),
        ((1, 2, 9, 8), 7, 4, "more than the share of the rank beside it"),
        ((2, 8, 8), 3, 2, "dim of samples"),
    ],
)
def test_what_cannot_be_shared_is_refused(shape: tuple[int, ...], kernel: int, degree: int, said: str) -> None:
    def work(group: ThreadGroup) -> None:
        cut = distribute(torch.zeros(shape), [ShardSpec(len(shape) - 2, shape[-2], group)], STRICT)
        with pytest.raises(InputError, match=said):
            functional.conv2d(cut, torch.zeros(2, 2, kernel, kernel), padding=(kernel // 2 if kernel > 3 else 0, 0))

    run_threads(degree, work)


def shares_of(layer: Callable[..., Tensor], cuts: ShardSpecs, share: Tensor, *parameters: Tensor) -> Tensor:
    """A layer between plain shares."""
    return to_local(layer(from_local(share.view_as(share), cuts, STRICT), *parameters))


def test_recomputation_ends_at_the_same_layer_on_all_ranks() -> None:
    """It ends once all that is kept has been made; a rank that went on would wait for borders."""
    picture, weight = double(2, 3, 12, 8), double(3, 3, 3, 3)

    def layer(given: Tensor, kernel: Tensor) -> Tensor:
        made = functional.conv2d(given, kernel, padding=1)
        return functional.avg_pool2d(made, (3, 1), 1, (1, 0), count_include_pad=False)

    def again(given: Tensor, kernel: Tensor) -> Tensor:
        # at its bounds pictures are plain, as the runtime has them
        if not isinstance(given, ShardedTensor):
            return layer(given, kernel)
        cuts = specs_of(given)
        run = partial(shares_of, layer, cuts)
        made: Tensor = checkpoint(run, to_local(given), kernel, use_reentrant=False)
        return from_local(made.view_as(made), cuts, STRICT)

    wanted = on_whole(layer, picture, [weight], 0)
    for found in shared(again, picture, [weight], (3, 1), 0):
        assert_equal(found, wanted)
