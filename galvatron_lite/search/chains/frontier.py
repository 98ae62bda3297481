"""Exact search along a chain of layers: one strategy a layer, least time within the memory of one device.

The problem. Layers l = 1..L; choices s_l in S_l. Data, all whole numbers (picoseconds, bytes):

    t_l(s) in Z^C          time in C criteria (C = 1: a step; else passes of a micro-batch, then work once a step)
    x_l(s', s) >= 0        time of going from choice s' of layer l-1 to s, counted c_1..c_C times in the criteria
    r, q, w, v, g, d, u    memory figures of (l, s), see ``cost.memory``

    minimise (Pareto)  sum_l t_l(s_l) + c * sum_l x_l(s_{l-1}, s_l)                                            (1)
    subject to         sum_l r_l + sum_{j<l} q_j + g_{l-1} + max(w_l, v_l + d_{l+1}) <= M      for every l     (2)
                       sum_l u_l <= M                                                                          (3)
                       weights . (1) <= cap                                                                    (4)

The method. Suffixes s_l..s_L are labels (time, A, B, R, U, d), from the last layer to the first: what is worst in
memory is nearly always in the last layers, so it is settled first, and what is left is a sum. With a choice before it,

    A' = r + q + max(A, B + g)    the worst moment so far, raised by all that earlier layers add to it
    B' = R' + max(w, v + d)       the moment of the first layer so far, that waits for what is gathered before it
    R' = R + r,  U' = U + u       at rest; in the optimizer

All updates are monotone, so of two labels whose first choices have the same moves from what is before, the one that
is no better in any component never leads to a better plan and goes. A component that cannot decide (2) or (3) in any
label, because there is room whatever comes before or because another moment is certainly worse, is not compared. A
label also goes when its Lagrangian bound, sum(time + lambda * memory) - lambda * M with the best of some lambda,
exceeds a limit.

With one criterion the limit starts a little above the bound of the whole chain, and grows until a path is met; then no
path is quicker, for all with a bound below the limit were looked at. Runs of equal layers are joined to segments
(``segments``) whose useless combinations go by the same bounds. Nothing is rounded: the result is the exact Pareto set
of (1), one solution of each value.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from galvatron_lite.search.chains.bounds import (
    Bounds,
    LayerChoices,
    LinkedChain,
    ahead_of,
    best_bounds,
    bounds_at,
    line_of,
)
from galvatron_lite.search.chains.chain import Chain
from galvatron_lite.search.chains.labels import ChainExtension, Search
from galvatron_lite.search.chains.one_run import best_of_parts
from galvatron_lite.search.chains.segments import FIRST, HEAD, PARTS, REST, SINGLE, TAIL, TIME, Segment

_START, _GROWTH = 0.04, 1.7
"""How far above the bound the first limit is, as a share of an average layer's time; and how that grows."""
_CLOSER = 0.7
"""Once a path is met, the share of what is between bound and path that is looked through first."""
_DOUBT = 1.25
"""How many times the bound a limit may be without a path before it is asked whether any fits."""
_QUICK = 40
"""Labels a layer that a first path is looked for with."""


@dataclass(frozen=True, slots=True)
class Path:
    """One choice a layer."""

    time: tuple[int, ...]  # in each criterion
    choices: tuple[int, ...]  # place of the choice in each layer


@dataclass(frozen=True, slots=True)
class ChainFront:
    """The answer to a chain."""

    paths: tuple[Path, ...]  # ascending in time
    work: int = 0  # labels looked at
    dropped: float = np.inf  # a weighted time that no path left out beats; infinite where none was

    @property
    def complete(self) -> bool:
        """Whether the paths are the whole Pareto set; else some may be missing."""
        return self.dropped == np.inf


