"""The integer programme and the frontier agree on mid-size models."""

from __future__ import annotations

import random

import pytest

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.best_first import search
from galvatron_lite.search.ilp import certify
from galvatron_lite.search.pulp_adapter import Programme, Verdict, solve
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed, Space
from tests.factories import random_profile


@pytest.mark.parametrize("seed", range(6))
def test_certificate_agrees(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_profile(draw, devices=4, blocks=8, alike=seed % 2 == 0, tied=seed % 3 == 0)
    stages = [None, 2, 1][seed % 3]
    order = (Schedule.GPIPE,) if seed == 4 else (Schedule.ONE_F_ONE_B,)
    for budget in (10**9, 150_000, 90_000):
        request = Request(profile.graph, 4, 8, budget, Fixed(pipeline=stages), order, Space(profile.graph, 2))
        found = search(request, LayerPricer(profile))
        if found is None:
            continue
        certificate = certify(found.problem, found.partition)
        assert certificate.verdict is Verdict.PROVEN
        assert certificate.seconds == pytest.approx(found.partition.time / 1e12, rel=1e-6)


def test_infeasible_programme_has_no_values() -> None:
    programme = Programme()
    number = programme.variable(binary=True)
    programme.equal.append(({number: 1.0}, 2.0))
    programme.objective[number] = 1.0
    answer = solve(programme)
    assert answer.verdict is Verdict.INFEASIBLE
    assert not answer.values
