"""Windows that slide along a side of a picture which ranks share: what each rank needs for its outputs, and of whom.

Pure arithmetic on one side; no torch here. Inputs and outputs are shared by ``shares.share``; places are counted in the
whole picture. Output o of a window reads the places o*s - before + d*j for j in [0, k). A transposed window is the
adjoint: place i adds to the outputs i*s - before + d*j.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from galvatron_lite.parallelism.shares import share

Range = tuple[int, int]
"""Places [start, stop)."""

Loan = tuple[int, tuple[Range, ...]]
"""A rank, and what it lends or borrows: ranges that are disjoint and ascend."""


@dataclass(frozen=True, slots=True)
class SideWindow:
    """A window along one side, as ``torch.nn.functional`` describes convolutions, pools and pads."""

    kernel: int = 1  # places it reads
    stride: int = 1  # places from one output to the next
    before: int = 0  # places outside the picture that the first output begins with; less than zero: places left out
    after: int = 0  # the same behind the picture. Of a transposed window: padding less output padding
    dilation: int = 1  # from one place it reads to the next
    # a last output that begins in the picture, or before it, counts although it is not complete (pools)
    ceil: bool = False
    transposed: bool = False  # see the module
    mode: str = "constant"  # what lies outside the picture, of ``PAD_MODES``

    @property
    def reach(self) -> int:
        """Places from the first one it reads to the last."""
        return self.dilation * (self.kernel - 1) + 1


PAD_MODES = ("constant", "reflect", "replicate", "circular")
"""What lies outside a picture: a constant, its mirror image, its last place again, or its other end."""


@dataclass(frozen=True, slots=True)
class IndexRun:
    """Successive places of what a rank needs."""

    length: int
    start: int = 0  # the place in the picture of the first
    # to the next: 1, -1 (mirrored) or 0 (the same again); None where they lie outside the picture
    step: int | None = None


def covered(run: IndexRun) -> Range:
    """The places of the picture in a run, which lies inside it."""
    last = run.start + (run.length - 1) * (run.step or 0)
    return min(run.start, last), max(run.start, last) + 1


def output_extent(window: SideWindow, extent: int) -> int:
    """Outputs along a side of ``extent`` places (as torch counts them); 0 or less where there are none."""
    if window.transposed:
        return (extent - 1) * window.stride - window.before - window.after + window.reach
    free = extent + window.before + window.after - window.reach
    outputs = (free + (window.stride - 1 if window.ceil else 0)) // window.stride + 1
    return outputs - (window.ceil and (outputs - 1) * window.stride >= extent + window.before)


def own_range(extent: int, degree: int, rank: int) -> Range:
    """The places of a rank's share."""
    start, length = share(extent, degree, rank)
    return start, start + length


def output_range(window: SideWindow, extent: int, degree: int, rank: int) -> Range:
    """The outputs of a rank."""
    return own_range(output_extent(window, extent), degree, rank)


