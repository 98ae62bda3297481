"""Which finalist is the plan: within a tolerance, under scenarios, and how the others are told of."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite import api
from galvatron_lite.calibration.schema import Calibration, ConstantsOrigin, LinkConstants, StackConstants
from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import evaluate, price_plan
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.model.graph import Recompute, Role
from galvatron_lite.parallelism.backends import GALVATRON
from galvatron_lite.plans.schema import Proof, Schedule
from galvatron_lite.profiler.schema import OriginKind, PlanNeeds, Profile
from galvatron_lite.search import planner
from galvatron_lite.search.alternatives import Finalist, alternatives_to, finalists, quickest, traits
from galvatron_lite.search.best_first import finished, search
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.refusals import least_budget
from galvatron_lite.search.scenarios import Range, Spread, ranges_of, scenarios_of, spread_of
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.simplify import SLACK, most_runs, simplest, with_fewer_runs
from galvatron_lite.search.space import Fixed, Space
from tests.factories import random_profile
from tests.search.brute import bound_of, brute_of
from tests.search.instances import random_instance, uniform_instance
from tests.search.test_exact import QUIET


def some_finalists(seed: int = 5) -> tuple[Finalist, ...]:
    profile = random_profile(random.Random(seed), devices=4, blocks=4)
    space = Space(profile.graph, 4)
    request = Request(profile.graph, 4, 8, 10**9, Fixed(), (Schedule.ONE_F_ONE_B,), space)
    pricer = LayerPricer(profile)
    found = search(request, pricer)
    assert found is not None
    return finalists(request, pricer, found)


def slower(finalist: Finalist, factor: float, fits: bool = True) -> Finalist:
    """The finalist with another step time."""
    seconds = finalist.plan.prediction.step_seconds * factor
    return replace(
        finalist,
        plan=replace(finalist.plan, prediction=replace(finalist.plan.prediction, step_seconds=seconds)),
        fits=fits,
    )


def test_the_search_s_own_plan_comes_first_and_every_shape_once() -> None:
    options = some_finalists()
    assert len(options) > 3
    assert len({option.name for option in options}) == len(options)
    assert options[0].solved.partition.time == min(option.solved.partition.time for option in options)


def test_runners_up_differ_materially() -> None:
    options = some_finalists()
    assert len({traits(option.plan) for option in options}) == len(options)
    plan = options[0].plan
    stage, run = plan.stages[0], plan.stages[0].runs[0]
    full = replace(run, strategy=replace(run.strategy, recompute=Recompute.FULL))
    assert traits(plan) == traits(replace(plan, model="another"))
    assert traits(plan) != traits(replace(plan, microbatches=plan.microbatches * 2))
    assert traits(replace(plan, stages=(replace(stage, runs=(run,)),))) != traits(
        replace(plan, stages=(replace(stage, runs=(full,)),))
    )


@pytest.mark.parametrize("seed", range(4))
def test_runners_up_are_of_the_declared_space(seed: int) -> None:
    """So that none fits where the smallest budget that is named does not."""
    profile = random_profile(random.Random(seed), devices=4, blocks=3)
    narrow = replace(profile.cluster.levels[0], size=2)
    profile = replace(profile, cluster=replace(profile.cluster, levels=(narrow, narrow)))
    space = Space(profile.graph, 2)
    request = Request(profile.graph, 4, 8, 10**9, Fixed(), (Schedule.ONE_F_ONE_B,), space)
    pricer = LayerPricer(profile)
    found = search(request, pricer)
    assert found is not None
    least = least_budget(request, pricer)
    for option in finalists(request, pricer, found, 8):
        devices = 4 // len(option.plan.stages)
        runs = [run for stage in option.plan.stages for run in stage.runs]
        kinds = {layer.name: layer.kind for layer in profile.graph.layers}
        assert all(run.strategy in space.strategies(kinds[run.first], devices, Fixed()) for run in runs)
        assert option.plan.prediction.peak_memory >= least.most
        assert all(run.strategy.zero > 1 or run.strategy.zero_stage == 0 for run in runs)


def test_the_quickest_that_fits_is_chosen() -> None:
    first = some_finalists()[0]
    behind = slower(first, 1.2)
    assert quickest([first, behind]) is first
    ahead = slower(first, 0.9)
    assert quickest([first, ahead, behind]) is ahead
    assert quickest([first, slower(first, 0.9, fits=False)]) is first
    assert quickest([first, slower(first, 1.0 - 1e-12)]) is first, "rounding is no reason"
    with pytest.raises(InfeasibleError, match="once its passes are in order") as error:
        quickest([slower(first, 1.0, fits=False), slower(first, 0.9, fits=False)])
    assert error.value.smallest_budget == first.alternative.peak_memory


def test_within_the_tolerance_the_simplest_is_chosen() -> None:
    options = some_finalists()
    first = max(options, key=lambda one: one.complexity)
    simple = min(options, key=lambda one: one.complexity[:3])
    assert first.complexity[:3] > simple.complexity[:3]
    near = slower(simple, first.seconds * 1.005 / simple.seconds)
    assert quickest([first, near], 0.01) is near
    assert quickest([first, near], 0.001) is first
    assert quickest([first, near], 0.01, first.seconds * 0.99) is first, "the tolerance is not counted twice"
    assert quickest([first, near, replace(first, name="given")], 0.01).seconds <= first.seconds
    assert quickest([first, replace(near, fits=False)], 0.01) is first


@pytest.mark.parametrize("schedules", [(Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE_1P), (Schedule.ZERO_BUBBLE_1P,)])
def test_where_the_plan_found_does_not_fit_after_all_another_one_does(schedules: tuple[Schedule, ...]) -> None:
    """As if its passes, once in order, held more than the search knew."""
    profile = random_profile(random.Random(5), devices=4, blocks=4)
    request = Request(profile.graph, 4, 8, 10**9, Fixed(pipeline=2), schedules, Space(profile.graph, 4))
    pricer = LayerPricer(profile)
    found = search(request, pricer)
    assert found is not None
    peak = finalists(request, pricer, found, 0)[0].alternative.peak_memory
    least = least_budget(request, pricer)
    tight = replace(request, budget=(peak + least.most) // 2)
    first, *others = finalists(tight, pricer, found, 0)
    assert not first.fits
    assert {one.plan.schedule for one in others} <= set(schedules)
    chosen = quickest([first, *others])
    assert chosen.fits
    assert tight.fits(chosen.plan)
    exact = search(tight, pricer)
    assert chosen.solved.partition.time >= exact.partition.time
    with_few_runs = finalists(replace(tight, runs=1), pricer, found, 0)
    assert quickest(with_few_runs).seconds == chosen.seconds, "few runs are for plans as quick"


@pytest.mark.parametrize(("model", "cluster", "batch"), [("gpt2", "a100-40gb", 64), ("resnet50", "v100", 512)])
def test_of_zero_stages_within_the_tolerance_the_lowest_is_taken(
    model: str, cluster: str, batch: int, tmp_path: Path
) -> None:
    asked, seconds = {"model": model, "cluster": cluster, "gpus": 8}, dict[str, float]()
    for strategy in ("data8", "zero1x8", "zero2x8", "zero3x8"):
        by_hand = {
            "devices": 8,
            "global_batch": batch,
            "microbatches": 1,
            "runs": [{"layers": "*", "strategy": strategy}],
        }
        (tmp_path / "plan.yaml").write_text(json.dumps(by_hand))
        seconds[strategy] = api.evaluate(tmp_path / "plan.yaml", **asked).prediction.step_seconds  # type: ignore[arg-type]
    lowest = next(name for name, taken in seconds.items() if taken <= min(seconds.values()) / 0.99)
    plan = api.plan(batch=batch, runners_up=3, **asked)  # type: ignore[arg-type]
    assert {str(run.strategy) for run in plan.stages[0].runs} == {lowest}


def test_others_are_listed_quickest_first_and_those_that_do_not_fit_last() -> None:
    first, *others = some_finalists()
    heavy, *rest = [slower(other, 1.0 + place, fits=place > 0) for place, other in enumerate(others)]
    told = alternatives_to([first, *rest, heavy], first, 10)
    assert [option.fits for option in told] == sorted((option.fits for option in told), reverse=True)
    times = [option.step_seconds for option in told if option.fits]
    assert times == sorted(times)
    assert len(alternatives_to([first, *rest], first, 1)) == 1
    assert alternatives_to([first, *rest], first, 0) == ()


def test_a_plan_chosen_for_its_simulation_is_not_called_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = random_profile(random.Random(5), devices=4, blocks=4)
    asked = {"devices": 4, "global_batch": 8, "budget": 10**9}
    usual = planner.find_plan(profile, **asked)
    assert usual.provenance.proof is Proof.PROVEN
    monkeypatch.setattr(
        planner, "quickest", lambda options, *_: max(options, key=lambda one: one.solved.partition.time)
    )
    other = planner.find_plan(profile, **asked)
    assert other.provenance.proof is Proof.FEASIBLE
    assert 0.0 < other.provenance.gap < 1.0


def test_a_zero_bubble_plan_is_held_against_other_schedules_by_simulation() -> None:
    """Its closed form leaves out waits: of this question it is the less, and an interleaved plan simulates faster."""
    asked = {"model": "mixtral-8x7b", "cluster": "h100", "gpus": 64, "batch": 256, "mem": "80GB", "margin": 0.0}
    ours, interleaved = (
        api.plan(fix=fix, runners_up=0, **asked)  # type: ignore[arg-type]
        for fix in ((), ("schedule=interleaved", "pp=4"))
    )
    assert ours.prediction.step_seconds <= 1.01 * interleaved.prediction.step_seconds


def test_other_shapes_of_near_closed_form_are_simulated() -> None:
    asked = random_instance(16, 4)
    request, pricer = asked.request(40_000), LayerPricer(asked.profile)
    best = search(request, pricer)
    assert best is not None
    first, *others = finalists(request, pricer, best, wanted=0, near=True)
    quicker = quickest([first, *others])
    assert quicker.solved.partition.time > first.solved.partition.time
    assert quicker.seconds < 0.96 * first.seconds


def test_where_links_between_nodes_are_slow_no_pipeline_by_hand_is_quicker(tmp_path: Path) -> None:
    """Closed forms charge senders all of a send, of which compute hides a half: by them 24 stages are the best."""
    cluster, by_hand = tmp_path / "slow.yaml", tmp_path / "by-hand.yaml"
    cluster.write_text(
        "name: slow\ndevice: A100-SXM4-80GB\nlevels:\n- {name: node, size: 6, link: nvlink3}\n"
        "- {name: cluster, size: any, link: ethernet, bandwidth: 3.0e+9, lanes: 1}\n"
    )
    runs = [{"layers": f"layers.{4 * stage}..layers.{4 * stage + 3}", "strategy": "data3"} for stage in range(8)]
    ends: list[list[dict[str, str]]] = [[] for _ in range(7)]
    before, after = ([{"layers": name, "strategy": "data3"}] for name in ("before", "after"))
    stages = [{"runs": [*a, run, *b]} for a, run, b in zip([before, *ends], runs, [*ends, after], strict=True)]
    plan = {"devices": 24, "global_batch": 96, "microbatches": 32, "schedule": "zb-2p", "stages": stages}
    by_hand.write_text(json.dumps(plan))
    asked = {"model": "llama2-7b", "cluster": str(cluster), "gpus": 24}
    ours = api.plan(batch=96, forbid=["tensor", "context", "recompute"], runners_up=0, **asked)  # type: ignore[arg-type]
    other = api.evaluate(by_hand, mem="80GB", **asked)  # type: ignore[arg-type]
    assert other.fits
    assert ours.prediction.step_seconds <= 1.01 * other.prediction.step_seconds


@pytest.mark.parametrize("seed", [1, 3])
def test_layers_that_must_share_the_batch_alike_do(seed: int) -> None:
    def degrees(profile: Profile) -> set[int]:
        plan = find_plan(profile, devices=4, global_batch=8, budget=10**12, runners_up=0)
        return {run.strategy.batch_degree for stage in plan.stages for run in stage.runs}

    profile = random_profile(random.Random(seed), devices=4)
    assert len(degrees(profile)) > 1
    assert len(degrees(replace(profile, needs=PlanNeeds(alike="what blocks take")))) == 1


@pytest.mark.parametrize("seed", range(4))
def test_ranges_are_of_plans_priced_anew_without_a_pipeline(seed: int) -> None:
    profile = random_profile(random.Random(seed), devices=4)
    if seed % 2:  # two nodes
        levels = (replace(profile.cluster.levels[0], size=2), replace(profile.cluster.levels[0], name="far"))
        profile = replace(profile, cluster=replace(profile.cluster, levels=levels))
    profile = replace(profile, origin=replace(profile.origin, kind=OriginKind.ESTIMATED))
    plan = find_plan(profile, devices=4, global_batch=8, budget=10**9, runners_up=0)
    (found,) = ranges_of(LayerPricer(profile), [plan])

    def scaled(one: Profile, factor: float) -> Profile:
        layers = (replace(p, forward=factor * p.forward, backward=factor * p.backward) for p in one.layers)
        return replace(one, layers=tuple(layers))

    straggling = spread_of(load_calibration()).straggling
    assert straggling > 0.0
    late = (replace(profile, straggling=straggling), 1.0)
    steps = [evaluate(scaled(*one), plan).prediction for one in ((profile, 1.0), *scenarios_of(profile), late)]
    seconds = [step.step_seconds for step in steps if step is not None]
    assert len(seconds) == 6
    close = 1e-9 if plan.pipeline == 1 else 0.05
    assert found.least == pytest.approx(min(seconds), rel=close)
    assert found.most == pytest.approx(max(seconds), rel=close)
    assert found.mean == pytest.approx(sum(seconds) / len(seconds), rel=close)


def test_scenarios_go_as_far_as_constants_that_rest_on_runs() -> None:
    def link(efficiency: float) -> LinkConstants:
        return LinkConstants(efficiency, 1e-6)

    links = {"nvlink4": link(0.2), "infiniband-ndr": link(0.9), "roce": link(0.6), "efa": link(0.3)}
    stacks = {
        "a": StackConstants(hidden={"data": 0.8, "zero": 0.02}, straggling=0.01),
        "b": StackConstants(hidden={"zero": 0.4, "tensor": 0.1}, straggling=0.03),
        "c": StackConstants(hidden={"data": 0.2}, straggling=0.5),
    }
    seen = ("links/nvlink4", "links/infiniband-ndr", "links/roce", "stacks/a", "stacks/b")
    origins = {name: ConstantsOrigin("runs", rows=3) for name in seen} | {"stacks/c": ConstantsOrigin("a guess")}
    spread = spread_of(Calibration({}, links, stacks, origins=origins, expected_error={"without_family": 0.12}))
    assert spread == Spread(links=0.6 / 0.9, hidden=0.4 / 0.8, kernels=0.12, straggling=0.03)
    assert spread_of(Calibration({}, {}, {})) == Spread(links=1.0, hidden=1.0, kernels=0.0, straggling=0.0)


@pytest.mark.parametrize(
    ("model", "name", "degree"), [("mixtral-8x7b", "experts", "expert"), ("llama3-8b", "context", "context")]
)
def test_plans_that_spread_experts_or_tokens_are_among_the_finalists(model: str, name: str, degree: str) -> None:
    plan = api.plan(model=model, cluster="h100", gpus=16, mem="80GB", batch=16, runners_up=12)
    (found,) = [one for one in plan.alternatives if one.summary.startswith(f"{name}: ")] or [None]
    assert found is not None, [one.summary for one in plan.alternatives]
    assert f"{degree}8" in found.summary
    assert 0.0 < found.least_seconds <= found.step_seconds <= found.most_seconds


def test_of_plans_within_the_tolerance_the_one_of_least_expected_step_is_chosen() -> None:
    profile = random_profile(random.Random(1), devices=4)
    plan = find_plan(profile, devices=4, global_batch=8, budget=10**9, runners_up=0)

    def finalist(name: str, seconds: float, mean: float) -> Finalist:
        own = replace(plan, prediction=replace(plan.prediction, step_seconds=seconds))
        return Finalist(name, None, own, True, Range(seconds, 2 * mean, mean))  # type: ignore[arg-type]

    options = [finalist("quick", 1.0, 1.5), finalist("sure", 1.009, 1.2), finalist("slow", 1.1, 1.1)]
    assert quickest(options, 0.01).name == "sure"
    assert quickest(options, 0.0).name == "quick"
    assert quickest([options[0], finalist("as sure", 1.0, 1.495)], 0.01).name == "quick"


@settings(max_examples=10, **QUIET)
@given(st.integers(0, 10**9), st.sampled_from([0.01, 0.05, 0.2]))
def test_no_plan_of_fewer_runs_is_within_the_tolerance(seed: int, tolerance: float) -> None:
    draw = random.Random(seed)
    asked = draw.choice([random_instance, random_instance, uniform_instance])(seed)
    brute = brute_of(asked)
    peaks = brute.peaks()
    if not peaks:
        return
    budget = draw.choice(peaks)
    best, request, pricer = brute.best(budget), asked.request(budget), LayerPricer(asked.profile)
    quick = search(request, pricer, slack=SLACK * tolerance)
    assert quick is not None
    found = simplest(request, pricer, quick, tolerance)
    plan = finished(request, pricer, found)
    assert plan.prediction.peak_memory <= budget
    seconds = bound_of(asked.profile, plan)
    assert best.seconds * (1 - 1e-9) <= seconds <= best.seconds / (1 - tolerance) * (1 + 1e-9)
    assert found.gap <= tolerance * (1 + 1e-6)
    assert seconds * (1 - found.gap) <= best.seconds * (1 + 1e-9)
    if found.problem.shape.virtual == 1:  # one layout at boundaries, one strategy of layers that share parameters, ...
        strategies = [strategy for stage in found.partition.stages for strategy in stage.strategies]
        assert brute.allowed(found.partition.cuts, strategies)
    # What is not proven of the best is lost to the tolerance.
    limit = seconds * (1 - found.gap) / (1 - tolerance)
    for runs in range(1, most_runs(request, found)):
        simple = replace(brute_of(asked), runs=runs).best(budget)
        assert simple is None or simple.seconds > limit * (1 - 1e-9)


@settings(max_examples=10, **QUIET)
@given(st.integers(0, 10**9), st.sampled_from([1, 2]))
def test_the_best_plan_of_few_runs_is_what_brute_force_finds(seed: int, runs: int) -> None:
    asked = random_instance(seed)
    brute = replace(brute_of(asked), runs=runs)
    peaks = brute.peaks()
    for budget in (peaks[0] - 1, peaks[0], random.Random(seed).choice(peaks)) if peaks else (10**9,):
        best, request, pricer = brute.best(budget), asked.request(budget), LayerPricer(asked.profile)
        found = search(replace(request, runs=runs), pricer)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            plan = finished(request, pricer, found)
            assert most_runs(request, found) <= runs
            assert bound_of(asked.profile, plan) == pytest.approx(best.seconds, rel=1e-9)


@pytest.mark.parametrize("slower", [1.0, 1.1])
@pytest.mark.parametrize("seed", range(4))
def test_no_run_can_take_another_strategy_of_the_plan_and_make_it_simpler(seed: int, slower: float) -> None:
    profile = random_profile(random.Random(seed), devices=4, blocks=6, tied=seed % 2 == 1)
    pricer, space = LayerPricer(profile), Space(profile.graph, 4, GALVATRON)
    fixed = Fixed(pipeline=2, microbatches=4, forbidden=("offload", "context", "expert"))
    ample = Request(profile.graph, 4, 8, 10**9, fixed, (Schedule.ONE_F_ONE_B,), space)
    most = finalists(ample, pricer, search(ample, pricer, effort=10_000), 0)[0].alternative.peak_memory
    request = replace(ample, budget=(most + 2 * least_budget(ample, pricer).most) // 3)
    first = finalists(request, pricer, search(request, pricer, effort=10_000), 0)[0]
    limit = slower * first.seconds
    found = with_fewer_runs(request, pricer, first, limit, inf)
    assert found.fits
    assert found.seconds <= limit
    assert sum(len(stage.runs) for stage in found.plan.stages) <= sum(len(stage.runs) for stage in first.plan.stages)
    layers = {layer.name: layer for layer in request.graph.layers}
    tied = {name for tie in request.graph.ties for name in (tie.first, tie.second)}
    for place, stage in enumerate(found.plan.stages):
        for at, (left, right) in enumerate(pairwise(stage.runs)):
            for run, beside in ((left, right), (right, left)):
                if any(layers[name].role is not Role.BLOCK for name in (run.first, beside.first)) or tied:
                    continue
                if beside.strategy in space.strategies(layers[run.first].kind, found.plan.stage_devices, fixed):
                    runs = [replace(one, strategy=beside.strategy) if one is run else one for one in stage.runs]
                    stages = [*found.plan.stages]
                    stages[place] = replace(stage, runs=tuple(runs))
                    other = price_plan(pricer, replace(found.plan, stages=tuple(stages)))
                    assert not request.fits(other) or other.prediction.step_seconds > limit * (1 - 1e-9), at
