"""Backends that do the same to all layers: the plan is the best of what they can do, and says who trains by it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from galvatron_lite import api
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.model.graph import Recompute, Role
from galvatron_lite.parallelism.backends import DEEPSPEED, backend_named
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.io import check_runs, read_plan, write_plan
from galvatron_lite.plans.schema import LayerRun, Mode, Plan, Schedule, Stage, TrainedBy
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.families import attempts
from galvatron_lite.search.families.family import PlanTask
from galvatron_lite.search.planner import request_of
from galvatron_lite.search.shapes import Request, Session
from galvatron_lite.search.space import Fixed

GPUS, BATCH, MEMORY = 4, 16, 24 * 10**9
_ASKED = {"mem": MEMORY, "batch": BATCH, "backend": "deepspeed", "runners_up": 20}


@pytest.fixture(scope="module")
def profile() -> Profile:
    return api.find_profile(model="gpt2", cluster="a100-40gb", gpus=GPUS, sequence=1024)


@pytest.fixture(scope="module")
def found(profile: Profile) -> Plan:
    return api.plan(profile, **_ASKED)


def test_one_stage_for_all_layers_and_the_plan_says_who_trains(found: Plan, tmp_path: Path) -> None:
    assert found.backend is TrainedBy.DEEPSPEED
    assert len(found.stages) == 1
    assert {(run.strategy.zero_stage, run.strategy.offload) for run in found.stages[0].runs}.__len__() == 1
    assert check_runs(found) is found
    write_plan(found, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == found


def test_no_other_uniform_plan_is_quicker(found: Plan, profile: Profile) -> None:
    """Brute force over one strategy for all layers, offload aside, and every number of micro-batches."""
    ways = [Strategy(data=GPUS), *(Strategy(zero=GPUS, zero_stage=stage) for stage in (1, 2, 3))]
    least = float("inf")
    for way, recompute, count in product(ways, Recompute, (1, 2, 4)):
        priced = _priced(profile, replace(way, recompute=recompute), count)
        assert priced.prediction is not None
        if priced.prediction.peak_memory <= MEMORY:
            least = min(least, priced.prediction.step_seconds)
    assert found.prediction is not None
    assert found.prediction.step_seconds <= least * (1 + 1e-9)


def test_of_many_candidates_none_is_slower_than_what_is_near_the_quickest(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each a little slower than the one before: near that one, but the last ones far from the first."""
    taken = {Fixed(microbatches=count): 10**9 + 15 * 10**6 * count for count in (1, 2, 3, 4)}

    def search(request: Request, _pricer: LayerPricer, below: float = inf, **_options: Any) -> Any:
        time = taken.get(request.fixed, inf)
        return SimpleNamespace(partition=SimpleNamespace(time=time)) if time < below else None

    monkeypatch.setattr(attempts, "search", search)
    session, backend = Session(profile), backend_named("megatron")
    request = request_of(session, GPUS, BATCH, MEMORY, Fixed(), None, backend)
    kept = attempts._most_promising(PlanTask(session, request, backend, None), list(taken))
    assert kept == list(taken)[:2]


@pytest.mark.parametrize("pins", [(), ("pp=1", "layers.*.tensor=2")])
def test_all_layers_of_some_models_have_the_same_samples(profile: Profile, pins: tuple[str, ...]) -> None:
    asked = {"mem": MEMORY, "batch": BATCH, "fix": pins, "runners_up": 0}
    folded = api.plan(replace(profile, graph=replace(profile.graph, folded="alibi of layers.0")), **asked)
    assert len({run.strategy.batch_degree for stage in folded.stages for run in stage.runs}) == 1
    free, one = api.plan(profile, **asked).prediction, folded.prediction
    assert free is not None
    assert one is not None
    assert one.step_seconds >= free.step_seconds * 0.99


