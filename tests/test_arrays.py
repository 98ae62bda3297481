"""The same formula for one figure and for an array of them."""

from __future__ import annotations

import numpy as np
import pytest

from galvatron_lite.arrays import each, is_option, largest, least, never, opposite, up, where
from galvatron_lite.model.graph import Recompute

FIGURES = [0.0, 0.25, 1.0, 1.75, 3.0]


@pytest.mark.parametrize("function", [largest, least])
def test_extremes(function) -> None:
    whole = function(np.array(FIGURES), 1.0)
    assert list(whole) == [function(figure, 1.0) for figure in FIGURES]


def test_rounding_and_choices() -> None:
    assert list(up(np.array(FIGURES))) == [up(figure) for figure in FIGURES] == [0, 1, 1, 2, 3]
    assert up(np.array(FIGURES)).dtype == np.int64
    mask = np.array(FIGURES) > 1
    assert list(where(mask, np.array(FIGURES), -1.0)) == [where(f > 1, f, -1.0) for f in FIGURES]


def test_masks() -> None:
    mask = np.array([False, True])
    assert (never(mask), never(mask[:1]), never(False), never(True)) == (False, True, True, False)
    assert list(opposite(mask)) == [opposite(bool(one)) for one in mask] == [True, False]


def test_a_function_of_one_and_of_many_gives_the_same() -> None:
    figures = np.array([4, 1, 4, 7])
    assert list(each(lambda figure: figure**0.5, figures)) == [
        each(lambda figure: figure**0.5, int(one)) for one in figures
    ]


def test_options_of_an_enum_are_their_places() -> None:
    codes = np.arange(len(Recompute))
    for option in Recompute:
        assert list(is_option(codes, option)) == [is_option(choice, option) for choice in Recompute]
