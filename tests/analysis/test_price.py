"""The price of memory, held against every plan there is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest

from galvatron_lite.analysis.setting import PlanSetting, ask
from galvatron_lite.analysis.what_ifs import TimeLimit, added_bytes, price_of_memory, with_less, with_stairs
from galvatron_lite.cluster.budget import Budget
from galvatron_lite.cost.step import price_staged
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.backends import backend_named
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.search.pins import Pins
from galvatron_lite.search.result import plan_of
from galvatron_lite.search.space import UNPINNED, Fixed
from tests.factories import random_profile

STAGES = Pins(fixed=Fixed(forbidden=("pipeline",)))
"""Without a pipeline the closed form that is searched by is the step time that is told."""


def every_plan(setting: PlanSetting, batch: int) -> Iterator[tuple[int, float]]:
    """Peak and step time of every plan of one stage."""
    session = setting.session(setting.profile.cluster.devices)
    space, devices, graph = (
        session.space(backend_named("galvatron"))[0],
        setting.profile.cluster.devices,
        setting.profile.graph,
    )
    offered = [space.strategies(layer.kind, devices, UNPINNED) for layer in graph.layers]
    for microbatches in (count for count in range(1, batch + 1) if batch % count == 0):
        for ways in product(*offered):
            if any(kind.tensor_degrees > 1 for kind in graph.kinds.values()) and _edge(ways[0]) != _edge(ways[-1]):
                continue
            plan = plan_of(
                graph, devices=devices, global_batch=batch, microbatches=microbatches, cuts=(0, len(ways)),
                strategies=ways,
            )  # fmt: skip
            try:
                done = price_staged(session.pricer, plan)
            except InputError:
                continue
            yield done.prediction.peak_memory, done.prediction.step_seconds


def _edge(way: Strategy) -> tuple[int, int, int]:
    """What the layers before and after the blocks have in common (rule 2 of ``search.problem``)."""
    return way.batch_degree, way.context, way.tensor


def fastest(every: list[tuple[int, float]], budget: int) -> float:
    return min((seconds for peak, seconds in every if peak <= budget), default=float("inf"))


@pytest.mark.parametrize(("seed", "devices", "blocks"), [(1, 1, 4), (7, 1, 3), (9, 2, 1)])
def test_a_price_is_what_every_plan_says(seed: int, devices: int, blocks: int) -> None:
    profile = random_profile(random.Random(seed), devices=devices, blocks=blocks)
    setting = PlanSetting(profile, 2**30, STAGES)
    every = sorted(every_plan(setting, 4))
    peaks = sorted({peak for peak, _ in every})
    for share in (0.1, 0.5):
        budget = Budget(peaks[int(share * (len(peaks) - 1))])
        plan = ask(setting, devices, 4, budget=budget)
        added = max(budget.least // 4, 1)
        price = with_stairs(
            price_of_memory(setting, TimeLimit(), plan, budget, added), setting, TimeLimit(), plan, budget
        )
        now, then = fastest(every, budget.least), fastest(every, budget.least + added)
        assert price.step_seconds == pytest.approx(now, rel=1e-9)
        assert price.seconds_per_gib * added / 2**30 == pytest.approx(now - then, rel=1e-6, abs=1e-12 * now)
        for step in price.steps:
            assert fastest(every, step.budget_bytes) == pytest.approx(step.step_seconds, rel=1e-9)
            assert fastest(every, step.budget_bytes - 1) >= step.step_seconds * (1 + 1e-12) or (
                step.budget_bytes == budget.least
            )
        lean = with_less(price, setting, TimeLimit(), plan, budget)
        least = fastest(every, budget.least - added)
        assert (lean.less_step_seconds or float("inf")) == pytest.approx(least, rel=1e-9)


def test_in_its_own_shape_a_price_is_no_more_than_over_all() -> None:
    profile = random_profile(random.Random(3), devices=2, blocks=2)
    setting = PlanSetting(profile, 2**30)
    lean = Budget(int(0.6 * _peak(ask(setting, 2, 4))))
    plan = ask(setting, 2, 4, budget=lean, runners_up=5)
    own = price_of_memory(setting, TimeLimit(), plan, lean, same_shape=True)
    whole = price_of_memory(setting, TimeLimit(), plan, lean)
    assert own.same_shape
    assert not whole.same_shape
    assert own.then_step_seconds >= whole.then_step_seconds * (1 - 1e-9)


def _peak(plan: Plan) -> int:
    return plan.prediction.peak_memory


def test_added_memory_is_a_gigabyte_or_a_part_of_a_small_budget() -> None:
    assert added_bytes(Budget(80 * 10**9)) == 2**30
    assert added_bytes(Budget(80 * 10**6)) == 10**7
