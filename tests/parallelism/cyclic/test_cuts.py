"""Stages of equal time against every contiguous split."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.parallelism.cyclic.cuts import equal_cuts, unevenness

SECONDS = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9)


def every_split(layers: int, stages: int, joined: list[range]) -> list[tuple[int, ...]]:
    inner = [place for place in range(1, layers) if not any(run.start < place < run.stop for run in joined)]
    return [(0, *chosen, layers) for chosen in combinations(inner, stages - 1)]


def stage_seconds(seconds: list[float], cuts: tuple[int, ...]) -> list[float]:
    return [sum(seconds[start:stop]) for start, stop in pairwise(cuts)]


@given(SECONDS, st.integers(1, 9), st.integers(0, 8), st.integers(0, 4))
def test_no_split_is_better(seconds: list[float], stages: int, first: int, length: int) -> None:
    joined = [range(min(first, len(seconds)), min(first + length, len(seconds)))]
    found = equal_cuts(seconds, stages, joined)
    splits = every_split(len(seconds), stages, joined)
    if not splits:
        assert found == ()
        return
    assert found in splits
    figures = [
        (max(own), sum(one**2 for one in own)) for own in (stage_seconds(seconds, cuts) for cuts in splits)
    ]  # fmt: skip
    own = stage_seconds(seconds, found)
    assert (max(own), sum(one**2 for one in own)) == pytest.approx(min(figures))


def test_equal_layers_are_shared_out_evenly() -> None:
    assert equal_cuts([1.0] * 12, 4) == (0, 3, 6, 9, 12)
    assert unevenness([3.0, 3.0]) == 0.0
    assert unevenness([2.0, 4.0]) == pytest.approx(1 / 3)
    assert equal_cuts([1.0, 1.0], 3) == ()
