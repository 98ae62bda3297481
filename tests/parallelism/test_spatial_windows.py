"""Windows over shared sides, against sets of places taken one by one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from galvatron_lite.parallelism.spatial.grids import (
    Loan,
    SideWindow,
    borrowed_by,
    borrows,
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
