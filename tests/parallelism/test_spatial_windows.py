"""Windows over shared sides, against sets of places taken one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional

from galvatron_lite.parallelism.spatial.grids import (
    Loan,
    SideWindow,
    borrowed_by,
    borrows,
    crop,
    interior,
    lends,
    needed,
    output_extent,
    output_range,
    shard_range,
    stays,
    window_refusal,
)

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


def places(loans: tuple[Loan, ...]) -> dict[int, set[int]]:
    return {peer: set(range(*lent)) for peer, lent in loans}


SMALL = st.integers(1, 4)


@given(st.data(), SMALL, SMALL, SMALL, EXTENTS)
def test_extent_of_a_pool_is_torchs(data: st.DataObject, kernel: int, stride: int, dilation: int, extent: int) -> None:
    padding, ceil = data.draw(st.integers(0, kernel // 2)), data.draw(st.booleans())
    window = SideWindow(kernel, stride, padding, padding, dilation, ceil)
    assume(output_extent(window, extent) > 0)
    made = functional.max_pool1d(torch.zeros(1, 1, extent), kernel, stride, padding, dilation, ceil)
    assert made.shape[-1] == output_extent(window, extent)


@given(st.data(), SMALL, SMALL, SMALL, EXTENTS)
def test_extent_of_a_transposed_convolution_is_torchs(
    data: st.DataObject, kernel: int, stride: int, dilation: int, extent: int
) -> None:
    padding, extra = data.draw(st.integers(0, 3)), data.draw(st.integers(0, max(stride, dilation) - 1))
    window = SideWindow(kernel, stride, padding, padding - extra, dilation, transposed=True)
    assume(output_extent(window, extent) > 0)
    weight = torch.zeros(1, 1, kernel)
    made = functional.conv_transpose1d(torch.zeros(1, 1, extent), weight, None, stride, padding, extra, 1, dilation)
    assert made.shape[-1] == output_extent(window, extent)


@given(windows(), EXTENTS, DEGREES)
def test_ranks_borrow_just_what_their_outputs_depend_on(window: SideWindow, extent: int, degree: int) -> None:
    assume(min(extent, output_extent(window, extent)) >= degree)
    shares = [set(range(*shard_range(extent, degree, rank))) for rank in range(degree)]
    for rank in range(degree):
        outputs = range(*output_range(window, extent, degree, rank))
        start, stop = needed(window, extent, (outputs.start, outputs.stop))
        span = {place for place in range(start, stop) if 0 <= place < extent}
        used = set().union(*[read_by(window, extent, output) for output in outputs])
        assert used <= span
        if window.transposed:
            assert not used or (min(span), max(span)) == (min(used), max(used))
        else:
            assert (start, stop - 1) == (min(reads(window, outputs[0])), max(reads(window, outputs[-1])))
        found = places(borrows(window, extent, degree, rank))
        assert found == {peer: span & own for peer, own in enumerate(shares) if peer != rank and span & own}
        assert borrowed_by(window, extent, degree, rank) == (
            sum(len(found.get(peer, ())) for peer in range(rank)),
            sum(len(found.get(peer, ())) for peer in range(rank + 1, degree)),
        )


@given(windows(), EXTENTS, DEGREES)
def test_what_one_borrows_another_lends(window: SideWindow, extent: int, degree: int) -> None:
    assume(min(extent, output_extent(window, extent)) >= degree)
    sent = {(rank, peer, lent) for rank in range(degree) for peer, lent in lends(window, extent, degree, rank)}
    assert sent == {
        (peer, rank, lent) for rank in range(degree) for peer, lent in borrows(window, extent, degree, rank)
    }


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
        start, stop = needed(window, extent, output_range(window, extent, degree, rank))
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
    assert stays(window, extent, degree) == (made == wanted and not refused)


@given(windows(), EXTENTS, DEGREES)
def test_interior_needs_the_own_share_only(window: SideWindow, extent: int, degree: int) -> None:
    assume(not window.transposed and min(extent, output_extent(window, extent)) >= degree)
    for rank in range(degree):
        own = set(range(*shard_range(extent, degree, rank)))
        outputs = range(*output_range(window, extent, degree, rank))
        inner = [output for output in outputs if reads(window, output) <= own]
        assert list(range(*interior(window, extent, degree, rank))) == inner


@given(windows(), EXTENTS, DEGREES)
def test_a_transposed_window_on_the_part_is_the_part_of_the_whole(window: SideWindow, extent: int, degree: int) -> None:
    assume(window.transposed and min(extent, output_extent(window, extent)) >= degree)
    for rank in range(degree):
        outputs = output_range(window, extent, degree, rank)
        start, stop = needed(window, extent, outputs)
        if start == stop:
            continue
        before, after = crop(window, outputs, (start, stop))
        first = start * window.stride - window.before
        last = (stop - 1) * window.stride - window.before + window.reach
        assert (first + before, last - after) == outputs


@pytest.mark.parametrize(
    ("window", "counts"),
    [
        (SideWindow(3, 1, 1, 1), [(0, 1), (1, 1), (1, 1), (1, 0)]),
        (SideWindow(7, 2, 3, 3), [(0, 2), (3, 2), (3, 2), (3, 0)]),
        (SideWindow(2, 2), [(0, 0)] * 4),
        (SideWindow(2, 2, transposed=True), [(0, 0)] * 4),
    ],
)
def test_borders_of_well_known_layers(window: SideWindow, counts: list[tuple[int, int]]) -> None:
    assert [borrowed_by(window, 32, 4, rank) for rank in range(4)] == counts
