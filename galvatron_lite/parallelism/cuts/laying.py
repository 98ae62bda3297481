"""Lines whose ranks hold other items of a dim than one range by the rule of shares; and cutting and joining by them.

The item that a rank holds is up to its line alone. ``Mirrored``: an early and a late piece of a sequence each.
``Folded``: dims in front were merged into the cut one (samples and tokens, as language models do before a matmul or
their loss): the same pieces again in each. ``ItemRange``: a slice of a cut dim whose items stayed where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from galvatron_lite.parallelism.cuts.line import Arrival, Line, Parcel
from galvatron_lite.parallelism.shares import Range, mirrored, share

Pieces = tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class LaidLine:
    """A line with the ranks and messages of another one, and items of its own."""

    line: Line  # the other one

    @property
    def size(self) -> int:
        """Ranks."""
        return self.line.size

    @property
    def rank(self) -> int:
        """Place of this one."""
        return self.line.rank

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See ``TensorGroup``."""
        return self.line.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """See ``TensorGroup``."""
        return self.line.all_gather(tensor, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """See ``TensorGroup``."""
        return self.line.reduce_scatter(tensor, dim)

    def exchange(self, sent: Sequence[Parcel], wanted: Sequence[Parcel]) -> Arrival:
        """See ``Line``."""
        return self.line.exchange(sent, wanted)

    def pieces(self, extent: int, rank: int) -> Pieces:
        """What a rank holds of a dim of that extent, in order."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Mirrored(LaidLine):
    """Ranks that share the tokens of sequences; see ``shares.mirrored``."""

    def pieces(self, extent: int, rank: int) -> Pieces:
        """See ``LaidLine``."""
        return mirrored(extent, self.size, rank)


@dataclass(frozen=True, slots=True)
class Folded(LaidLine):
    """A cut dim merged with dims in front of it.

    Attributes:
        line: of the dim alone.
        repeats: items of the dims in front.
    """

    repeats: int

    def pieces(self, extent: int, rank: int) -> Pieces:
        """See ``LaidLine``."""
        period = extent // self.repeats
        held = pieces_of(period, self.line, rank)
        starts = [number * period for number in range(self.repeats)]
        return tuple((begin + start, begin + stop) for begin in starts for start, stop in held)


@dataclass(frozen=True, slots=True)
class ItemRange(LaidLine):
    """A range of the items of a cut dim.

    Attributes:
        line: of the whole dim.
        whole: its extent.
        start: the first item of the range.
    """

    whole: int
    start: int

    def pieces(self, extent: int, rank: int) -> Pieces:
        """See ``LaidLine``."""
        last = self.start + extent
        held = [(max(low, self.start), min(high, last)) for low, high in pieces_of(self.whole, self.line, rank)]
        return tuple((low - self.start, high - self.start) for low, high in held if low < high)


class Cutting(Protocol):
    """How a dim is cut: see ``tensor.Cut``."""

    @property
    def dim(self) -> int:
        """Which."""
        ...

    @property
    def extent(self) -> int:
        """Of the whole."""
        ...

    @property
    def line(self) -> Line:
        """The ranks."""
        ...


def pieces_of(extent: int, line: Line, rank: int) -> Pieces:
    """What a rank of a line holds of a dim, in order."""
    if isinstance(line, LaidLine):
        return line.pieces(extent, rank)
    start, length = share(extent, line.size, rank)
    return ((start, start + length),)


def length_of(pieces: Pieces) -> int:
    """Items in pieces."""
    return sum(stop - start for start, stop in pieces)


def taken(tensor: Tensor, dim: int, pieces: Pieces) -> Tensor:
    """Pieces of a whole tensor, one behind the other; a view where it is one."""
    if len(pieces) == 1:
        ((start, stop),) = pieces
        return tensor.narrow(dim, start, stop - start)
    if not pieces:
        return tensor.narrow(dim, 0, 0)
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in pieces], dim)


def own_part(tensor: Tensor, cut: Cutting, dim: int | None = None) -> Tensor:
    """This rank's items of a whole tensor; along another dim than the cut's, if given."""
    return taken(tensor, cut.dim if dim is None else dim, pieces_of(cut.extent, cut.line, cut.line.rank))


def in_order(by_rank: Tensor, cut: Cutting) -> Tensor:
    """The whole from the ranks' items, rank behind rank."""
    order = _order(cut.extent, cut.line)
    return by_rank if len(order) == 1 else torch.cat(_parts(by_rank, cut.dim, order), cut.dim)


def by_ranks(tensor: Tensor, cut: Cutting) -> Tensor:
    """The ranks' items of a whole, rank behind rank."""
    pieces = [piece for rank in range(cut.line.size) for piece in pieces_of(cut.extent, cut.line, rank)]
    return taken(tensor, cut.dim, _joined(pieces))


def is_even(cut: Cutting) -> bool:
    """Whether all ranks hold equally many items."""
    lengths = {length_of(pieces_of(cut.extent, cut.line, rank)) for rank in range(cut.line.size)}
    return len(lengths) == 1


def gathered(local: Tensor, cut: Cutting) -> Tensor:
    """The whole tensor from this rank's items and those of the others. No autograd."""
    line, dim = cut.line, cut.dim
    if is_even(cut):
        return in_order(line.all_gather(local, dim), cut)
    lengths = [length_of(pieces_of(cut.extent, line, rank)) for rank in range(line.size)]
    longest = max(lengths)
    padding = [0, 0] * (local.dim() - 1 - dim) + [0, longest - local.shape[dim]]
    padded = line.all_gather(torch.nn.functional.pad(local, padding), dim)
    parts = [padded.narrow(dim, rank * longest, length) for rank, length in enumerate(lengths)]
    return in_order(torch.cat(parts, dim), cut)


def scattered(tensor: Tensor, cut: Cutting) -> Tensor:
    """This rank's items of the sum of the ranks' whole tensors. No autograd."""
    if is_even(cut):
        return cut.line.reduce_scatter(by_ranks(tensor, cut).contiguous(), cut.dim)
    return own_part(cut.line.all_reduce(tensor), cut).contiguous()


def _parts(by_rank: Tensor, dim: int, order: Pieces) -> list[Tensor]:
    return [by_rank.narrow(dim, start, stop - start) for start, stop in order]


def _joined(pieces: Sequence[Range]) -> Pieces:
    """The same items in fewer pieces."""
    found: list[Range] = []
    for start, stop in pieces:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _order(extent: int, line: Line) -> Pieces:
    """Where the items of the whole lie, in their order, where the ranks' lie rank behind rank."""
    if not isinstance(line, LaidLine):
        return ((0, extent),)
    return _order_of(tuple(line.pieces(extent, rank) for rank in range(line.size)))


@lru_cache(maxsize=1024)
def _order_of(held: tuple[Pieces, ...]) -> Pieces:
    places: list[tuple[Range, int]] = []
    for piece in (one for pieces in held for one in pieces):
        places.append((piece, places[-1][1] + places[-1][0][1] - places[-1][0][0] if places else 0))
    return _joined([(at, at + stop - start) for (start, stop), at in sorted(places)])


def laid_home(
    before: Sequence[int], after: Sequence[int], dim: int, extent: int, line: Line
) -> tuple[int, Line] | None:
    """Where a dim that is cut along a ``LaidLine`` goes in another shape, and its line there; None: it is not kept.

    Items keep their order, so a period of the cut dim must end where a dim of the new shape ends; the items in front of
    it are dims of their own, or merged with it.
    """
    base, repeats = (line.line, line.repeats) if isinstance(line, Folded) else (line, 1)
    period, outer = extent // repeats, prod(before[:dim]) * repeats
    for place, length in enumerate(after):
        front = prod(after[:place])
        if length > 1 and front * length == outer * period and front and outer % front == 0:
            times = outer // front
            return (place, base) if times == 1 else (place, Folded(base, times))
    return None
