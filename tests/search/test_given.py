"""Plans that the user already has, and other ways beside the search: what is found is never worse."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from galvatron_lite.cost.plan import evaluate
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.parallelism.backends import GALVATRON
from galvatron_lite.plans.schema import Alternative, BranchPlacement, Plan, Proof
from galvatron_lite.search import planner
from galvatron_lite.search.best_first import search
from galvatron_lite.search.families.family import PlanTask, with_families
from galvatron_lite.search.planner import find_plan, request_of
from galvatron_lite.search.shapes import Session
from galvatron_lite.search.space import Fixed
from tests.factories import random_profile

ROOM = 10**9


def planned(seed: int, **options: object) -> Plan:
    arguments: dict[str, object] = {"devices": 4, "global_batch": 8, "budget": ROOM, "backend": "any"} | options
    return find_plan(random_profile(random.Random(seed)), **arguments)  # type: ignore[arg-type]


def seconds(plan: Plan) -> float:
    return plan.prediction.step_seconds


def bare(plan: Plan) -> Plan:
    """What a plan chooses, without what was found out about it."""
    stages = tuple(replace(stage, memory=type(stage.memory)(), microbatch_seconds=0.0) for stage in plan.stages)
    return replace(plan, stages=stages, prediction=None, provenance=None, alternatives=(), left_out=())


@pytest.mark.parametrize("seed", range(3))
def test_a_search_without_effort_ends_with_a_plan_as_good_as_the_given_one(seed: int) -> None:
    best = planned(seed)
    again = planned(seed, candidates=[bare(best)], effort=0)
    assert seconds(again) <= seconds(best)
    assert seconds(evaluate(random_profile(random.Random(seed)), bare(again))) == seconds(again)


@pytest.mark.parametrize("seed", range(3))
def test_a_quick_search_does_not_claim_more_than_it_knows(seed: int) -> None:
    best, quick = planned(seed, runners_up=0), planned(seed, runners_up=0, effort=0)
    assert best.provenance.gap == 0.0
    # What is shown is simulated; without a pipeline it is what the gap is about.
    if best.pipeline == quick.pipeline == 1:
        assert seconds(quick) * (1 - quick.provenance.gap) <= seconds(best) * (1 + 1e-9)
    assert quick.provenance.gap > 0.0 or seconds(quick) <= seconds(best) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_a_poor_plan_changes_nothing(seed: int) -> None:
    best = planned(seed, runners_up=0)
    poor = bare(planned(seed, fixed=Fixed(microbatches=2), runners_up=0))
    assert bare(planned(seed, candidates=[poor], runners_up=0)) == bare(best)


def test_what_is_best_stays_so_and_is_proven() -> None:
    best = planned(0, runners_up=0)
    again = planned(0, candidates=[bare(best)], runners_up=0)
    assert bare(again) == bare(best)
    assert again.provenance.proof is Proof.PROVEN


def test_plans_that_do_not_fit_or_break_pins_do_not_count() -> None:
    best = planned(1)
    within = best.prediction.peak_memory - 1
    assert bare(planned(1, candidates=[bare(best)], budget=within)) == bare(planned(1, budget=within))
    pins = Fixed(microbatches=1 if best.microbatches > 1 else 2)
    assert bare(planned(1, candidates=[bare(best)], fixed=pins)) == bare(planned(1, fixed=pins))
    other = Fixed(pipeline=1 if best.pipeline > 1 else 2)
    assert planned(1, candidates=[bare(best)], fixed=other).pipeline == other.pipeline


@pytest.mark.parametrize(("field", "value"), [("global_batch", 16), ("devices", 2)])
def test_plans_for_another_question_are_refused(field: str, value: int) -> None:
    with pytest.raises(InputError, match=field):
        planned(0, candidates=[replace(bare(planned(0)), **{field: value})])


def test_a_given_plan_is_reported_as_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    best = planned(2, runners_up=0)
    monkeypatch.setattr(planner, "search", lambda *_, start, **__: start)
    again = planned(2, candidates=[bare(best)], certify=True, runners_up=0)
    assert bare(again) == bare(best)
    assert "given" in again.provenance.certificate


@pytest.mark.parametrize("seed", range(6))
def test_quick_searches_that_meet_nothing_are_not_the_last_word(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = random_profile(random.Random(seed), devices=2, blocks=2)
    best = find_plan(profile, devices=2, global_batch=4, budget=2**50)

    def blind(*args: object, **given: object) -> object:
        return None if "below" in given else search(*args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "search", blind)
    found = find_plan(profile, devices=2, global_batch=4, budget=2**50, effort=0)
    assert found.prediction.step_seconds >= best.prediction.step_seconds


BUDGET = 2**29


def question() -> tuple[PlanTask, Plan]:
    profile = random_profile(random.Random(3), devices=2)
    session = Session(profile)
    request = request_of(session, 2, 8, BUDGET, Fixed(), None, GALVATRON)
    plan = find_plan(profile, devices=2, global_batch=8, budget=BUDGET, runners_up=2)
    return PlanTask(session, request, GALVATRON), plan


def way_of(plan: Plan, name: str, factor: float, memory: int = 1) -> Plan:
    """A plan of another way, so many times as long."""
    stage = replace(plan.stages[0], memory=replace(plan.stages[0].memory, parameters=memory))
    prediction = replace(plan.prediction, step_seconds=plan.prediction.step_seconds * factor)
    return replace(plan, stages=(stage,), branches=(BranchPlacement(name, (), 0, 1, ()),), prediction=prediction)


@pytest.mark.parametrize(("factor", "taken"), [(0.9, True), (1.0, False), (1.1, False)])
def test_the_quickest_plan_counts_and_the_ordinary_one_of_equal_ones(factor: float, taken: bool) -> None:
    asked, plan = question()
    other = way_of(plan, "other", factor)
    found = with_families(lambda: plan, asked, 3, [lambda _: [other]])
    assert found.branches == (other.branches if taken else ())
    assert any(("other on" in one.summary) is not taken for one in found.alternatives)
    assert len(found.alternatives) <= 3


def test_a_way_is_told_of_the_ordinary_plan_and_its_own_is_told_though_others_are_quicker() -> None:
    asked, plan = question()
    crowd = tuple(Alternative(f"another {number}", 1e-9 * number, 1, True) for number in range(9))
    met: list[Plan | None] = []

    def way(own: PlanTask) -> list[Plan]:
        met.append(own.ordinary)
        return [way_of(plan, "slow", 5.0)]

    found = with_families(lambda: replace(plan, alternatives=crowd), asked, 3, [way])
    assert met[0] is not None
    assert any("slow on device 0" in one.summary for one in found.alternatives)
    assert len(found.alternatives) == 3


def test_without_variants_nothing_changes() -> None:
    asked, plan = question()
    assert with_families(lambda: plan, asked, 3, [lambda _: []]) is plan


def test_where_nothing_ordinary_fits_another_way_may() -> None:
    asked, plan = question()

    def nothing() -> Plan:
        raise InfeasibleError("too small", 7)

    found = with_families(nothing, asked, 3, [lambda _: [way_of(plan, "small", 2.0)]])
    assert found.branches[0].name == "small"
    too_large = way_of(plan, "large", 0.1, memory=2**50)
    with pytest.raises(InfeasibleError, match="too small"):
        with_families(nothing, asked, 3, [lambda _: [too_large]])


def test_a_quicker_plan_that_does_not_fit_is_only_reported() -> None:
    asked, plan = question()
    found = with_families(lambda: plan, asked, 3, [lambda _: [way_of(plan, "large", 0.1, memory=2**50)]])
    assert not found.branches
    assert [one.fits for one in found.alternatives if "large" in one.summary] == [False]
