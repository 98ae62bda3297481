"""What the planner returns and what it says where there is no plan."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from galvatron_lite import api
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.plans.schema import Plan, Proof, Schedule
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.shapes import Session
from galvatron_lite.search.space import Fixed
from galvatron_lite.units import parse_bytes
from tests.branchy import plain_profile
from tests.factories import random_profile

BUDGET = 10**9


def planned(seed: int = 0, **options: object) -> Plan:
    arguments: dict[str, object] = {"devices": 4, "global_batch": 8, "budget": BUDGET} | options
    return find_plan(random_profile(random.Random(seed)), **arguments)  # type: ignore[arg-type]


def test_a_plan_says_what_it_costs_and_where_it_comes_from() -> None:
    plan = planned()
    assert plan.provenance.proof is Proof.PROVEN
    assert plan.provenance.budget == BUDGET
    assert max(stage.memory.total for stage in plan.stages) == plan.prediction.peak_memory
    assert evaluate(random_profile(random.Random(0)), plan).prediction == plan.prediction


def test_runners_up_are_no_better_where_they_fit() -> None:
    for seed in range(6):
        plan = planned(seed, budget=60_000)
        assert 1 <= len(plan.alternatives) <= 3
        for option in plan.alternatives:
            assert option.fits == (option.peak_memory <= 60_000)
            assert not option.fits or option.step_seconds >= plan.prediction.step_seconds * (1 - 1e-9)


def test_pinned_values_hold() -> None:
    plan = planned(1, fixed=Fixed(pipeline=2, microbatches=4, strategy=(("tensor", 1),)), certify=True)
    assert len(plan.stages) == 2
    assert plan.microbatches == 4
    assert {run.strategy.tensor for stage in plan.stages for run in stage.runs} == {1}
    assert all("pipeline 2" in other.summary and "4 micro-batches" in other.summary for other in plan.alternatives)
    assert "integer programme" in plan.provenance.certificate
    assert "(proven), gap 0" in plan.provenance.certificate


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE_V])
def test_uniform_plans_are_certified_too(schedule: Schedule) -> None:
    profile = random_profile(random.Random(3), devices=2, blocks=4)
    plan = find_plan(
        profile, devices=2, global_batch=4, budget=2**40, backend="any", schedules=(schedule,),
        fixed=Fixed(pipeline=2), certify=True, runners_up=0,
    )  # fmt: skip
    assert plan.virtual_stages > 1
    assert "(proven), gap 0" in plan.provenance.certificate


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    planned(progress=lambda done, total, label: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_too_small_a_budget_names_the_smallest_that_fits() -> None:
    with pytest.raises(InfeasibleError, match="smallest budget") as error:
        planned(2, budget=1000)
    needed = error.value.smallest_budget
    assert needed is not None
    assert planned(2, budget=needed).prediction is not None
    with pytest.raises(InfeasibleError):
        planned(2, budget=needed - 1)


def test_a_batch_that_does_not_divide_names_the_nearest() -> None:
    profile = random_profile(random.Random(7))
    fixed = Fixed(pipeline=1, strategy=(("tensor", 1),))
    with pytest.raises(InputError, match="8 or 12"):
        find_plan(profile, devices=4, global_batch=10, budget=BUDGET, fixed=fixed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 8}, "--gpus"),
        ({"global_batch": 0}, "--batch"),
        ({"budget": 0}, "--mem"),
        ({"fixed": Fixed(microbatches=3)}, "microbatches"),
        ({"fixed": Fixed(pipeline=3)}, "pipeline"),
    ],
)
def test_wrong_values_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned(**options)


def test_schedules_that_are_not_trained_with_are_refused() -> None:
    for schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE_1P):
        with pytest.raises(InputError, match="schedules"):
            planned(schedules=[schedule], backend="deepspeed")


def stopped_at(call: int, stoppable: bool = True) -> Plan:
    """The plan of a search that is interrupted at a call of its progress."""
    told: list[str] = []

    def stop(done: int, total: int, label: str) -> None:
        told.append(label)
        if len(told) == call:
            raise KeyboardInterrupt

    return planned(11, budget=60_000, backend="any", progress=stop, stoppable=stoppable)


def test_ctrl_c_returns_the_best_plan_so_far() -> None:
    told: list[str] = []
    planned(11, budget=60_000, backend="any", progress=lambda done, total, label: told.append(label))
    plan = stopped_at(len(told) - 1)
    assert plan.prediction is not None
    assert plan.provenance.proof is Proof.FEASIBLE
    assert plan.provenance.interrupted
    assert 0.0 < plan.provenance.gap < 1.0
    with pytest.raises(KeyboardInterrupt):
        stopped_at(len(told) - 1, stoppable=False)


def test_ctrl_c_before_there_is_a_plan_is_raised() -> None:
    def stop(done: int, total: int, label: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planned(progress=stop)


def test_a_session_changes_no_answer() -> None:
    profile = random_profile(random.Random(3))
    session = Session(profile)
    for budget in (BUDGET, 60_000, BUDGET):
        asked = {"devices": 4, "global_batch": 8, "budget": budget}
        assert find_plan(profile, **asked, session=session) == find_plan(profile, **asked)
    with pytest.raises(InputError, match="session"):
        planned(session=session)


def test_pins_of_a_layer_are_kept_and_forbidden_dimensions_unused() -> None:
    fixed = Fixed(layers=(("l1", "recompute", Recompute.NONE), ("l2", "tensor", 1)), forbidden=("pipeline", "zero"))
    plan = planned(5, fixed=fixed)
    runs = [run for stage in plan.stages for run in stage.runs]
    strategies = [run.strategy for run in runs for _ in range(run.count)]
    assert len(plan.stages) == 1
    assert strategies[1].recompute is Recompute.NONE
    assert strategies[2].tensor == 1
    assert {strategy.zero for strategy in strategies} == {1}


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        (Fixed(pipeline=2, forbidden=("pipeline",)), "forbid pipeline"),
        (Fixed(strategy=(("tensor", 2),), forbidden=("tensor",)), "forbid tensor"),
        (Fixed(strategy=(("tensor", 2),), layers=(("l1", "tensor", 4),)), "asks for another"),
        (Fixed(layers=(("nowhere*", "tensor", 2),)), "No layer has that name"),
        (Fixed(virtual=2, schedule=Schedule.ONE_F_ONE_B), "runs one stage a group"),
        (Fixed(schedule=Schedule.CYCLIC), "schedule"),
    ],
)
def test_pins_that_contradict_are_named(fixed: Fixed, message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned(fixed=fixed)


def test_where_nothing_fits_the_error_names_the_pin_to_lift() -> None:
    with pytest.raises(InfeasibleError) as error:
        planned(2, budget=60_000, fixed=Fixed(pipeline=1, forbidden=("zero", "tensor", "recompute")))
    said = str(error.value)
    lifted = {
        "without --fix pp": Fixed(forbidden=("zero", "tensor", "recompute")),
        "without --forbid zero": Fixed(pipeline=1, forbidden=("tensor", "recompute")),
        "without --forbid tensor": Fixed(pipeline=1, forbidden=("zero", "recompute")),
        "without --forbid recompute": Fixed(pipeline=1, forbidden=("zero", "tensor")),
    }
    assert any(words in said for words in lifted)
    for words, fixed in lifted.items():
        if words in said:
            assert planned(2, budget=60_000, fixed=fixed).prediction is not None
        else:
            with pytest.raises(InfeasibleError):
                planned(2, budget=60_000, fixed=fixed)


def test_where_nothing_fits_more_devices_are_named_only_where_they_help() -> None:
    """Half as many nodes more, twice and four times as many are tried; two nodes of two devices here."""
    profile = random_profile(random.Random(2), devices=4, blocks=4)
    (level,) = profile.cluster.levels
    levels = (replace(level, size=2), replace(level, name="rack", size=2))
    profile = replace(profile, cluster=replace(profile.cluster, levels=levels))
    asked = {"devices": 4, "global_batch": 16, "runners_up": 1}
    with pytest.raises(InfeasibleError, match="It fits on 16 devices: ") as error:
        find_plan(profile, budget=45_000, **asked)
    assert "6 devices" not in str(error.value).replace("16 devices", "")
    assert "8 devices" not in str(error.value)
    with pytest.raises(InfeasibleError) as error:
        find_plan(profile, budget=28_000, **asked)
    assert "It fits on" not in str(error.value)


def test_layers_that_take_minutes_are_planned() -> None:
    """Picoseconds times what weighs delays go beyond the whole numbers that floats tell apart."""
    profile = plain_profile([300.0, 200.0])
    fixed = Fixed(pipeline=2, schedule=Schedule.ONE_F_ONE_B)
    found = find_plan(profile, devices=2, global_batch=1, budget=2**29, fixed=fixed)
    assert found.prediction.step_seconds == pytest.approx(1500.0, rel=1e-6)


def test_where_nothing_fits_host_memory_is_used() -> None:
    asked = {"model": "gpt2", "cluster": "h100", "gpus": 1, "batch": 4, "mem": "3GB"}
    found = api.plan(**asked)  # type: ignore[arg-type]
    pinned = api.plan(fix="offload=states", **asked)  # type: ignore[arg-type]
    assert found.stages == pinned.stages
    assert found.prediction == pinned.prediction
    assert found.provenance is not None
    need = re.search(r"about ([\d.]+ .iB) of each device's data", found.provenance.notes[0])
    assert need is not None
    # Adam's two moments in float32 of 124 million parameters, whose float32 values stay on the device
    assert parse_bytes(need[1]) == pytest.approx(124.4e6 * 8, rel=0.1)
    with pytest.raises(InfeasibleError) as error:
        api.plan(forbid="offload", **asked)  # type: ignore[arg-type]
    assert "host memory" not in str(error.value)
    with pytest.raises(InfeasibleError):
        api.plan(runners_up=0, **asked)  # type: ignore[arg-type]