def _priced(profile: Profile, strategy: Strategy, count: int) -> Plan:
    layers = profile.graph.layers
    own = [strategy if layer.role is Role.BLOCK else replace(strategy, recompute=Recompute.NONE) for layer in layers]
    runs = tuple(LayerRun(layer.name, layer.name, 1, one) for layer, one in zip(layers, own, strict=True))
    plan = Plan(1, "gpt2", GPUS, BATCH, count, Schedule.ONE_F_ONE_B, profile.graph.precision, (Stage(runs),))
    return evaluate(profile, plan)


def test_less_memory_takes_a_higher_stage_or_the_host(profile: Profile) -> None:
    lean = api.plan(profile, **{**_ASKED, "mem": 3 * 10**9})
    strategies = {run.strategy for run in lean.stages[0].runs}
    assert all(one.zero_stage == 3 or one.offloads_states for one in strategies)


def test_host_memory_that_pins_do_not_allow_is_not_blamed(profile: Profile) -> None:
    session, backend = Session(profile), backend_named("galvatron")
    request = request_of(session, GPUS, BATCH, MEMORY, Fixed(), None, backend)
    task = PlanTask(session, request, backend, None)

    def planned(task: PlanTask, explain: bool = True) -> Plan:
        if task.request.fixed.strategy:
            raise InputError("--fix", "offload=activations", "Nothing is left.")
        raise InfeasibleError(f"No plan exists{', which is explained' * explain}.")

    with pytest.raises(InfeasibleError, match="explained"):
        attempts.with_reserve(planned, task)


def test_nothing_fits_names_the_least_of_all_ways(profile: Profile) -> None:
    with pytest.raises(InfeasibleError) as caught:
        api.plan(profile, **{**_ASKED, "mem": 10**9, "runners_up": 0})
    smallest = caught.value.smallest_budget
    assert smallest is not None
    assert api.plan(profile, **{**_ASKED, "mem": smallest, "runners_up": 0}).fits


def test_layers_without_parameters_have_nothing_to_shard() -> None:
    profile = api.find_profile(model="vgg16", cluster="a100-40gb", gpus=2)
    found = api.plan(profile, mem=MEMORY, batch=8, backend="deepspeed", runners_up=0)
    kinds = {layer.name: profile.graph.kind_of(layer).parameters.total for layer in profile.graph.layers}
    assert 0 in kinds.values()
    sharded = {run.strategy.zero_stage for run in found.stages[0].runs if kinds[run.first]}
    assert len(sharded) == 1
    assert sharded != {0}
    assert check_runs(found) is found


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ({"mode": "inference"}, "Backend deepspeed is for training"),
        ({"fix": "tp=2"}, "Backend deepspeed cannot run"),
        ({"fix": "pp=2"}, "no pipelines"),
        ({"allow_delay": True, "fix": ("schedule=cyclic",)}, "without delay"),
    ],
)
def test_what_deepspeed_does_not_run_is_refused(profile: Profile, setup: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        api.plan(profile, **{**_ASKED, **setup})


def test_plans_of_unlike_layers_are_refused(found: Plan) -> None:
    (stage,) = found.stages
    first = replace(stage.runs[0], strategy=Strategy(zero=GPUS, zero_stage=3))
    last = replace(stage.runs[-1], strategy=Strategy(zero=GPUS, zero_stage=2))
    mixed = replace(found, stages=(replace(stage, runs=(first, last)),))
    with pytest.raises(InputError, match="does the same to all layers"):
        check_runs(mixed)
    assert check_runs(replace(mixed, backend=TrainedBy.GALVATRON)) is not None
    with pytest.raises(InputError, match="is for training"):
        check_runs(replace(found, mode=Mode.INFERENCE))
    kept = replace(last, strategy=Strategy(zero=GPUS, zero_stage=3, offload=Offload.ACTIVATIONS))
    with pytest.raises(InputError, match="only price it"):
        check_runs(replace(found, stages=(replace(stage, runs=(kept,)),)), DEEPSPEED)
