"""Branches on devices of their own in the search: chosen where they are quicker or alone fit, told otherwise."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

from galvatron_lite.api import evaluate
from galvatron_lite.cost.forward_only import for_inference
from galvatron_lite.cost.plan import evaluate as price
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.model.graph import Passed
from galvatron_lite.parallelism.backends import GALVATRON, in_mode
from galvatron_lite.parallelism.branch.cost import places
from galvatron_lite.parallelism.branch.find import find_regions
from galvatron_lite.parallelism.strategy import Offload, Recompute, Strategy
from galvatron_lite.plans.io import check_runs
from galvatron_lite.plans.schema import PLAN_VERSION, BranchPlacement, Mode, Plan, Proof, Schedule, Stage
from galvatron_lite.profiler.schema import HostOverhead, Profile
from galvatron_lite.search.families.branches import branch_plans, may_branch
from galvatron_lite.search.families.family import PlanTask, seconds_of
from galvatron_lite.search.planner import find_plan, request_of
from galvatron_lite.search.result import runs_of
from galvatron_lite.search.shapes import Session
from galvatron_lite.search.space import Fixed, Space
from tests.branchy import plain_profile, random_towers
from tests.factories import make_cluster

PLENTY = 2**29


def asked(profile: Profile, devices: int, batch: int, mode: Mode, budget: int = PLENTY, **pins: object) -> PlanTask:
    session = Session(profile, mode)
    fixed = Fixed(**pins)  # type: ignore[arg-type]
    request = request_of(session, devices, batch, budget, fixed, None, GALVATRON)
    return PlanTask(session, request, GALVATRON)


def every_plan(profile: Profile, devices: int, batch: int) -> list[Plan]:
    """All plans for inference in one micro-batch that put each tower on a group of its own or together with others:
    every pair of groups, every strategy of every layer that the space declares."""
    graph = profile.graph
    (region,) = find_regions(graph)
    space = Space(graph, profile.cluster.levels[0].size, in_mode(GALVATRON, Mode.INFERENCE))
    trunk = [layer for layer in graph.layers if layer.name not in region.layers]
    shared = Strategy(data=devices) if batch % devices == 0 else Strategy()
    stage = Stage(runs_of(trunk, [shared] * len(trunk)))
    known = {layer.name: layer for layer in graph.layers}
    plans = []
    for where in product(places(devices, range(1, devices), devices), repeat=len(region.branches)):
        apart = all(a == b or not set(a) & set(b) for a in where for b in where)
        if not apart or len(set(where)) < 2:
            continue
        ways = []
        for branch, place in zip(region.branches, where, strict=True):
            layers = [known[name] for name in branch.layers]
            offered = [space.strategies(layer.kind, len(place), Fixed()) for layer in layers]
            ways.append([
                BranchPlacement(branch.name, branch.roots, place.start, len(place), runs_of(layers, own))
                for own in product(*offered)
                if all(batch % one.batch_degree == 0 for one in own)
            ])  # fmt: skip
        plans += [
            Plan(
                PLAN_VERSION, graph.name, devices, batch, 1, Schedule.ONE_F_ONE_B, graph.precision, (stage,),
                branches=branches, mode=Mode.INFERENCE,
            )
            for branches in product(*ways)
        ]  # fmt: skip
    return plans


@pytest.mark.parametrize("seed", range(4))
def test_no_placement_and_no_strategies_are_quicker(seed: int) -> None:
    """Against every plan there is, in inference, where a branch takes one time."""
    draw = random.Random(seed)
    devices, batch = draw.choice([(2, 4), (3, 6), (3, 4)])
    profile = random_towers(draw, devices, 2)
    (found,) = branch_plans(asked(profile, devices, batch, Mode.INFERENCE, microbatches=1))
    least = min(seconds_of(price(profile, plan)) for plan in every_plan(profile, devices, batch))
    assert seconds_of(found) == pytest.approx(least, rel=1e-9)


def test_branches_are_used_where_they_are_quicker_which_is_reported() -> None:
    """One sample a step cannot be shared out: 3 s and 2 s side by side instead of one after another."""
    profile = plain_profile([3.0, 2.0])
    found = find_plan(profile, devices=2, global_batch=1, budget=PLENTY, fixed=Fixed(forbidden=("pipeline",)))
    assert {one.name: one.devices for one in found.branches} == {"t0": 1, "t1": 1}
    assert {one.first for one in found.branches} == {0, 1}
    assert seconds_of(found) == pytest.approx(9.0, rel=1e-6)
    assert found.provenance.proof is Proof.FEASIBLE
    said = found.provenance.notes[0]
    assert "t0 on device" in said
    assert "(9 s)" in said.replace("9.00", "9").replace("9.0 ", "9 ")
    assert found.fits


def test_the_gain_is_the_sum_over_the_longest() -> None:
    """FLOPs of the published pair: 262.4 and 188.5 GFLOPs side by side are 1.72 times as quick."""
    profile = plain_profile([2.624, 1.885], cluster=make_cluster(2, bandwidth=1e15, latency=0.0))
    plan = find_plan(profile, devices=2, global_batch=1, budget=PLENTY, mode=Mode.INFERENCE)
    alone = find_plan(profile, devices=1, global_batch=1, budget=PLENTY, mode=Mode.INFERENCE)
    assert plan.branches
    assert seconds_of(alone) / seconds_of(plan) == pytest.approx((262.4 + 188.5) / 262.4, rel=1e-3)


@pytest.mark.parametrize("mode", [Mode.TRAINING, Mode.INFERENCE])
def test_towers_shorter_than_a_call_are_better_off_on_one_device(mode: Mode) -> None:
    """On the same host: towers of half a millisecond lose, those of half a second win; which is said."""
    small, large = (plain_profile([work, work], overhead=HostOverhead(branch=2e-3)) for work in (1e-4, 0.5))
    for profile, worth in ((small, False), (large, True)):
        found = find_plan(profile, devices=2, global_batch=1, budget=PLENTY, mode=mode)
        alone = find_plan(profile, devices=1, global_batch=1, budget=PLENTY, mode=mode)
        (apart,) = branch_plans(asked(profile, 2, 1, mode))
        assert (seconds_of(apart) < seconds_of(alone)) is worth
        said = any("a single device is predicted" in note for note in found.provenance.notes)
        # forward passes of one sample have no other plan on two devices
        assert (bool(found.branches) and not said) is worth
        assert bool(found.branches) is worth or mode is Mode.INFERENCE
        assert said is (seconds_of(alone) < seconds_of(found))


def test_one_device_is_mentioned_only_where_it_fits() -> None:
    profile = plain_profile([1e-4, 1e-4], parameters=[1000, 1000], overhead=HostOverhead(branch=2e-3))
    pins = Fixed(forbidden=("pipeline", "data"))
    for budget, told in ((PLENTY, True), (24_000, False)):
        found = find_plan(profile, devices=2, global_batch=1, budget=budget, fixed=pins)
        assert found.branches
        assert any("a single device is predicted" in note for note in found.provenance.notes) is told


def test_too_small_to_be_worth_it() -> None:
    """Towers of a millisecond whose outputs take a second to send: the ordinary plan, and the other one is told."""
    slow = make_cluster(2, bandwidth=1e4, latency=1e-3)
    profile = plain_profile([1e-3, 1e-3], cluster=slow, given=10**4)
    found = find_plan(profile, devices=2, global_batch=2, budget=PLENTY)
    assert not found.branches
    told = [one for one in found.alternatives if "t0 on device" in one.summary]
    assert len(told) == 1
    assert told[0].step_seconds > seconds_of(found)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
def test_the_choice_turns_where_moving_outputs_takes_what_is_gained(factor: float) -> None:
    """Towers that take 1 s forward and 2 s backward however many samples they have: 3 s are gained side by side; one
    sample of each output and of its gradient goes to the other device, which takes a share of that, or more."""
    size = 10**6
    links = make_cluster(2, bandwidth=size / (1.5 * factor), latency=0.0)
    profile = plain_profile([1.0, 1.0], cluster=links, given=size, fixed=True)
    found = find_plan(profile, devices=2, global_batch=2, budget=PLENTY)
    assert bool(found.branches) == (factor < 1)
    assert seconds_of(found) == pytest.approx(3 + 3 * factor if factor < 1 else 6, rel=1e-3)


def test_where_only_they_fit() -> None:
    """Two towers of 16 MB of states and a gradient of 4 MB each: one fits on each device of 24 MB, and not both."""
    profile = plain_profile([1.0, 1.0], parameters=[10**6, 10**6])
    pins = Fixed(forbidden=("pipeline", "zero"))
    found = find_plan(profile, devices=2, global_batch=2, budget=24 * 10**6, fixed=pins)
    assert {one.first for one in found.branches} == {0, 1}
    assert found.fits
    assert "no plan without them fits" in found.provenance.notes[0]
    with pytest.raises(InfeasibleError):
        find_plan(profile, devices=2, global_batch=2, budget=10 * 10**6, fixed=pins)


def test_more_micro_batches_where_one_does_not_fit() -> None:
    """A tower keeps 5 bytes a sample here; with 2**20 times as many, eight samples at once are too many."""
    profile = plain_profile([1.0, 1.0])
    points = tuple(
        replace(one, kept=one.kept << 20, working=one.working << 20, forward_working=one.forward_working << 20)
        for one in profile.layers
    )
    (found,) = branch_plans(asked(replace(profile, layers=points), 2, 8, Mode.TRAINING, 40 << 20))
    assert found.fits
    assert found.microbatches == 2


def test_a_dependent_pair_is_never_split() -> None:
    """The same towers, the second of which reads the first."""
    profile = plain_profile([3.0, 2.0])
    graph = profile.graph
    tied = replace(graph, tensors=(*graph.tensors, Passed("t0.0", ("t1.0",), 1)))
    found = find_plan(replace(profile, graph=tied), devices=2, global_batch=1, budget=PLENTY)
    assert not found.branches
    assert not any("t0 on" in one.summary for one in found.alternatives)
    split = branch_plans(asked(profile, 2, 1, Mode.TRAINING))[0]
    with pytest.raises(InputError, match="no independent branches"):
        evaluate(split, replace(profile, graph=tied))


def test_a_chain_is_not_looked_into() -> None:
    graph = plain_profile([1.0, 1.0]).graph
    assert may_branch(graph)
    assert not may_branch(replace(graph, tensors=()))
    whole = tuple(Passed(a.name, (b.name,), 1) for a, b in zip(graph.layers, graph.layers[1:], strict=False))
    assert not may_branch(replace(graph, tensors=whole))


@pytest.mark.parametrize(
    "pins",
    [{"pipeline": 2}, {"schedule": Schedule.GPIPE}, {"strategy": (("zero_stage", 3),)}, {"forbidden": ("branches",)}],
)
def test_pins_that_they_cannot_keep_leave_them_out(pins: dict[str, object]) -> None:
    assert branch_plans(asked(plain_profile([3.0, 2.0]), 2, 2, Mode.TRAINING, **pins)) == []


def test_each_branch_has_strategies_of_its_own() -> None:
    """A long tower shares the samples on three devices, the short one has the fourth."""
    profile = plain_profile([6.0, 1.0], cluster=make_cluster(4, bandwidth=1e12, latency=0.0))
    (found,) = branch_plans(asked(profile, 4, 12, Mode.TRAINING))
    where = {one.name: (one.devices, one.runs[0].strategy.batch_degree) for one in found.branches}
    assert where == {"t0": (3, 3), "t1": (1, 1)}
    assert seconds_of(found) == pytest.approx(12 / 3 * 18, rel=1e-3)


def test_an_evaluated_plan_is_priced_as_it_was_found() -> None:
    profile = random_towers(random.Random(5), 4, 3, read=30)
    for mode in Mode:
        (found,) = branch_plans(asked(profile, 4, 8, mode))
        assert evaluate(found, profile).prediction == found.prediction
        assert found.mode is mode
    assert for_inference(profile).forward_only


def test_a_strategy_of_a_branch_that_nobody_runs_is_refused() -> None:
    (found,) = branch_plans(asked(plain_profile([3.0, 2.0]), 2, 1, Mode.TRAINING))
    assert check_runs(found) is found
    strategy = Strategy(offload=Offload.ACTIVATIONS, recompute=Recompute.SELECTIVE)
    runs = (replace(found.branches[0].runs[0], strategy=strategy),)
    with pytest.raises(InputError, match=r"branches\.0"):
        check_runs(replace(found, branches=(replace(found.branches[0], runs=runs), *found.branches[1:])))


def test_models_without_branches_are_planned_without_looking_for_them() -> None:
    """What finds branches loads networkx, which takes longer than planning does."""
    code = (
        "import sys; from galvatron_lite import api;"
        "api.plan(model='resnet50', cluster='a100-80gb', gpus=2);"
        "sys.exit('networkx' in sys.modules or 'pulp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_several_rows_a_sample_leave_branches_out() -> None:
    profile = plain_profile([3.0, 2.0])
    folded = replace(profile, graph=replace(profile.graph, folded="0.0 of a"))
    assert branch_plans(asked(profile, 2, 2, Mode.TRAINING))
    assert not branch_plans(asked(folded, 2, 2, Mode.TRAINING))


def test_where_the_trunk_may_not_share_the_samples_every_device_works_on_all() -> None:
    profile = plain_profile([3.0, 2.0])
    (found,) = branch_plans(asked(profile, 2, 2, Mode.TRAINING, forbidden=("data",)))
    assert {run.strategy for run in found.stages[0].runs} == {Strategy()}
    assert seconds_of(found) == pytest.approx(2 * 9, rel=1e-3)
