"""What a strategy of a tied layer costs a plan at the least, for all strategies at once.

The Lagrangian bounds of a stage's chain (``bounds``) hold for paths through each single choice of a layer. In a cut
with the least bound, that gives for every strategy of a tied layer the least time of the stage that holds it. A plan
with other layers in that stage is bounded by the cuts without it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.search.bounds.alike import Place
from galvatron_lite.search.bounds.refine import Refined
from galvatron_lite.search.chains.bounds import best_bounds, line_of, priced
from galvatron_lite.search.problem import Problem

_SLACK = 1e-9
Scores = dict[int, tuple[float, dict[Strategy, float]]]
"""By place of a tied layer: a bound on plans with other layers in its stage, and by strategy one on all others."""


def scores_of(problem: Problem, bounds: Refined, tied: tuple[int, ...]) -> Scores:
    """What is known of each tied layer's strategies, with nothing settled for tied layers; empty where nothing is."""
    if not np.isfinite(bounds.bound):
        return {}
    cuts = bounds.cuts()
    scores: Scores = {}
    for stage, ends in enumerate(pairwise(cuts)):
        own = (stage, *ends)
        places = [place for place in tied if place in range(*ends)]
        # Only the first or the last stage: of others, other stages may hold the layer too.
        if stage in (0, len(cuts) - 2) and places:
            other = bounds.with_theta([own], np.inf).bound
            before = float(bounds.pre[stage][ends[0]] + bounds.post[stage][ends[1]])
            for place in places:
                least = _through(problem, own, place)
                scores[place] = other, {name: (value + before) * (1 - _SLACK) for name, value in least.items()}
    return scores


def score(scores: Scores, tied: tuple[tuple[int, Strategy], ...]) -> float:
    """A time that no plan with these strategies for tied layers beats."""
    known = [(scores[place][0], scores[place][1].get(own, 0.0)) for place, own in tied if place in scores]
    others = min((other for other, _ in known), default=np.inf)
    return min(others, max((own for _, own in known), default=0.0))


def _through(problem: Problem, start: Place, place: int) -> dict[Strategy, float]:
    """Picoseconds that a stage alone takes at the least with each strategy of one of its layers."""
    stage, inside = start[0], range(*start[1:])
    built = problem.chain(stage, inside, scalar=True)
    if built is None:
        return {}
    line, table, at = line_of(built[0]), built[1][place - inside.start], place - inside.start
    bounds, kind = best_bounds(line), line.at(at)
    values = bounds.before[at][:, kind.group]
    if at in bounds.last:
        values = values + bounds.last[at]
    else:
        values = values + priced(kind, bounds.prices) + bounds.behind[at][:, kind.group]
    least = (values - bounds.prices[:, None] * line.room).max(axis=0) * (1 - _SLACK) - 1
    fixed = problem.shape.microbatches * sum(problem.fixed_costs(stage, inside)[:2])
    names = range(len(least)) if kind.segment.names is None else kind.segment.names
    return {table.strategies[int(name)]: float(value) + fixed for name, value in zip(names, least, strict=True)}
