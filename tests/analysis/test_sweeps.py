from __future__ import annotations

from typing import Any

import pytest

from galvatron_lite import api
from galvatron_lite.analysis.setting import device_counts
from galvatron_lite.analysis.sweeps import (
    Fewest,
    Goal,
    ParetoFront,
    Target,
    TrainingAmount,
    batches,
    best_batch,
    ceiling,
    cheapest,
    device_seconds,
    fewest_devices,
    least_seconds,
    pareto_front,
)
from galvatron_lite.api import find_profile
from galvatron_lite.errors import GalvatronError, InfeasibleError, InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.shapes import build_graph, shape_from_flags
from galvatron_lite.profiler.schema import LayerPoint, OptimizerCost, Overlap
from galvatron_lite.search.planner import find_plan
from tests.analysis.cases import peak_of, plan_at, seconds_of, small
from tests.factories import make_cluster, make_graph, make_kind, make_profile


@pytest.mark.parametrize("seed", [1, 2])
def test_no_budget_has_a_faster_plan(seed: int) -> None:
    """With steps of a byte: at every budget of a grid, and just below every plan, against a search of its own."""
    setting = small(seed, devices=2, budget=200_000)
    front = pareto_front(setting, 4, step=1)
    assert front.complete
    peaks = [point.peak for point in front.points]
    budgets = {*range(peaks[-1], 200_001, 50_000), *peaks, *(peak - 1 for peak in peaks)}
    for budget in sorted(budgets):
        within = [point.seconds for point in front.points if point.peak <= budget]
        plan = plan_at(setting, 2, 4, budget)
        assert (plan is None) == (not within)
        assert plan is None or min(within) <= seconds_of(plan) * (1 + 1e-9)


@pytest.mark.parametrize("seed", [1, 4])
def test_plans_are_those_of_their_budgets_and_none_is_beaten(seed: int) -> None:
    setting = small(seed, budget=300_000)
    front = pareto_front(setting, 8, step=4000)
    assert front.step == 4000
    for point in front.points:
        plan = plan_at(setting, 4, 8, point.budget)
        assert plan is not None
        assert (seconds_of(plan), peak_of(plan)) == (point.seconds, point.peak)
        assert point.peak <= point.budget
    times, peaks = [p.seconds for p in front.points], [p.peak for p in front.points]
    assert times == sorted(set(times))
    assert peaks == sorted(set(peaks), reverse=True)
    assert front.least is not None
    assert plan_at(setting, 4, 8, front.least) is not None


def test_a_wide_step_is_quick_and_says_so() -> None:
    setting = small(5, budget=320_000)
    front = pareto_front(setting, 16)
    assert front.step == 10_000
    searched = [point.budget for point in front.points]
    assert all(left.peak - right.budget >= 10_000 or right.budget == front.least
               for left, right in zip(front.points, front.points[1:], strict=False))  # fmt: skip
    assert searched[0] == 320_000


def test_a_budget_without_plans_and_a_step_of_zero_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="smallest budget"):
        pareto_front(small(2, budget=100), 16)
    with pytest.raises(InputError, match="step"):
        pareto_front(small(2), 16, step=0)


@pytest.mark.parametrize("seed", range(2))
def test_the_cheapest_number_of_devices(seed: int) -> None:
    setting = small(seed, devices=4, nodes=2)
    steps = {devices: seconds_of(plan_at(setting, devices, 24)) for devices in (1, 2, 3, 4, 8)}
    cost = {devices: 2.5 * devices * 1000 * seconds / 3600 for devices, seconds in steps.items()}
    answer = cheapest(setting, TrainingAmount(steps=1000.0), 2.5, batch=24)
    assert answer.answer.cost == pytest.approx(min(cost.values()), rel=1e-12)
    assert [one.point.devices for one in answer.costs] == [1, 2, 3, 4, 8]
    for one in answer.costs:
        assert one.cost == pytest.approx(cost[one.point.devices], rel=1e-12)
        assert one.seconds == pytest.approx(1000 * steps[one.point.devices], rel=1e-12)
        assert one.device_hours == pytest.approx(one.cost / 2.5, rel=1e-12)
    beaten = {
        one.point.devices
        for one in answer.costs
        if any(other.cost <= one.cost and other.seconds < one.seconds for other in answer.costs)
    }
    assert {one.point.devices for one in answer.frontier} == set(steps) - beaten
    for deadline in (1000 * steps[8] * 1.001, 1000 * steps[2] * 1.001):
        within = {devices: cost[devices] for devices in cost if 1000 * steps[devices] <= deadline}
        bounded = cheapest(setting, TrainingAmount(steps=1000.0), 2.5, batch=24, deadline=deadline)
        assert bounded.answer.cost == pytest.approx(min(within.values()), rel=1e-12)


def test_a_run_in_samples_tokens_or_steps() -> None:
    """Samples are of 8 tokens in these models."""
    setting = small(3)
    runs = [TrainingAmount(steps=50.0), TrainingAmount(samples=1200.0), TrainingAmount(tokens=9600.0)]
    costs = {round(one.cost, 12) for run in runs for one in [cheapest(setting, run, 1.0, batch=24).costs[0]]}
    assert len(costs) == 1


