"""Exact search along a chain of layers: one strategy a layer, least time within the memory of one device.

The problem. Layers l = 1..L; choices s_l in S_l. Data, all whole numbers (picoseconds, bytes):

    t_l(s) in Z^C          time in C criteria (C = 1: a step; else passes of a micro-batch, then work once a step)
    x_l(s', s) >= 0        time of going from choice s' of layer l-1 to s, counted c_1..c_C times in the criteria
    r, q, w, v, g, d, u    memory figures of (l, s), see ``cost.memory``

    minimise (Pareto)  sum_l t_l(s_l) + c * sum_l x_l(s_{l-1}, s_l)                                            (1)
    subject to         sum_l r_l + sum_{j<l} q_j + g_{l-1} + max(w_l, v_l + d_{l+1}) <= M      for every l     (2)
                       sum_l u_l <= M                                                                          (3)
                       weights . (1) <= cap                                                                    (4)

The method. Prefixes s_1..s_l are labels (time, X, V, Y, Z) with

    X' = max(X, V + d_l, Y + w_l + g_{l-1}) + r_l     the worst moment so far, raised by what later layers hold at rest
    V' = Y + v_l + g_{l-1} + r_l                      the latest layer's moment that waits for d_{l+1}
    Y' = Y + r_l + q_l                                where the moments of later layers start
    Z' = Z + u_l

All updates are monotone, so of two labels whose last choices have the same moves to what follows, the one that is no
better in any component (g_l is one more) never leads to a better plan and goes. A label also goes when no completion
meets (2)-(4): bounds are the least weighted time and the least memory of any completion (both by dynamic programming
from the end), and the Lagrangian min sum(time + lambda * memory) - lambda * M with the best lambda found. Components
that cannot decide (2) or (3), because there is room whatever follows or because a later moment is certainly worse, are
raised until that is no longer certain, so that they do not keep labels apart. Nothing is rounded: the result is the
exact Pareto set of (1), one solution of each value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.search.bounds import SLACK, Bounds, completion_bounds, useful_choices
from galvatron_lite.search.chain import Chain
from galvatron_lite.search.pareto import pareto_rows

IntArray = NDArray[np.int64]
_NEVER = -(2**62)
_CROWD = 8


@dataclass(frozen=True, slots=True)
class Path:
    """One choice a layer.

    Attributes:
        time: in each criterion.
        choices: place of the choice in each layer.
    """

    time: tuple[int, ...]
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Front:
    """The answer to a chain.

    Attributes:
        paths: ascending in time.
        work: labels looked at.
        dropped: a weighted time that no path left out beats; infinite where none was.
    """

    paths: tuple[Path, ...]
    work: int = 0
    dropped: float = np.inf

    @property
    def complete(self) -> bool:
        """Whether the paths are the whole Pareto set; else some may be missing."""
        return self.dropped == np.inf


@dataclass(slots=True, eq=False)
class _Labels:
    time: IntArray
    worst: IntArray
    waiting: IntArray
    start: IntArray
    updated: IntArray
    state: IntArray
    parent: IntArray

    def take(self, rows: IntArray) -> _Labels:
        """Some of the labels."""
        return _Labels(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def pareto_paths(chain: Chain, cap: int | None = None, beam: int | None = None) -> Front:
    """The Pareto set of a chain within memory, ascending in time; empty where nothing fits.

    Args:
        chain: the problem.
        cap: paths of more weighted time than this are of no interest.
        beam: keep only so many labels a layer, the most promising by their Lagrangian bound. Where that drops any,
            the front is not complete, and says what paths through those may have cost at the least.
    """
    useful = useful_choices(chain, cap)
    if useful is None:
        return Front(())
    chain = chain.only(useful)
    bounds = completion_bounds(chain, cap)
    if bounds is None:
        return Front(())
    labels, dropped = _thinned(chain, 0, _first(chain), bounds, beam)
    history, work = [labels], 0
    for place in range(1, len(chain.layers)):
        work += len(labels.state) * len(chain.layers[place].rest)
        labels, least = _thinned(chain, place, _extend(chain, place, labels), bounds, beam)
        dropped = min(dropped, least)
        history.append(labels)
        if not len(labels.state):
            return Front((), work, dropped)
    paths = (_trace(history, useful, int(row)) for row in pareto_rows(labels.time))
    return Front(tuple(sorted(paths, key=lambda path: (path.time, path.choices))), work, dropped)


def _narrowed(chain: Chain, place: int, labels: _Labels, bounds: Bounds, beam: int | None) -> tuple[_Labels, float]:
    """The most promising labels, and the least that a path through any other costs."""
    if beam is None or len(labels.state) <= beam:
        return labels, np.inf
    base = bounds.base(place, labels.state, labels.start, labels.worst, labels.waiting)
    promise = bounds.promise(place, labels.state, labels.time @ chain.weights, base)
    order = np.argsort(promise, kind="stable")
    return labels.take(np.sort(order[:beam])), float(promise[order[beam]]) * (1 - SLACK) - 1


def _first(chain: Chain) -> _Labels:
    layer = chain.layers[0]
    count = len(layer.rest)
    return _Labels(
        layer.time.copy(),
        layer.peak + layer.rest,
        layer.middle + layer.rest,
        layer.rest + layer.prefix,
        layer.updated.copy(),
        np.arange(count),
        np.full(count, -1),
    )


def _extend(chain: Chain, place: int, labels: _Labels) -> _Labels:
    """Every label with every choice of one more layer."""
    layer = chain.layers[place]
    count, before = len(layer.rest), len(labels.state)
    state, parent = np.repeat(np.arange(count), before), np.tile(np.arange(before), count)
    before_it = chain.layers[place - 1]
    moved = layer.move[before_it.group[labels.state][:, None], layer.group[None, :]].T.ravel()
    beside = before_it.prefetched[labels.state][parent]
    rest, start = layer.rest[state], labels.start[parent]
    middle = start + layer.middle[state] + beside
    worst = np.maximum(labels.worst[parent], labels.waiting[parent] + layer.pending[state])
    worst = np.maximum(worst, start + layer.peak[state] + beside)
    worst = np.maximum(worst, middle)
    return _Labels(
        labels.time[parent] + layer.time[state] + moved[:, None] * chain.moves,
        worst + rest,
        middle + rest,
        start + rest + layer.prefix[state],
        labels.updated[parent] + layer.updated[state],
        state,
        parent,
    )


def _thinned(chain: Chain, place: int, labels: _Labels, bounds: Bounds, beam: int | None) -> tuple[_Labels, float]:
    """Without labels that cannot be completed within the bounds or are no better than another one; and the least that
    a path through any that the beam drops costs. With a beam, dominance is only looked for among some times as many.
    """
    weighted = labels.time @ chain.weights
    base = bounds.base(place, labels.state, labels.start, labels.worst, labels.waiting)
    alive = bounds.may_complete(place, labels.state, weighted, base, labels.worst, labels.updated)
    labels = labels.take(np.flatnonzero(alive))
    if not len(labels.state):
        return labels, np.inf
    labels, first = _narrowed(chain, place, labels, bounds, None if beam is None else _CROWD * beam)
    labels, second = _narrowed(chain, place, _undominated(chain, place, labels, bounds), bounds, beam)
    return labels, min(first, second)


def _undominated(chain: Chain, place: int, labels: _Labels, bounds: Bounds) -> _Labels:
    """Without labels that are no better than another one."""
    start = labels.start
    raised = bounds.raised(place, labels.start, labels.worst, labels.waiting, labels.updated)
    labels.start, labels.worst, labels.waiting, labels.updated = raised
    # States that move alike to every choice of the next layer compete; what they leave gathered is one more figure.
    layer, follows = chain.layers[place], int(place + 1 < len(chain.layers))
    alike, beside = layer.group[labels.state] * follows, layer.prefetched[labels.state] * follows
    order = np.argsort(alike, kind="stable")
    edges = np.flatnonzero(np.diff(alike[order])) + 1
    # A figure that follows from ``start`` alone does not tell labels apart.
    certain = bounds.raised(place, start, *[np.full_like(start, _NEVER)] * 3)
    telling = [own for own, least in zip(raised[1:], certain[1:], strict=True) if (own != least).any()]
    keys = np.column_stack((labels.time, raised[0], *telling, beside))
    kept = [group[pareto_rows(keys[group])] for group in np.split(order, edges)]
    return labels.take(np.concatenate(kept))


def _trace(history: Sequence[_Labels], useful: Sequence[IntArray], row: int) -> Path:
    time = tuple(int(value) for value in history[-1].time[row])
    choices = []
    for labels, names in zip(reversed(history), reversed(useful), strict=True):
        choices.append(int(names[labels.state[row]]))
        row = int(labels.parent[row])
    return Path(time, tuple(reversed(choices)))
