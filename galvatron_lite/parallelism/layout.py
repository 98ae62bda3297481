"""How what goes between layers lies on the ranks of a stage (its boundary layout). No torch here."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple, Self

from galvatron_lite.parallelism.registry import dimensions
from galvatron_lite.parallelism.strategy import Strategy


class Layout(NamedTuple):
    """Ways that each dim is split, over ranks in the order of the fields, the last innermost; their product is the
    stage's ranks."""

    batch: int = 1  # samples
    tokens: int = 1  # tokens of a sample, attention included
    planes: int = 1  # planes, rows, columns: pixels of a sample
    rows: int = 1
    columns: int = 1
    sequence: int = 1  # tokens once more, by ranks that share the weights of a layer
    channels: int = 1  # channels of pictures
    copies: int = 1  # ranks that hold the same

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
        """Ways that planes, rows and columns of pictures are split."""
        return self.planes, self.rows, self.columns

    @property
    def splits_pixels(self) -> bool:
        """Whether ranks share pixels."""
        return prod(self.sides) > 1

    def replicated(self, *names: str) -> Self:
        """The same with copies where ranks have shares of these dims."""
        extra = prod(getattr(self, name) for name in names)
        return self._replace(**dict.fromkeys(names, 1), copies=self.copies * extra)

    def stride(self, name: str) -> int:
        """Ranks from one share of a dim to the next."""
        return prod(self[self._fields.index(name) + 1 :])


@lru_cache(maxsize=2**16)
def layout_of(strategy: Strategy) -> Layout:
    """The layout of what a layer takes and returns under a strategy."""
    ways = dict.fromkeys(Layout._fields, 1)
    for dimension in dimensions():
        for name, degree in dimension.layout(strategy).items():
            ways[name] *= degree
    return Layout(**{**ways, "copies": strategy.devices // prod(ways.values())})


def strategy_with(layout: Layout) -> Strategy:
    """A strategy that has a layout."""
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
