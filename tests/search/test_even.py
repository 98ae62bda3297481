"""Plans whose stages have equally many blocks."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from galvatron_lite.errors import GalvatronError
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.backends import GALVATRON
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.search.best_first import SolvedPlan, search
from galvatron_lite.search.planner import find_plan, request_of
from galvatron_lite.search.problem import Problem, even_cuts
from galvatron_lite.search.shapes import Session, with_edges, with_ties
from galvatron_lite.search.space import Fixed
from tests.factories import random_profile


def blocks_of(plan: Plan, graph: ModelGraph) -> list[int]:
    """Blocks of each stage."""
    blocks = [layer.role is Role.BLOCK for layer in graph.layers]
    ends = list(accumulate(sum(run.count for run in stage.runs) for stage in plan.stages))
    return [sum(blocks[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def by_hand(problem: Problem) -> float:
    """Picoseconds of the best even plan of two stages: every best way of each, in every combination."""
    cuts = even_cuts(problem.graph, 2)
    best = float("inf")
    for child in (child for edged in with_edges(problem) for child in with_ties(edged)):
        first, second = (child.pareto_plans(stage, range(cuts[stage], cuts[stage + 1]), 2**61)[0] for stage in (0, 1))
        for one in first:
            for other in second:
                slowest = [max(pair) for pair in zip(one.bottleneck, other.bottleneck, strict=True)]
                ramp = sum(
                    int(weight) * (a + b)
                    for weight, a, b in zip(child.form.ramp, one.bottleneck, other.bottleneck, strict=True)
                )
                rounds = sum(int(weight) * most for weight, most in zip(child.form.rounds, slowest, strict=True))
                best = min(best, ramp + rounds + max(one.step, other.step))
    return best


def searched(seed: int, fixed: Fixed, budget: int = 10**9) -> tuple[Session, SolvedPlan | None]:
    session = Session(random_profile(random.Random(seed), blocks=4 if seed % 4 else 3))
    request = request_of(session, 4, 8, budget, fixed, None, GALVATRON)
    return session, search(request, session.pricer)


@pytest.mark.parametrize("seed", range(6))
def test_the_best_even_plan_is_found(seed: int) -> None:
    fixed = Fixed(pipeline=2, microbatches=4, schedule=Schedule.ONE_F_ONE_B, even=True)
    session, found = searched(seed, fixed)
    graph = session.profile.graph
    cuts = even_cuts(graph, 2)
    assert (found is None) == (not cuts)
    if found is not None:
        assert found.partition.cuts == cuts
        assert found.partition.time == by_hand(found.problem)
        free = searched(seed, Fixed(pipeline=2, microbatches=4))[1]
        assert free is not None
        assert free.partition.time <= found.partition.time


def test_even_plans_are_certified_and_refused_without_room() -> None:
    profile = random_profile(random.Random(1), blocks=4)
    fixed = Fixed(pipeline=2, even=True)
    plan = find_plan(profile, devices=4, global_batch=8, budget=10**9, fixed=fixed, certify=True)
    assert len(set(blocks_of(plan, profile.graph))) == 1
    with pytest.raises(GalvatronError, match="smallest budget"):
        find_plan(profile, devices=4, global_batch=8, budget=10, fixed=fixed)


def test_only_better_plans_than_asked_for() -> None:
    fixed = Fixed(pipeline=1)
    session, found = searched(0, fixed)
    assert found is not None
    request = request_of(session, 4, 8, 10**9, fixed, None, GALVATRON)
    assert search(request, session.pricer, below=found.partition.time) is None
    again = search(request, session.pricer, below=found.partition.time + 1)
    assert again is not None
    assert again.partition == found.partition
