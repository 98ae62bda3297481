"""Plans whose stages, or all layers, are alike: by brute force, and what backends take."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise, product
from pathlib import Path

import pytest

from galvatron_lite import api
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.stage import Shape
from galvatron_lite.cost.step import bound_seconds, groups_of, limit_memory, price_stages
from galvatron_lite.errors import GalvatronError, InfeasibleError, InputError
from galvatron_lite.model.graph import ModelGraph, Recompute, Role
from galvatron_lite.parallelism.backends import ANY, DEEPSPEED, GALVATRON
from galvatron_lite.parallelism.pipeline.schedule import group_of
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.execution import check_runs
from galvatron_lite.plans.io import read_plan, write_plan
from galvatron_lite.plans.schema import LayerRun, Mode, Plan, Schedule, Stage, TrainedBy
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.best_first import SolvedPlan, finished, search
from galvatron_lite.search.planner import find_plan, request_of
from galvatron_lite.search.problem import Problem, cuts_of, even_cuts
from galvatron_lite.search.shapes import Request, Session, with_edges, with_ties
from galvatron_lite.search.space import Fixed, Space
from tests.factories import random_profile
from tests.search.instances import Few, varied


def every_uniform(request: Request, profile: Profile, shape: Shape) -> Iterator[tuple[float, int]]:
    """Step seconds and peak bytes of every uniform plan of a shape."""
    for cuts in cuts_of(request.graph, shape.stages * shape.virtual):
        yield from every_uniform_between(request, profile, shape, cuts)


def every_uniform_between(
    request: Request, profile: Profile, shape: Shape, cuts: tuple[int, ...]
) -> Iterator[tuple[float, int]]:
    """The same with these boundaries."""
    pricer, graph = LayerPricer(profile), request.graph
    sizes = [b - a for a, b in pairwise(cuts)]
    last = len(graph.layers) - 1
    options = [
        [
            one
            for one in request.space.strategies(graph.layers[place].kind, shape.stage_devices, Fixed())
            if shape.microbatch % one.batch_degree == 0
        ]
        for place in range(last + 1)
    ]
    blocks = [one for one in options[1] if all(one in own for own in options[1:last])]
    chunks = shape.stages * shape.virtual
    groups = [group_of(shape.schedule, shape.stages, chunk) for chunk in range(chunks) for _ in range(sizes[chunk])]
    held = [[place for place in range(1, last) if groups[place] == group] for group in range(shape.stages)]
    parts = min(8, *map(len, held))
    # In which of the parts of its group's blocks each block is.
    part = {place: number * parts // len(own) for own in held for number, place in enumerate(own)}
    alike = len({layer.kind for layer in graph.layers[1:last]}) == 1
    pairs = [
        (a, b, count)
        for a, b in product(blocks, blocks)
        for count in (
            range(1, parts)
            if a != b and replace(a, recompute=Recompute.NONE) == replace(b, recompute=Recompute.NONE) and alike
            else (0,)
            if a == b
            else ()
        )
    ]
    for before, (block, other, count), after in product(options[0], pairs, options[last]):
        if graph.ties and before != after:
            continue
        own = [block if part[place] < count else other for place in range(1, last)]
        try:
            costs = price_stages(pricer, shape, sizes, [before, *own, after])
        except InputError:
            continue
        context = profile.cluster.device.context
        peaks = [limit_memory(shape, group, own, context).total for group, own in enumerate(groups_of(shape, costs))]
        yield bound_seconds(profile, shape, costs), max(peaks)


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE_V])
@pytest.mark.parametrize("seed", [*range(8), 12, 14])
def test_equals_every_uniform_plan(seed: int, schedule: Schedule) -> None:
    draw = random.Random(seed)
    devices, blocks, pipeline = draw.choice([2, 4]), draw.randint(4, 6), 2
    if seed > 7:
        devices, blocks, pipeline = 4, 6 if schedule is Schedule.INTERLEAVED else 8, 4
    profile = random_profile(draw, devices=devices, blocks=blocks, alike=seed % 2 == 0, tied=seed % 3 == 0)
    profile = varied(profile, draw) if seed % 4 else profile
    space: Space = Few(profile.graph, profile.cluster.levels[0].size, ANY, seed=seed, most=8)
    fixed = Fixed(pipeline=pipeline)
    asked = Request(profile.graph, devices, 4, 10**9, fixed, (schedule,), space)
    plans = []
    for count in (1, 2, 4):
        if schedule is Schedule.INTERLEAVED and count % pipeline:
            continue
        for virtual in range(2, (blocks + 2) // pipeline + 1) if schedule is Schedule.INTERLEAVED else (2,):
            plans += every_uniform(asked, profile, Shape(devices, pipeline, count, 4 // count, schedule, virtual))
    peaks = sorted({peak for _, peak in plans})
    if not plans:
        assert search(asked, LayerPricer(profile)) is None
        return
    for budget in {peaks[0], draw.choice(peaks), peaks[-1]}:
        best = min(seconds for seconds, peak in plans if peak <= budget)
        request = Request(profile.graph, devices, 4, budget, fixed, (schedule,), space)
        pricer = LayerPricer(profile)
        found = search(request, pricer)
        assert found.gap == 0.0
        plan = finished(request, pricer, found)
        assert plan.virtual_stages == found.problem.shape.virtual > 1
        assert plan.prediction.peak_memory <= budget
        strategies = [one for stage in found.partition.stages for one in stage.strategies]
        sizes = [b - a for a, b in pairwise(found.partition.cuts)]
        costs = price_stages(pricer, found.problem.shape, sizes, strategies)
        assert bound_seconds(profile, found.problem.shape, costs) == pytest.approx(best, rel=1e-9)
    nothing = Request(profile.graph, devices, 4, peaks[0] - 1, fixed, (schedule,), space)
    assert search(nothing, LayerPricer(profile)) is None


def test_chunks_share_out_blocks_or_blocks_and_edges_evenly() -> None:
    graph = random_profile(random.Random(1), blocks=7).graph
    assert cuts_of(graph, 4) == [(0, 3, 5, 7, 9), (0, 2, 5, 7, 9)]
    assert cuts_of(graph, 7) == [(0, 2, 3, 4, 5, 6, 7, 9)]
    assert cuts_of(graph, 9) == [tuple(range(10))]


def test_a_group_that_holds_the_edges_of_a_model_alone() -> None:
    """Under ZB-V the first group has the first stage and the last, which may be an embedding and a head."""
    found = api.plan(model="gpt2", cluster="h100", gpus=4, batch=48, mem="80GB", fix={"schedule": "zb-v", "pp": 4})
    assert found.schedule is Schedule.ZERO_BUBBLE_V


def blocks_of(plan: Plan, graph: ModelGraph) -> list[int]:
    """Blocks of each stage."""
    blocks = [layer.role is Role.BLOCK for layer in graph.layers]
    ends = list(accumulate(sum(run.count for run in stage.runs) for stage in plan.stages))
    return [sum(blocks[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def by_hand(problem: Problem) -> float:
    """Picoseconds of the best even plan of two stages: every best way of each, in every combination."""
    cuts = even_cuts(problem.graph, 2)
    best = float("inf")
    for child in (child for tied in with_ties(problem) for child in with_edges(tied)):
        first, second = (child.plans(stage, range(cuts[stage], cuts[stage + 1]), 2**61)[0] for stage in (0, 1))
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


@pytest.mark.parametrize("seed", range(12))
def test_the_best_even_plan(seed: int) -> None:
    fixed = Fixed(pipeline=2, microbatches=4, schedule=Schedule.ONE_F_ONE_B, even=True)
    session, found = searched(seed, fixed)
    graph = session.profile.graph
    cuts = even_cuts(graph, 2)
    assert (found is None) == (not cuts)
    if found is not None:
        assert found.partition.cuts == cuts
        assert found.partition.time == by_hand(found.problem)
        free = searched(seed, Fixed(pipeline=2, microbatches=4))[1]
        assert free.partition.time <= found.partition.time


def test_it_is_certified_and_told() -> None:
    profile = random_profile(random.Random(1), blocks=4)
    fixed = Fixed(pipeline=2, even=True)
    plan = find_plan(profile, devices=4, global_batch=8, budget=10**9, fixed=fixed, certify=True)
    assert len(set(blocks_of(plan, profile.graph))) == 1
    with pytest.raises(GalvatronError, match="smallest budget"):
        find_plan(profile, devices=4, global_batch=8, budget=10, fixed=fixed)


def test_only_better_plans_than_asked_for() -> None:
    fixed = Fixed(pipeline=1)
    session, found = searched(0, fixed)
    request = request_of(session, 4, 8, 10**9, fixed, None, GALVATRON)
    assert search(request, session.pricer, below=found.partition.time) is None
    again = search(request, session.pricer, below=found.partition.time + 1)
    assert again.partition == found.partition


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


def test_no_uniform_plan_is_quicker(found: Plan, profile: Profile) -> None:
    """Brute force over one strategy for all layers, offload aside, and every number of micro-batches."""
    ways = [Strategy(data=GPUS), *(Strategy(zero=GPUS, zero_stage=stage) for stage in (1, 2, 3))]
    least = float("inf")
    for way, recompute, count in product(ways, Recompute, (1, 2, 4)):
        priced = _priced(profile, replace(way, recompute=recompute), count)
        if priced.prediction.peak_memory <= MEMORY:
            least = min(least, priced.prediction.step_seconds)
    assert found.prediction.step_seconds <= least * (1 + 1e-9)


@pytest.mark.parametrize("pins", [(), ("pp=1", "layers.*.tensor=2")])
def test_all_layers_of_some_models_have_the_same_samples(profile: Profile, pins: tuple[str, ...]) -> None:
    asked = {"mem": MEMORY, "batch": BATCH, "fix": pins, "runners_up": 0}
    folded = api.plan(replace(profile, graph=replace(profile.graph, folded="alibi of layers.0")), **asked)
    assert len({run.strategy.batch_degree for stage in folded.stages for run in stage.runs}) == 1
    free, one = api.plan(profile, **asked).prediction, folded.prediction
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