def test_a_deadline_that_none_meets_and_a_budget_that_nothing_fits() -> None:
    answer = cheapest(small(3), TrainingAmount(samples=1e9), 1.0, deadline=1e-3)
    assert answer.answer is None
    assert answer.frontier
    with pytest.raises(InfeasibleError, match="smallest budget"):
        cheapest(small(3, budget=100), TrainingAmount(samples=1e9), 1.0)


@pytest.mark.parametrize(
    ("run", "price", "batch", "deadline", "said"),
    [
        (TrainingAmount(), 1.0, 8, None, "just one"),
        (TrainingAmount(samples=1.0, tokens=1.0), 1.0, 8, None, "just one"),
        (TrainingAmount(steps=10.0), 1.0, None, None, "--batch is missing"),
        (TrainingAmount(samples=10.0), 0.0, 8, None, "--price"),
        (TrainingAmount(samples=-1.0), 1.0, 8, None, "samples"),
        (TrainingAmount(samples=1.0), 1.0, 8, -5.0, "--within"),
    ],
)
def test_training_amounts_that_contradict_are_refused(
    run: TrainingAmount, price: float, batch: int | None, deadline: float | None, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        cheapest(small(0), run, price, batch=batch, deadline=deadline)


def devices_of(answer: Fewest) -> int | None:
    return None if answer.answer is None else answer.answer.devices


@pytest.mark.parametrize("seed", range(2))
def test_the_fewest_devices_that_reach_a_target(seed: int) -> None:
    setting = small(seed, devices=4, nodes=2)
    counts = device_counts(setting.profile.cluster)
    steps = {devices: seconds_of(plan_at(setting, devices, 24)) for devices in counts}
    for share, goal in ((0.99, Goal.STEP), (0.6, Goal.SAMPLES), (0.3, Goal.TOKENS)):
        wanted = steps[1] * share
        value = {Goal.STEP: wanted, Goal.SAMPLES: 24 / wanted, Goal.TOKENS: 24 * 8 / wanted}[goal]
        enough = [devices for devices, seconds in steps.items() if seconds <= 24 / (24 / wanted)]
        answer = fewest_devices(setting, Target(goal, value), 24)
        assert devices_of(answer) == min(enough, default=None)
        assert [point.devices for point in answer.points] == [n for n in counts if n <= min(enough, default=8)]
        assert all(point.plan is None or point.seconds == steps[point.devices] for point in answer.points)


def test_the_fewest_devices_whose_memory_suffices() -> None:
    for budget in (30_000, 60_000, 2**30):
        setting = small(1, budget=budget)
        fits = [devices for devices in (1, 2, 3, 4) if plan_at(setting, devices, 24) is not None]
        assert devices_of(fewest_devices(setting, Target(Goal.FIT), 24)) == min(fits, default=None)


def test_the_default_batch_is_eight_samples_a_device() -> None:
    answer = fewest_devices(small(0), Target(Goal.SAMPLES, 1e12))
    assert answer.answer is None
    assert [point.batch for point in answer.points] == [8, 16, 24, 32]


@pytest.mark.parametrize(
    ("target", "batch", "said"),
    [
        (Target(Goal.STEP, 1.0), None, "--batch is missing"),
        (Target(Goal.STEP, 0.0), 8, "above 0"),
        (Target(Goal.SAMPLES, -1.0), 8, "above 0"),
        (Target(Goal.TOKENS, float("nan")), 8, "above 0"),
    ],
)
def test_targets_that_are_no_positive_numbers_are_refused(target: Target, batch: int | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        fewest_devices(small(0), target, batch)


@pytest.mark.parametrize("seed", range(2))
def test_the_best_of_all_batches(seed: int) -> None:
    setting = small(seed, budget=2**30 if seed % 2 else 60_000)
    every = batches(4, 24)
    rates = {batch: batch / seconds_of(plan_at(setting, 4, batch)) for batch in every}
    if not any(rates.values()):
        with pytest.raises(InfeasibleError):
            best_batch(setting, 24)
        return
    answer = best_batch(setting, 24)
    top = max(rates.values())
    assert answer.best.rate == top
    assert answer.best.batch == min(batch for batch, rate in rates.items() if rate == top)
    assert answer.saturated.batch == min(batch for batch, rate in rates.items() if rate >= 0.99 * top)
    assert [point.batch for point in answer.points] == list(every)
    assert all(point.rate in (0.0, rates[point.batch]) for point in answer.points)
    assert top <= answer.ceiling
    assert answer.complete


def test_batches_that_divide_well() -> None:
    assert batches(8, 100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)
    assert batches(6, 40) == (1, 2, 3, 6, 12, 18, 24, 36)
    assert batches(8, 3) == (1, 2)
    with pytest.raises(InputError, match="--max-batch"):
        batches(8, 0)


def test_a_batch_that_cannot_win_is_not_searched() -> None:
    """Layers that take a fixed time whatever the samples: few samples cannot beat many."""
    skipped = 0
    for seed in (0, 3):
        setting = small(seed)
        answer = best_batch(setting, 32)
        assert answer.best is not None
        left = [point for point in answer.points if "slower than the best" in point.reason]
        assert all(ceiling(setting, point.batch) <= answer.best.rate for point in left)
        skipped += len(left)
    assert skipped


def test_an_interrupt_leaves_what_was_found() -> None:
    def stop(done: int, total: int, label: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    answer = best_batch(small(1), 12, stop)
    assert not answer.complete
    assert len(answer.points) == 3
    assert answer.best is not None


@pytest.mark.parametrize("seed", range(2))
def test_no_plan_beats_the_bound(seed: int) -> None:
    setting = small(seed)
    for devices in (1, 2, 4):
        for batch in (4, 24):
            plan = plan_at(setting, devices, batch)
            assert plan is not None
            assert seconds_of(plan) >= least_seconds(setting.profile, devices, batch) * (1 - 1e-9)


@pytest.mark.parametrize("backend", ["galvatron", "any"])
def test_no_plan_of_an_estimated_model_beats_the_bound(backend: str) -> None:
    known = find_profile(model="gpt2", cluster="a100-40gb", gpus=4)
    plan = find_plan(known, devices=4, global_batch=64, budget=30 * 10**9, backend=backend, runners_up=0)
    assert seconds_of(plan) >= least_seconds(known, 4, 64) > 0.5 * seconds_of(plan)


def test_a_plan_of_compute_alone_reaches_the_bound() -> None:
    """Two layers of 3 and 6 seconds a sample on one device, and nothing else to do; and f + b = 2 + n seconds for n
    samples: 3 a sample alone, 1.25 each in a batch of 8, which no point holds."""
    kind = make_kind("block", 0)
    points = [LayerPoint("block", n, 1, False, Recompute.NONE, 1.0 * n, 2.0 * n, 0, 0, 0) for n in (1, 2)]
    profile = make_profile(
        make_graph([kind], ["block", "block"]), points, make_cluster(1),
        optimizer=OptimizerCost("sgd", 0, 0.0), overlap=Overlap(),
    )  # fmt: skip
    plan = find_plan(profile, devices=1, global_batch=5, budget=2**30, runners_up=0)
    assert least_seconds(profile, 1, 5) == seconds_of(plan) == pytest.approx(30.0)
    points = [LayerPoint("block", n, 1, False, Recompute.NONE, 1.0, 1.0 + n, 0, 0, 0) for n in (1, 2, 4)]
    profile = make_profile(make_graph([kind], ["block"]), points, make_cluster(2))
    assert [device_seconds(profile, batch) for batch in (1, 8)] == pytest.approx([3.0, 1.25])


MIXED: dict[str, Any] = {"model": "gpt2", "cluster": "a100-v100", "sequence": 128, "forbid": ("tensor", "recompute")}


def planned(**setup: Any) -> Any:
    try:
        return api.plan(runners_up=0, tolerance=0, **(MIXED | setup))
    except GalvatronError:
        return None


def test_every_number_of_devices_has_its_own_budget_and_precision() -> None:
    answer = api.cheapest(price=1.0, batch=16, **MIXED)
    plans = {cost.point.devices: cost.point.plan for cost in answer.costs}
    assert {8, 16} <= set(plans)
    for devices, plan in plans.items():
        assert plan == planned(gpus=devices, batch=16)
    assert (plans[8].precision, plans[16].precision) == ("bf16", "fp16")  # type: ignore[union-attr]
    assert plans[8].provenance.budget > 32e9  # type: ignore[union-attr]


def test_a_budget_that_only_some_devices_have_is_each_number_of_devices_own() -> None:
    answer = api.fewest_devices(samples=1e9, batch=16, mem="40GB", **MIXED)
    for point in answer.points:
        assert point.plan == planned(gpus=point.devices, batch=16, mem="40GB")
    assert any(point.plan is not None for point in answer.points)
    assert "V100" in answer.points[-1].reason
    for question in (api.plan, api.best_batch, api.pareto_front):
        with pytest.raises(InputError, match="V100"):
            question(mem="40GB", **MIXED)


def test_batches_and_the_front_start_from_the_budgets_of_a_single_plan() -> None:
    flags = {"layers": "2", "hidden": "256", "heads": "4", "vocab": "1000", "seq": "64"}
    tiny = {"model": build_graph(shape_from_flags(flags), precision="fp16"), "cluster": "a100-v100"}
    best = api.best_batch(max_batch=16, **tiny)  # type: ignore[arg-type]
    assert best.best.plan == planned(batch=best.best.batch, sequence=None, **tiny)
    front: ParetoFront = api.pareto_front(batch=16, memory_step="8GB", **tiny)  # type: ignore[arg-type]
    assert front.points[0].plan == planned(batch=16, sequence=None, **tiny)
