"""The boundary layout: how activations between layers are split over the ranks of a stage. No torch here."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple, Self

from galvatron_lite.parallelism.registry import dimensions
from galvatron_lite.parallelism.strategy import Strategy


class Layout(NamedTuple):
    """How many ways each dim is split, the innermost ranks last; the product is the number of ranks."""

    batch: int = 1  # samples
    tokens: int = 1  # tokens of a sample, in attention too (context parallelism)
    planes: int = 1  # planes, rows, columns: pixels of a sample
    rows: int = 1
    columns: int = 1
    sequence: int = 1  # tokens among ranks that share a layer's weights (sequence parallelism)
    channels: int = 1  # channels of pictures
    copies: int = 1  # ranks with the same activations

    @property
    def devices(self) -> int:
        """Ranks of the stage."""
        return prod(self)

    @property
    def replicas(self) -> int:
        """Ranks that have the same samples."""
        return prod(self[1:])

    @property
    def sides(self) -> tuple[int, int, int]:
        """How many ways planes, rows and columns of pictures are split."""
        return self.planes, self.rows, self.columns

    @property
    def splits_pixels(self) -> bool:
        """Whether ranks share pixels."""
        return prod(self.sides) > 1

    def replicated(self, *names: str) -> Self:
        """Replicate these dims instead of splitting them."""
        extra = prod(getattr(self, name) for name in names)
        return self._replace(**dict.fromkeys(names, 1), copies=self.copies * extra)

    def stride(self, name: str) -> int:
        """The difference of ranks with neighbouring shares of a dim."""
        return prod(self[self._fields.index(name) + 1 :])


@lru_cache(maxsize=2**16)
def layout_of(strategy: Strategy) -> Layout:
    """Return the layout of a layer's inputs and outputs under a strategy."""
    degrees = dict.fromkeys(Layout._fields, 1)
    for dimension in dimensions():
        for name, degree in dimension.layout(strategy).items():
            degrees[name] *= degree
    return Layout(**{**degrees, "copies": strategy.devices // prod(degrees.values())})


def strategy_with(layout: Layout) -> Strategy:
    """Return a strategy with a layout."""
    ranks = layout.copies * layout.sequence  # that share weights
    pictures = layout.splits_pixels or layout.channels > 1
    return Strategy(
        data=layout.batch,
        context=layout.tokens,
        depth=layout.planes,
        height=layout.rows,
        width=layout.columns,
        tensor=1 if pictures else ranks,
        sequence_parallel=layout.sequence > 1,
        filters=ranks if pictures else 1,
        channels=layout.channels,
    )
