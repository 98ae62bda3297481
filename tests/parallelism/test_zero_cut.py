"""Along which dim ranks share a parameter."""

from __future__ import annotations

import pytest

from galvatron_lite.parallelism.zero.cut import cut_dim


@pytest.mark.parametrize(
    ("shape", "ranks", "stage", "dim"),
    [
        ((4096, 11008), 64, 3, 0),
        ((50257, 768), 8, 3, 0),  # a row more or less
        ((8, 14336, 4096), 32, 3, 1),
        ((8, 14336, 4096), 32, 1, 0),  # would not lie together
        ((1, 14336, 4096), 4, 1, 1),
        ((1, 3, 4096), 4, 3, 2),
        ((1, 3, 5), 4, 3, 0),
        ((2,), 4, 3, 0),
        ((), 4, 3, 0),
    ],
)
def test_few_rows_are_cut_along_another_dim(shape: tuple[int, ...], ranks: int, stage: int, dim: int) -> None:
    assert cut_dim(shape, ranks, stage) == dim