def pareto_paths(chain: Chain, cap: int | None = None, beam: int | None = None) -> ChainFront:
    """The Pareto set of a chain within memory, ascending in time; empty where nothing fits.

    Args:
        chain: the problem.
        cap: paths of more weighted time than this are of no interest.
        beam: keep only so many labels a layer, the most promising by their Lagrangian bound. Where that drops any,
            the front is not complete, and says what paths through those may have cost at the least.
    """
    if chain.runs == 1 and len(chain.weights) == 1:
        with suppress(OverflowError):
            best = best_of_parts(chain, np.inf if cap is None else cap)
            return ChainFront(() if best is None else (Path((best[0],), best[1]),), len(chain.layers))
    line = line_of(chain)
    bounds = best_bounds(line)
    limit = np.inf if cap is None else float(cap)
    if bounds.least > bounds.ceiling(limit).max() or not _may_fit(line):
        return ChainFront(())
    if len(chain.weights) > 1:
        return _front(line, bounds, limit, beam)
    front = _quickest(line, bounds, limit, beam)
    weight = int(chain.weights[0])
    return replace(front, paths=tuple(Path((path.time[0] // weight,), path.choices) for path in front.paths))


def _may_fit(line: LinkedChain) -> bool:
    """Whether the moment of the last layer may be within the room, at rest and from what is before it alone."""
    last = line.at(len(line.kind) - 1).segment.figures
    before = sum(line.at(place).extremes[0] for place in range(len(line.kind) - 1))
    return before + int((last[REST] + np.maximum(last[FIRST], last[SINGLE])).min()) <= line.room


def _searched(
    line: LinkedChain, bounds: Bounds, limit: float, beam: int | None
) -> tuple[Search, ChainExtension | None]:
    useful = bounds.useful(limit)
    if not all(len(own) for own in useful):
        return Search(line, bounds, ahead_of(line), limit, line.room, beam), None
    line = line.only(useful)
    search = Search(line, bounds, ahead_of(line), limit, line.room, beam)
    return search, search.run()


def _front(line: LinkedChain, bounds: Bounds, limit: float, beam: int | None) -> ChainFront:
    search, last = _searched(line, bounds, limit, beam)
    if last is None:
        return ChainFront((), search.work, search.dropped)
    paths = (Path(*search.path(row)) for row in range(len(last.choice)))
    return ChainFront(tuple(sorted(paths, key=lambda path: (path.time, path.choices))), search.work, search.dropped)


def _quickest(line: LinkedChain, bounds: Bounds, cap: float, beam: int | None) -> ChainFront:
    """The path of least time: limits grow until a path is met, then close in on the bound from both sides."""
    low, most = max(bounds.least * (1 - 1e-9) - 1, 0.0), min(cap, _longest(line))
    share = _START * max(low, most * 1e-6) / len(line.kind)
    narrow = _QUICK if beam is None else min(beam, _QUICK)
    doubt, work, missed, best, closer = _DOUBT * low + share, 0, np.inf, ChainFront(()), False
    while low <= most:
        limit = float(int(low + (most - low) * _CLOSER if closer else most if best.paths else min(most, low + share)))
        found = _passed(line, bounds, limit, beam if best.paths else narrow, beam)
        work += found.work
        if found.paths:
            best, most = found, _below(found.paths[0].time[0])
            if found.dropped <= most and narrow == beam:
                missed = min(missed, found.dropped)
                break
            low, closer = max(low, min(found.dropped, most + 1)), True
            continue
        low = max(limit + 1, float(np.nextafter(limit, np.inf)))
        missed, share, closer = min(missed, found.dropped), share * _GROWTH, False
        if found.dropped <= limit:
            # More labels than the beam allows at this limit, so at higher ones too: a path is all that is still wanted.
            beam = narrow
            if best.paths:
                break
        if not best.paths and low > doubt:
            if not _fits(line):
                return ChainFront((), work)
            doubt = np.inf
    return ChainFront(best.paths, work, missed if missed <= most else np.inf)


def _below(time: int) -> float:
    """The next time that is less, as a float: beyond 2**53 (seconds, in ``Problem.lightest``) one less is the same."""
    return min(float(time - 1), float(np.nextafter(float(time), 0.0)))


def _longest(line: LinkedChain) -> float:
    """No path takes more weighted time."""
    own = sum(float(line.at(place).segment.figures[TIME].max()) for place in range(len(line.kind)))
    return own + sum(float(move.max()) * float(line.by[0]) for move in line.moves[1:])


def _passed(line: LinkedChain, bounds: Bounds, limit: float, narrow: int | None, beam: int | None) -> ChainFront:
    """A path within the limit; looked for with a narrow beam first."""
    found = _front(line, bounds, limit, narrow)
    if found.paths or found.dropped > limit or narrow == beam:
        return found
    wider = _front(line, bounds, limit, beam)
    return replace(wider, work=found.work + wider.work)


def _fits(line: LinkedChain) -> bool:
    """Whether any path is within the room, whatever its time."""
    kinds = []
    for kind in line.kinds:
        figures = kind.segment.figures[:PARTS].copy()
        figures[[TIME, HEAD, TAIL]] = 0
        kinds.append(LayerChoices(Segment(1, figures, kind.segment.names, kind.segment.strategy)))
    still = np.zeros((1, 1), dtype=np.int64)
    timeless = replace(line, kinds=tuple(kinds), moves=(still,) * len(line.moves), by=np.zeros(1, dtype=np.int64))
    search = Search(timeless, bounds_at(timeless, np.ones(1)), ahead_of(timeless), 0.0, line.room, None)
    return search.run() is not None
