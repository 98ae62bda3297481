"""Where cut dims go when a tensor takes another shape and its items keep their order.

Three things keep a dim cut. It is kept as it is. It is merged with whole dims behind it: a share of rows is a range of
the merged items. It is divided, with the rest behind it: ranges of whole groups of rows. In the last two the ranges may
not be those of the rule of shares; then a few items move between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from galvatron_lite.parallelism.cuts.laying import LaidLine, laid_home
from galvatron_lite.parallelism.cuts.moving import Range, recut, shares_of
from galvatron_lite.parallelism.cuts.tensor import Cut, Cuts

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Home:
    """A cut dim before and after."""

    before: Cut  # the cut
    after: Cut  # the cut of the new shape

    @property
    def moves(self) -> bool:
        """Whether a rank may have to hold other items than before."""
        return not isinstance(self.before.line, LaidLine)

    @property
    def held(self) -> tuple[Range, ...]:
        """The rows of the old dim that every rank must hold: whole groups, where the dim is divided."""
        line, extent, later = self.before.line, self.before.extent, self.after.extent
        return shares_of(extent, line) if later >= extent else _scaled(shares_of(later, line), extent // later)

    @property
    def new_ranges(self) -> tuple[Range, ...]:
        """The items of the new dim that these are."""
        line, extent, later = self.before.line, self.before.extent, self.after.extent
        return _scaled(shares_of(extent, line), later // extent) if later >= extent else shares_of(later, line)


def _scaled(rows: Sequence[Range], factor: int) -> tuple[Range, ...]:
    return tuple((start * factor, stop * factor) for start, stop in rows)


def home_of(before: Shape, after: Shape, cut: Cut) -> Home | None:
    """Where a cut dim goes; None where it does not stay cut."""
    if 0 in before or cut.extent == 1:
        return None
    if isinstance(cut.line, LaidLine):
        laid = laid_home(before, after, cut.dim, cut.extent, cut.line)
        return None if laid is None else Home(cut, Cut(laid[0], after[laid[0]], laid[1]))
    outer, fewest = prod(before[: cut.dim]), cut.line.size
    for dim, extent in enumerate(after):
        # what leaves ranks without a share is not worth it, unless they have none before
        fits = extent == cut.extent or (extent >= fewest and (extent % cut.extent == 0 or cut.extent % extent == 0))
        if fits and prod(after[:dim]) == outer:
            return Home(cut, Cut(dim, extent, cut.line))
    return None


def reshaped_share(local: Tensor, after: Shape, homes: Sequence[Home]) -> Tensor:
    """The share of the new shape from that of the old one: a view where nothing moves and memory allows it."""
    shape = list(after)
    for home in homes:
        shape[home.after.dim] = home.after.length
    changed = [home for home in homes if home.before.extent != home.after.extent and home.moves]
    for home in changed:
        cut, (start, stop) = home.before, home.new_ranges[home.before.line.rank]
        local = recut(local, cut.dim, shares_of(cut.extent, cut.line), home.held, cut.line)
        shape[home.after.dim] = stop - start
    local = local.reshape(shape)
    for home in changed:
        cut = home.after
        local = recut(local, cut.dim, home.new_ranges, shares_of(cut.extent, cut.line), cut.line)
    return local


def cuts_after(homes: Sequence[Home]) -> Cuts:
    """The cuts of the new shape."""
    return tuple(home.after for home in homes)
