"""The ranks that share the pixels of a picture, as a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galvatron_lite.parallelism.cuts.line import Line
from galvatron_lite.parallelism.cuts.tensor import Cut, Cuts

PIXELS = 2
"""Dim of a picture (samples, channels, ...) where its pixels begin."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Lines of ranks along the sides of a picture."""

    lines: tuple[Line | None, Line | None, Line | None]  # along planes, rows and columns; None where a side is not cut
    everyone: Line  # all ranks of the grid, planes outermost

    def cuts(self, shape: Sequence[int]) -> Cuts:
        """How a picture of that whole shape is cut: (samples, channels, [[planes,] rows,] columns)."""
        sides = len(shape) - PIXELS
        lines = self.lines[len(self.lines) - sides :]
        return tuple(
            Cut(dim, extent, line)
            for dim, (extent, line) in enumerate(zip(shape[PIXELS:], lines, strict=True), PIXELS)
            if line is not None
        )