def needed(window: SideWindow, extent: int, outputs: Range) -> Range:
    """The places that outputs depend on: also those outside the picture, but of a transposed window, which has none.

    The result is not empty unless the window is transposed.
    """
    first, last = outputs[0], outputs[1] - 1
    if not window.transposed:
        return first * window.stride - window.before, last * window.stride - window.before + window.reach
    start = max(-((window.reach - 1 - window.before - first) // window.stride), 0)
    stop = min((last + window.before) // window.stride + 1, extent)
    return min(start, extent), max(stop, min(start, extent))


def crop(window: SideWindow, outputs: Range, inputs: Range) -> tuple[int, int]:
    """Of a transposed window that ran on ``inputs`` without padding: places to leave out before and after.

    Less than zero: outputs that get nothing.
    """
    first = inputs[0] * window.stride - window.before
    made = (inputs[1] - inputs[0] - 1) * window.stride + window.reach
    return outputs[0] - first, first + made - outputs[1]


def runs(window: SideWindow, extent: int, places: Range) -> tuple[IndexRun, ...]:
    """Places inside and outside a picture as runs of places of the picture, in order."""
    start, stop = places
    inside = max(min(stop, extent) - max(start, 0), 0)
    before, after = min(max(-start, 0), stop - start), min(max(stop - extent, 0), stop - start)
    outer_before = _outside(window.mode, extent, start, before)
    outer_after = _outside(window.mode, extent, stop - after, after)
    found = (outer_before, IndexRun(inside, max(start, 0), 1), outer_after)
    return tuple(run for run in found if run.length)


def _outside(mode: str, extent: int, place: int, length: int) -> IndexRun:
    """Places from ``place`` on that lie before, or behind, the picture."""
    last = extent - 1
    if mode == "reflect":
        return IndexRun(length, -place if place < 0 else 2 * last - place, -1)
    if mode == "replicate":
        return IndexRun(length, 0 if place < 0 else last, 0)
    if mode == "circular":
        return IndexRun(length, place % extent, 1)
    return IndexRun(length)


@lru_cache(maxsize=4096)
def layout(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[IndexRun, ...]:
    """What a rank needs for its outputs, in order."""
    return runs(window, extent, needed(window, extent, output_range(window, extent, degree, rank)))


@lru_cache(maxsize=4096)
def borrows(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[Loan, ...]:
    """What a rank needs of the others' shares for its outputs, each place once; by rank."""
    wanted = _wanted(window, extent, degree, rank)
    return tuple(_loans((peer, _within(wanted, own_range(extent, degree, peer))) for peer in _others(degree, rank)))


@lru_cache(maxsize=4096)
def lends(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[Loan, ...]:
    """What the others need of a rank's share for their outputs; by rank."""
    own = own_range(extent, degree, rank)
    return tuple(_loans((peer, _within(_wanted(window, extent, degree, peer), own)) for peer in _others(degree, rank)))


def borrowed(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[int, int]:
    """Places that a rank borrows from ranks below and above it; what it sends is what those borrow of it.

    In backward as many gradients go the other way.
    """
    loans = borrows(window, extent, degree, rank)
    below = sum(items(ranges) for peer, ranges in loans if peer < rank)
    return below, sum(items(ranges) for peer, ranges in loans if peer > rank)


@lru_cache(maxsize=4096)
def travels(window: SideWindow, extent: int, degree: int) -> bool:
    """Whether any rank borrows; the same on all of them."""
    return any(borrows(window, extent, degree, rank) for rank in range(degree))


@lru_cache(maxsize=4096)
def stays(window: SideWindow, extent: int, degree: int) -> bool:
    """Whether every rank's outputs are just those of the window on its own share."""
    if window.before or window.after:
        return False
    return all(_stays(window, extent, degree, rank) for rank in range(degree))


def _stays(window: SideWindow, extent: int, degree: int, rank: int) -> bool:
    own, outputs = own_range(extent, degree, rank), output_range(window, extent, degree, rank)
    start, stop = needed(window, extent, outputs)
    # the last window of a pool may end behind the picture
    if start != own[0] or min(stop, extent) > own[1] or outputs[0] >= outputs[1]:
        return False
    if own[1] - own[0] < min(window.reach, extent) and not window.transposed:
        # torch refuses pictures that are smaller than a window, of which the last one may be a part
        return False
    if window.transposed:
        return stop == own[1] and crop(window, outputs, own) == (0, 0)
    return output_extent(window, own[1] - own[0]) == outputs[1] - outputs[0]


def items(ranges: tuple[Range, ...]) -> int:
    """Places in disjoint ranges."""
    return sum(stop - start for start, stop in ranges)


@lru_cache(maxsize=4096)
def refusal(window: SideWindow, extent: int, degree: int) -> str:
    """Why ranks cannot share a side under a window, or nothing.

    They can where every rank has inputs and outputs, its outputs need some of the picture, and what they need lies with
    it and the ranks beside it (in a ring where the picture is one).
    """
    outputs = output_extent(window, extent)
    if min(extent, outputs) < degree:
        made = f"{extent} -> {outputs}"
        return f"an extent of {made} leaves a rank of {degree} without a share"
    for rank in range(degree):
        if not _wanted(window, extent, degree, rank):
            return f"the outputs of rank {rank} of {degree} lie outside the picture of {extent}"
        for peer, ranges in borrows(window, extent, degree, rank):
            if not _beside(window, degree, rank, peer):
                return (
                    f"rank {rank} of {degree} needs {items(ranges)} of rank {peer}'s items of an extent of {extent}:"
                    " more than the share of the rank beside it"
                )
    return ""


def interior(window: SideWindow, extent: int, degree: int, rank: int) -> Range:
    """A rank's outputs that need nothing but its own share, not even places outside the picture; may be empty.

    Args:
        window: not a transposed one.
        extent: of the picture.
        degree: ranks that share it.
        rank: whose outputs.
    """
    start, stop = own_range(extent, degree, rank)
    first, end = output_range(window, extent, degree, rank)
    low = min(max(-((-start - window.before) // window.stride), first), end)
    high = (stop - window.reach + window.before) // window.stride + 1
    return low, max(min(high, end), low)


def _wanted(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[Range, ...]:
    """The places of the picture that a rank needs: ranges that are disjoint and ascend."""
    merged: list[Range] = []
    for start, stop in sorted(covered(run) for run in layout(window, extent, degree, rank) if run.step is not None):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _within(ranges: tuple[Range, ...], bounds: Range) -> tuple[Range, ...]:
    both = ((max(start, bounds[0]), min(stop, bounds[1])) for start, stop in ranges)
    return tuple(one for one in both if one[0] < one[1])


def _others(degree: int, rank: int) -> Iterator[int]:
    return (peer for peer in range(degree) if peer != rank)


def _loans(loans: Iterator[Loan]) -> Iterator[Loan]:
    return (loan for loan in loans if loan[1])


def _beside(window: SideWindow, degree: int, rank: int, peer: int) -> bool:
    return abs(peer - rank) == 1 or (window.mode == "circular" and abs(peer - rank) == degree - 1)
