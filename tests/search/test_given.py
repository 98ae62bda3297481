"""Plans that the user already has: what is found is never worse than they are."""

import random
from dataclasses import replace

import pytest

from galvatron_lite.cost.plan import evaluate
from galvatron_lite.errors import InputError
from galvatron_lite.plans.schema import Plan, Proof
from galvatron_lite.search import planner
from galvatron_lite.search.best_first import search
from galvatron_lite.search.planner import find_plan
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
    again = planned(seed, known=[bare(best)], effort=0)
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
    assert bare(planned(seed, known=[poor], runners_up=0)) == bare(best)


def test_what_is_best_stays_so_and_is_proven() -> None:
    best = planned(0, runners_up=0)
    again = planned(0, known=[bare(best)], runners_up=0)
    assert bare(again) == bare(best)
    assert again.provenance.proof is Proof.PROVEN


def test_plans_that_do_not_fit_or_break_pins_do_not_count() -> None:
    best = planned(1)
    within = best.prediction.peak_memory - 1
    assert bare(planned(1, known=[bare(best)], budget=within)) == bare(planned(1, budget=within))
    pins = Fixed(microbatches=1 if best.microbatches > 1 else 2)
    assert bare(planned(1, known=[bare(best)], fixed=pins)) == bare(planned(1, fixed=pins))
    other = Fixed(pipeline=1 if best.pipeline > 1 else 2)
    assert planned(1, known=[bare(best)], fixed=other).pipeline == other.pipeline


@pytest.mark.parametrize(("field", "value"), [("global_batch", 16), ("devices", 2)])
def test_plans_for_another_question_are_refused(field: str, value: int) -> None:
    with pytest.raises(InputError, match=field):
        planned(0, known=[replace(bare(planned(0)), **{field: value})])


def test_it_is_said_that_a_given_plan_is_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    best = planned(2, runners_up=0)
    monkeypatch.setattr(planner, "search", lambda *_, start, **__: start)
    again = planned(2, known=[bare(best)], certify=True, runners_up=0)
    assert bare(again) == bare(best)
    assert "given" in again.provenance.certificate


@pytest.mark.parametrize("seed", range(6))
def test_quick_searches_that_meet_nothing_are_not_the_last_word(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = random_profile(random.Random(seed), devices=2, blocks=2)
    best = find_plan(profile, devices=2, global_batch=4, budget=2**50)

    def blind(*args: object, below: int | None = None, **given: object) -> object:
        return search(*args, below=below, **given) if below is None else None  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "search", blind)
    found = find_plan(profile, devices=2, global_batch=4, budget=2**50, effort=0)
    assert found.prediction.step_seconds >= best.prediction.step_seconds
