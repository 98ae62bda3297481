"""How an activation lies on the ranks of a stage: rectangles of rows (samples) and tokens. No torch here.

A layout splits the rows ``batch`` ways and the tokens ``sequence`` ways. Ranks are row-major over (batch, tensor), so
the rank at ``place`` takes row share ``place // (devices / batch)``; the ranks of one row share hold the same rows, and
either all of their tokens or one share each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.base import Strategy


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows ``top`` to ``bottom`` and tokens ``left`` to ``right`` of a micro-batch, ends excluded."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def items(self) -> int:
        """Places (row, token) inside."""
        return max(0, self.bottom - self.top) * max(0, self.right - self.left)

    def meet(self, other: Rectangle) -> Rectangle:
        """What both cover; without items where they do not meet."""
        return Rectangle(
            max(self.top, other.top), min(self.bottom, other.bottom),
            max(self.left, other.left), min(self.right, other.right),
        )  # fmt: skip

    def within(self, other: Rectangle) -> Rectangle:
        """The same places counted from the first row and token of ``other``."""
        return Rectangle(self.top - other.top, self.bottom - other.top, self.left - other.left, self.right - other.left)


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to lay an activation on a stage.

    Attributes:
        batch: ways the rows are split; divides ``devices``.
        sequence: ways the tokens are split: 1, or ``devices / batch``.
        devices: ranks of the stage.
    """

    batch: int
    sequence: int
    devices: int

    def __post_init__(self) -> None:
        if self.devices % self.batch or self.sequence not in (1, self.devices // self.batch):
            raise InputError("layout", self, "batch must divide devices, and sequence be 1 or devices / batch.")

    @property
    def whole_tokens(self) -> Layout:
        """The same rows with all tokens."""
        return Layout(self.batch, 1, self.devices)

    def rectangle(self, place: int, rows: int, tokens: int) -> Rectangle:
        """What the rank at ``place`` of the stage holds of a micro-batch of so many rows and tokens.

        Raises:
            InputError: rows or tokens cannot be shared evenly.
        """
        if rows % self.batch:
            raise InputError("samples", rows, f"A micro-batch must be divisible by {self.batch}.")
        if tokens % self.sequence:
            raise InputError("tokens", tokens, f"With sequence parallelism they must be divisible by {self.sequence}.")
        high, wide, group = rows // self.batch, tokens // self.sequence, self.devices // self.batch
        row, column = place // group, place % group if self.sequence > 1 else 0
        return Rectangle(row * high, (row + 1) * high, column * wide, (column + 1) * wide)


def layout_of(strategy: Strategy) -> Layout:
    """The layout of the activations at the borders of a block under a strategy."""
    sequence = strategy.tensor if strategy.sequence_parallel else 1
    return Layout(strategy.batch_degree, sequence, strategy.devices)


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank sends and receives to change the layout of one activation.

    Attributes:
        held: what the rank holds before.
        wanted: what it holds after.
        sends: what goes to each rank of the stage; without items where nothing does.
        receives: what comes from each rank.
        local: whether no rank of the stage needs anything from another.
    """

    held: Rectangle
    wanted: Rectangle
    sends: tuple[Rectangle, ...]
    receives: tuple[Rectangle, ...]
    local: bool


@lru_cache(maxsize=4096)
def route(source: Layout, target: Layout, rows: int, tokens: int, place: int) -> Route:
    """The way of the rank at ``place`` from one layout to another."""
    before = [source.rectangle(rank, rows, tokens) for rank in range(source.devices)]
    after = [target.rectangle(rank, rows, tokens) for rank in range(target.devices)]
    moved = [[_transfer(before, sender, rank, after[rank]) for sender in range(source.devices)]
             for rank in range(target.devices)]  # fmt: skip
    local = all(
        not piece.items or sender == rank for rank, pieces in enumerate(moved) for sender, piece in enumerate(pieces)
    )
    return Route(
        before[place], after[place], tuple(moved[rank][place] for rank in range(target.devices)),
        tuple(moved[place]), local,
    )  # fmt: skip


_NOTHING = Rectangle(0, 0, 0, 0)


def _transfer(before: list[Rectangle], sender: int, receiver: int, wanted: Rectangle) -> Rectangle:
    """What ``sender`` gives to ``receiver``. Of ranks that hold the same, the receiver itself or one by turns gives."""
    piece = before[sender].meet(wanted)
    holders = [rank for rank, held in enumerate(before) if held == before[sender]]
    chosen = receiver if receiver in holders else holders[receiver % len(holders)]
    return piece if piece.items and sender == chosen else _NOTHING
