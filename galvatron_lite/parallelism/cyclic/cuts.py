"""Stages of equal time: the contiguous split whose slowest stage is quickest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

import numpy as np

from galvatron_lite.arrays import FloatArray

_ROUNDING = 1e-12


def equal_cuts(seconds: Sequence[float], stages: int, joined: Collection[range] = ()) -> tuple[int, ...]:
    """Places where stages begin, and the number of layers: (0, ..., L); empty where there are too few layers.

    No split has a quicker slowest stage, and of those that have as quick a one none has a lesser sum of squares. By
    dynamic programming over (stages so far, layers so far): O(N L^2).

    Args:
        seconds: (L,) forward and backward of each layer.
        stages: N; each has at least one layer.
        joined: runs of layers that must be in one stage (they share parameters).
    """
    inside = {place for run in joined for place in range(run.start + 1, run.stop)}
    places = [place for place in range(len(seconds) + 1) if place not in inside]
    if not 1 <= stages <= len(places) - 1:
        return ()
    totals = np.array([0.0, *accumulate(seconds)])[places]
    spans = totals[None, :] - totals[:, None]
    spans[np.tril_indices(len(places))] = np.inf
    least = _best(spans, stages, np.maximum)[0][-1]
    even = np.where(spans <= least * (1 + _ROUNDING), spans**2, np.inf)
    return tuple(places[place] for place in _best(even, stages, np.add)[1])


def _best(spans: FloatArray, stages: int, joining: np.ufunc) -> tuple[FloatArray, list[int]]:
    """Least join of ``stages`` spans over the first places, for every number of places; and the cuts of all of them."""
    best, chosen = spans[0].copy(), []
    for _ in range(stages - 1):
        every = joining(best[:, None], spans)
        chosen.append(every.argmin(axis=0))
        best = every.min(axis=0)
    cuts = [len(best) - 1]
    for places in reversed(chosen):
        cuts.append(int(places[cuts[-1]]))
    return best, [0, *reversed(cuts)]


def unevenness(seconds: Sequence[float]) -> float:
    """By what share the slowest stage takes longer than the mean of them: what equal stages would save."""
    mean = sum(seconds) / len(seconds)
    return max(seconds) / mean - 1.0 if mean > 0 else 0.0
