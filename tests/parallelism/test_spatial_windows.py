"""Windows over shared sides, against sets of places taken one by one; interpolation against torch's of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.parallelism.sharded.collectives import distribute, full_tensor
from galvatron_lite.parallelism.sharded.tensor import Call, Rules, ShardSpec, global_shape, to_local
from galvatron_lite.parallelism.spatial.grids import (
    PeerRange,
    SideWindow,
    input_range,
    output_extent,
    output_range,
    received_counts,
    received_ranges,
    runs_locally,
    shard_range,
    window_refusal,
)
from galvatron_lite.parallelism.spatial.resizing import HANDLERS
from tests.parallelism.sharded_compare import SHAPES, alone, assert_equal, rules, together
from tests.parallelism.thread_group import ThreadGroup, run_threads

EXTENTS = st.integers(1, 24)
DEGREES = st.integers(1, 5)


@st.composite
def windows(draw: st.DrawFn) -> SideWindow:
    kernel, stride = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    padding = st.integers(0, 4)
    transposed = draw(st.booleans())
    return SideWindow(
        kernel,
        stride,
        draw(padding),
        draw(padding),
        draw(st.integers(1, 3)),
        draw(st.booleans()) and not transposed,
        transposed,
    )


def reads(window: SideWindow, output: int) -> set[int]:
    """Places that an output of a window that is not transposed reads, with the holes between them."""
    first = output * window.stride - window.before
    return set(range(first, first + window.dilation * (window.kernel - 1) + 1))


def read_by(window: SideWindow, extent: int, output: int) -> set[int]:
    """Places of a picture that an output depends on, with the holes between them."""
    if not window.transposed:
        return {place for place in reads(window, output) if 0 <= place < extent}
    reach = window.dilation * (window.kernel - 1)
    return {i for i in range(extent) if 0 <= output + window.before - i * window.stride <= reach}


def places(loans: tuple[PeerRange, ...]) -> dict[int, set[int]]:
    return {peer: set(range(*lent)) for peer, lent in loans}


@given(windows(), EXTENTS, DEGREES)
def test_ranks_borrow_just_what_their_outputs_depend_on(window: SideWindow, extent: int, degree: int) -> None:
    assume(min(extent, output_extent(window, extent)) >= degree)
    shares = [set(range(*shard_range(extent, degree, rank))) for rank in range(degree)]
    for rank in range(degree):
        outputs = range(*output_range(window, extent, degree, rank))
        start, stop = input_range(window, extent, (outputs.start, outputs.stop))
        span = {place for place in range(start, stop) if 0 <= place < extent}
        used = set().union(*[read_by(window, extent, output) for output in outputs])
        assert used <= span
        if window.transposed:
            assert not used or (min(span), max(span)) == (min(used), max(used))
        else:
            assert (start, stop - 1) == (min(reads(window, outputs[0])), max(reads(window, outputs[-1])))
        found = places(received_ranges(window, extent, degree, rank))
        assert found == {peer: span & own for peer, own in enumerate(shares) if peer != rank and span & own}
        assert received_counts(window, extent, degree, rank) == (
            sum(len(found.get(peer, ())) for peer in range(rank)),
            sum(len(found.get(peer, ())) for peer in range(rank + 1, degree)),
        )


@given(windows(), EXTENTS, DEGREES)
def test_refused_where_a_rank_has_nothing_or_needs_more_than_the_next_ones(
    window: SideWindow, extent: int, degree: int
) -> None:
    outputs = output_extent(window, extent)
    if min(extent, outputs) < degree:
        assert "without a share" in window_refusal(window, extent, degree)
        return
    far = nothing = False
    for rank in range(degree):
        start, stop = input_range(window, extent, output_range(window, extent, degree, rank))
        near = {
            p
            for peer in (rank - 1, rank, rank + 1)
            if 0 <= peer < degree
            for p in range(*shard_range(extent, degree, peer))
        }
        wanted = {place for place in range(start, stop) if 0 <= place < extent}
        far, nothing = far or not wanted <= near, nothing or not wanted
    assert bool(window_refusal(window, extent, degree)) == (far or nothing)
    assert far or "beside it" not in window_refusal(window, extent, degree)
    assert nothing or "outside the picture" not in window_refusal(window, extent, degree)


@given(windows(), EXTENTS, DEGREES)
def test_a_window_stays_where_shares_alone_make_the_outputs(window: SideWindow, extent: int, degree: int) -> None:
    window = replace(window, before=0, after=0)
    assume(min(extent, output_extent(window, extent)) >= degree)
    made = []
    for rank in range(degree):
        start, stop = shard_range(extent, degree, rank)
        # what the window makes of the share alone, as the places that each output reads (or is fed by)
        count = output_extent(window, stop - start)
        made += [(rank, {start + place for place in read_by(window, stop - start, output)}) for output in range(count)]
    wanted = [
        (rank, read_by(window, extent, output))
        for rank in range(degree)
        for output in range(*output_range(window, extent, degree, rank))
    ]
    shares = [stop - start for start, stop in (shard_range(extent, degree, rank) for rank in range(degree))]
    refused = not window.transposed and min(shares) < min(window.reach, extent)  # torch takes no picture below a window
    assert runs_locally(window, extent, degree) == (made == wanted and not refused)


RULES = rules(HANDLERS)
MODES = {
    1: ["nearest", "nearest-exact", "linear", "area"],
    2: ["nearest", "nearest-exact", "bilinear", "bicubic", "area"],
    3: ["nearest", "nearest-exact", "trilinear", "area"],
}


@st.composite
def resamplings(draw: st.DrawFn) -> tuple[Tensor, dict[int, int], dict[str, Any]]:
    """A picture, by how many which dims are shared, and what is asked of interpolate."""
    sides = draw(st.integers(1, 3))
    shape = [draw(st.integers(4, 9 if sides < 3 else 6)) for _ in range(sides)]
    dims = draw(st.lists(st.sampled_from(range(2, 2 + sides)), min_size=1, max_size=2, unique=True))
    degrees = {dim: draw(st.integers(2, 4 if len(dims) == 1 else 2)) for dim in sorted(dims)}
    how: dict[str, Any] = {"mode": draw(st.sampled_from(MODES[sides]))}
    if "linear" in how["mode"] or how["mode"] == "bicubic":
        how["align_corners"] = draw(st.sampled_from([None, False, True]))
    if draw(st.booleans()):
        how["size"] = draw(st.one_of(st.integers(2, 15), st.tuples(*[st.integers(2, 15)] * sides)))
    else:
        factors = st.sampled_from([0.5, 0.7, 1.0, 1.3, 2.0, 3])
        how["scale_factor"] = draw(st.one_of(factors, st.tuples(*[factors] * sides)))
        how["recompute_scale_factor"] = draw(st.sampled_from([None, False, True]))
    torch.manual_seed(draw(st.integers(0, 9)))
    return torch.randn(2, 2, *shape, dtype=torch.float64), degrees, how


def check_resampled(function: Callable[[Tensor], Tensor], picture: Tensor, degrees: dict[int, int]) -> None:
    weight = torch.randn_like(function(picture))
    theirs = alone(lambda x, _: function(x), picture, {}, weight)
    for ours in together(lambda x, _: function(x), picture, {}, weight, degrees, RULES):
        assert_equal(ours, theirs)


@settings(max_examples=50, deadline=None)
@given(resamplings())
@pytest.mark.filterwarnings("ignore")
def test_every_mode_size_and_scale(drawn: tuple[Tensor, dict[int, int], dict[str, Any]]) -> None:
    picture, degrees, how = drawn
    check_resampled(lambda x: functional.interpolate(x, **how), picture, degrees)


@pytest.mark.filterwarnings("ignore")
def test_modules_and_old_names() -> None:
    picture = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    for function in (
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        nn.UpsamplingNearest2d(size=(7, 9)),
        lambda x: functional.upsample(x, scale_factor=2),
        lambda x: functional.upsample_bilinear(x, size=(4, 11)),
        lambda x: functional.interpolate(input=x, size=x.shape[2:]),
    ):
        check_resampled(function, picture, {2: 2, 3: 2})


def test_sides_of_single_precision_are_as_torchs_of_single_precision() -> None:
    """Which row is nearest hangs on rounding."""
    picture = torch.arange(2 * 103.0).view(1, 1, 103, 2)
    for size in (29, 77, 309, 611):
        for mode in ("nearest", "nearest-exact"):

            def work(group: ThreadGroup, size: int = size, mode: str = mode) -> Tensor:
                cut = distribute(picture.clone(), (ShardSpec(2, 103, group),), RULES)
                return full_tensor(functional.interpolate(cut, (size, 3), mode=mode))

            expected = functional.interpolate(picture, (size, 3), mode=mode)
            assert all(torch.equal(found, expected) for found in run_threads(3, work))


def test_more_ranks_than_rows() -> None:
    picture = torch.randn(1, 2, 2, 5, dtype=torch.float64)
    for size in ((7, 3), (2, 9), (1, 5)):
        for mode in ("nearest", "bilinear", "bicubic"):
            check_resampled(lambda x, s=size, m=mode: functional.interpolate(x, s, mode=m), picture, {2: 3})  # type: ignore[misc]


def test_ranks_send_only_the_rows_that_others_need() -> None:
    """Bilinear, twice the rows: one row to each neighbour in forward, and its gradient in backward."""
    picture = torch.randn(2, 3, 12, 5)

    def work(group: ThreadGroup) -> tuple[int, int]:
        leaf = picture.clone().requires_grad_()
        cut = distribute(leaf, (ShardSpec(2, 12, group),), RULES)
        result = functional.interpolate(cut, scale_factor=2, mode="bilinear")
        forward = group.sent_bytes
        to_local(result).sum().backward()
        assert set(group.calls) == {"exchange"}
        return forward, group.sent_bytes - forward

    row = 2 * 3 * 5 * 4
    assert run_threads(3, work) == [(row, row), (2 * row, 2 * row), (row, row)]


def test_nothing_is_kept_for_backward_along_cut_sides() -> None:
    picture = torch.randn(2, 3, 12, 5)

    def work(group: ThreadGroup) -> int:
        kept = []
        cut = distribute(picture.clone().requires_grad_(), (ShardSpec(2, 12, group),), RULES)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.nbytes), x)[1], lambda x: x):
            functional.interpolate(cut, scale_factor=2, mode="bicubic")
        return sum(kept)

    assert run_threads(2, work) == [0, 0]


def test_channels_may_be_cut() -> None:
    picture = torch.randn(2, 5, 6, 5, dtype=torch.float64)
    check_resampled(lambda x: functional.interpolate(x, scale_factor=1.5, mode="bilinear"), picture, {1: 2, 3: 2})


def test_sixteen_bits() -> None:
    picture = torch.randn(1, 2, 9, 5).bfloat16()
    expected = functional.interpolate(picture, size=(17, 5), mode="bicubic")

    def work(group: ThreadGroup) -> Tensor:
        cut = distribute(picture.clone(), (ShardSpec(2, 9, group),), RULES)
        return full_tensor(functional.interpolate(cut, size=(17, 5), mode="bicubic"))

    for found in run_threads(2, work):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_smoothed_pictures_are_gathered() -> None:
    def work(group: ThreadGroup) -> tuple[str, tuple[int, ...]]:
        names = []

        def other(call: Call) -> Tensor:
            names.append(call.name)
            return call.function(*map(full_tensor, call.args), **call.kwargs)

        cut = distribute(torch.randn(1, 1, 8, 8), (ShardSpec(2, 8, group),), Rules({**SHAPES, **HANDLERS}, other))
        found = functional.interpolate(cut, size=(3, 3), mode="bilinear", antialias=True)
        return names[0], global_shape(found)

    assert run_threads(2, work) == [("interpolate", (1, 1, 3, 3))] * 2
