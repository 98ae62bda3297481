"""Windows that slide along a side of an image which ranks share: what each rank needs for its outputs, and from whom.

Pure arithmetic on one side. Inputs and outputs are shared by ``shares.share``; places are counted in the global image.
Output o of a window reads the places o*s - before + d*j for j in [0, k). A transposed window is the adjoint: place i
adds to the outputs i*s - before + d*j.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from galvatron_lite.parallelism.shares import Range, share

Loan = tuple[int, Range]
"""A rank, and the places that it lends or borrows."""


@dataclass(frozen=True, slots=True)
class SideWindow:
    """A window along one side, as ``torch.nn.functional`` describes convolutions and pools."""

    kernel: int = 1  # places it reads
    stride: int = 1  # places from one output to the next
    before: int = 0  # places outside the image that the first output begins with
    after: int = 0  # the same behind the image. Of a transposed window: padding less output padding
    dilation: int = 1  # from one place it reads to the next
    ceil: bool = False  # an incomplete last output that begins in the image, or before it, counts (pools)
    transposed: bool = False  # see the module

    @property
    def reach(self) -> int:
        """Places from the first one it reads to the last."""
        return self.dilation * (self.kernel - 1) + 1


def output_extent(window: SideWindow, extent: int) -> int:
    """Outputs along a side of ``extent`` places (as torch counts them); 0 or less where there are none."""
    if window.transposed:
        return (extent - 1) * window.stride - window.before - window.after + window.reach
    free = extent + window.before + window.after - window.reach
    outputs = (free + (window.stride - 1 if window.ceil else 0)) // window.stride + 1
    return outputs - (window.ceil and (outputs - 1) * window.stride >= extent + window.before)


def shard_range(extent: int, degree: int, rank: int) -> Range:
    """The places that a rank holds."""
    start, length = share(extent, degree, rank)
    return start, start + length


def output_range(window: SideWindow, extent: int, degree: int, rank: int) -> Range:
    """The outputs of a rank."""
    return shard_range(output_extent(window, extent), degree, rank)


def needed(window: SideWindow, extent: int, outputs: Range) -> Range:
    """The places that outputs depend on: also those outside the image, but of a transposed window, which has none.

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
    last = first + (inputs[1] - inputs[0] - 1) * window.stride + window.reach
    return outputs[0] - first, last - outputs[1]


@lru_cache(maxsize=4096)
def borrows(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[Loan, ...]:
    """The places of other ranks that a rank's outputs need; by rank."""
    wanted = needed(window, extent, output_range(window, extent, degree, rank))
    both = ((peer, _overlap(wanted, shard_range(extent, degree, peer))) for peer in range(degree) if peer != rank)
    return tuple((peer, places) for peer, places in both if places[0] < places[1])


@lru_cache(maxsize=4096)
def lends(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[Loan, ...]:
    """The places of a rank that the outputs of other ranks need; by rank."""
    others = ((peer, borrows(window, extent, degree, peer)) for peer in range(degree) if peer != rank)
    return tuple((peer, places) for peer, loans in others for lender, places in loans if lender == rank)


def borrowed(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[int, int]:
    """How many places a rank borrows from ranks below and above it; in backward as many gradients go back."""
    loans = borrows(window, extent, degree, rank)
    below = sum(stop - start for peer, (start, stop) in loans if peer < rank)
    return below, sum(stop - start for peer, (start, stop) in loans if peer > rank)


@lru_cache(maxsize=4096)
def travels(window: SideWindow, extent: int, degree: int) -> bool:
    """Whether any rank borrows."""
    return any(borrows(window, extent, degree, rank) for rank in range(degree))


@lru_cache(maxsize=4096)
def stays(window: SideWindow, extent: int, degree: int) -> bool:
    """Whether every rank's outputs are just those of the window on its own shard."""
    if window.before or window.after:
        return False
    return all(_stays(window, extent, degree, rank) for rank in range(degree))


def _stays(window: SideWindow, extent: int, degree: int, rank: int) -> bool:
    held, outputs = shard_range(extent, degree, rank), output_range(window, extent, degree, rank)
    start, stop = needed(window, extent, outputs)
    # the last window of a pool may end behind the image
    if start != held[0] or min(stop, extent) > held[1] or outputs[0] >= outputs[1]:
        return False
    if held[1] - held[0] < min(window.reach, extent) and not window.transposed:
        # torch refuses images that are smaller than a window, of which the last one may be a part
        return False
    if window.transposed:
        return stop == held[1] and crop(window, outputs, held) == (0, 0)
    return output_extent(window, held[1] - held[0]) == outputs[1] - outputs[0]


@lru_cache(maxsize=4096)
def refusal(window: SideWindow, extent: int, degree: int) -> str:
    """Why ranks cannot share a side under a window, or nothing.

    They can where every rank has inputs and outputs, its outputs need some of the image, and what they need lies with
    it and the ranks beside it.
    """
    outputs = output_extent(window, extent)
    if min(extent, outputs) < degree:
        return f"an extent of {extent} -> {outputs} leaves a rank of {degree} without a share"
    for rank in range(degree):
        start, stop = _overlap(needed(window, extent, output_range(window, extent, degree, rank)), (0, extent))
        if start >= stop:
            return f"the outputs of rank {rank} of {degree} lie outside the picture of {extent}"
        for peer, (start, stop) in borrows(window, extent, degree, rank):
            if abs(peer - rank) > 1:
                return (
                    f"rank {rank} of {degree} needs {stop - start} of rank {peer}'s items of an extent of {extent}:"
                    " more than the share of the rank beside it"
                )
    return ""


def interior(window: SideWindow, extent: int, degree: int, rank: int) -> Range:
    """A rank's outputs that need nothing but its own shard; may be empty. Nothing of a transposed window."""
    if window.transposed:
        return 0, 0
    start, stop = shard_range(extent, degree, rank)
    first, end = output_range(window, extent, degree, rank)
    low = min(max(-((-start - window.before) // window.stride), first), end)
    high = (stop - window.reach + window.before) // window.stride + 1
    return low, max(min(high, end), low)


def _overlap(one: Range, other: Range) -> Range:
    return max(one[0], other[0]), min(one[1], other[1])
