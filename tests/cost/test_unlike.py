"""Pipelines over devices of several types: every stage costs what it costs on devices of its own type."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from galvatron_lite.analysis.setting import first_devices
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Cluster, DeviceGroup, Level
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.stage import Shape, transfer_seconds
from galvatron_lite.cost.step import bound_seconds, price_stages, shape_of, strategies_of
from galvatron_lite.files import read_value, write_value
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import DeviceFigures, Profile
from galvatron_lite.search.result import plan_of
from tests.factories import random_profile


def unlike(fast: Profile, slow: Profile, nodes: tuple[int, ...] = (1, 1)) -> Profile:
    """Types taking turns, each with the figures of a profile of its own, on nodes of as many devices as they have."""
    names, profiles = ("fast", "slow"), (fast, slow)
    size = fast.cluster.devices
    levels = [
        (replace(p.cluster.levels[0], size=size), Level("net", sum(nodes), p.cluster.levels[0].bandwidth / 4, 1e-5))
        for p in profiles
    ]
    groups = tuple(
        DeviceGroup(replace(profiles[turn % 2].cluster.device, name=names[turn % 2]), count * size, levels[turn % 2])
        for turn, count in enumerate(nodes)
    )
    worst = levels[0] if levels[0][0].bandwidth <= levels[1][0].bandwidth else levels[1]
    types = [DeviceFigures(name, p.layers, p.optimizer, p.overhead) for name, p in zip(names, profiles, strict=True)]
    return replace(slow, cluster=Cluster("unlike", groups, worst), types=tuple(types))


def pair(seed: int, size: int = 2) -> tuple[Profile, Profile, Profile]:
    draw = random.Random(seed)
    fast = random_profile(draw, devices=size, blocks=4)
    half = [replace(point, forward=2 * point.forward, backward=3 * point.backward) for point in fast.layers]
    links = tuple(replace(level, bandwidth=level.bandwidth / 3) for level in fast.cluster.levels)
    device = replace(fast.cluster.device, memory=2**29, context=fast.cluster.device.context + 500)
    cluster = replace(fast.cluster, levels=links, groups=(DeviceGroup(device, size),))
    slow = replace(fast, layers=tuple(half), cluster=cluster)
    return fast, slow, unlike(fast, slow)


def plan(profile: Profile, stages: int, schedule: Schedule = Schedule.ONE_F_ONE_B, virtual: int = 1) -> Plan:
    devices, layers = profile.cluster.devices, len(profile.graph.layers)
    cuts = [round(layers * number / (stages * virtual)) for number in range(stages * virtual + 1)]
    made = plan_of(
        profile.graph, devices=devices, global_batch=16, microbatches=4, cuts=cuts, schedule=schedule,
        strategies=[Strategy(data=devices // stages)] * layers,
    )  # fmt: skip
    return replace(made, virtual_stages=virtual)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_cost_what_they_cost_on_their_own_devices(seed: int, stages: int) -> None:
    _, _, both = pair(seed)
    alone = [LayerPricer(replace(both.only(kind), types=())) for kind in (0, 1)]
    made = plan(both, stages)
    strategies = strategies_of(made, both)
    shape = shape_of(made, strategies)
    sizes = [sum(run.count for run in stage.runs) for stage in made.stages]
    costs = price_stages(LayerPricer(both), shape, sizes, strategies)
    for number, cost in enumerate(costs):
        own = price_stages(alone[number >= stages // 2], shape, sizes, strategies)[number]
        assert (cost.layers, cost.step, cost.memory) == (own.layers, own.step, own.memory)
    assert costs[0].layers != costs[-1].layers
    evaluated = evaluate(both, made)
    assert [stage.device for stage in evaluated.stages] == ["fast"] * (stages // 2) + ["slow"] * (stages // 2)
    assert [stage.memory for stage in evaluated.stages] == [cost.memory for cost in costs]


def test_sends_between_types_take_the_slower_network() -> None:
    fast, _, both = pair(1)
    pricer, shape = LayerPricer(both), Shape(4, 4, 4, 4)
    seconds = [transfer_seconds(pricer, 10**6, Strategy(), shape, (group, group + 1)) for group in range(3)]
    link = fast.cluster.levels[0]
    # Inside a node at its own type's bandwidth; between nodes at a quarter of the slower one's, latency 10 us.
    assert seconds[0] == pytest.approx(link.latency + 1e6 / link.bandwidth)
    assert seconds[2] == pytest.approx(link.latency + 3e6 / link.bandwidth)
    assert seconds[1] == pytest.approx(1e-5 + 12e6 / link.bandwidth)


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.ZERO_BUBBLE_1P])
def test_types_that_differ_in_name_alone_cost_what_one_type_costs(schedule: Schedule) -> None:
    draw = random.Random(3)
    fast = random_profile(draw, devices=2, blocks=4)
    both = unlike(fast, fast, (1, 1))
    group = DeviceGroup(both.cluster.groups[0].device, 4)
    alike = replace(both, types=(), cluster=replace(both.cluster, groups=(group,)))
    for stages in (1, 2, 4):
        for virtual in (1, 2) if stages == 2 and schedule is Schedule.ONE_F_ONE_B else (1,):
            order = Schedule.INTERLEAVED if virtual > 1 else schedule
            assert evaluate(both, plan(both, stages, order, virtual)).prediction == (
                evaluate(alike, plan(alike, stages, order, virtual)).prediction
            )


def test_devices_of_several_types_in_one_stage_wait_for_the_slowest() -> None:
    _, slow, both = pair(5)
    whole = replace(slow, cluster=both.cluster.only(1))
    made = plan(both, 1)
    assert evaluate(both, made).stages[0].device == ""
    left, right = evaluate(both, made).prediction, evaluate(whole, made).prediction
    assert (left.step_seconds, left.peak_memory) == (right.step_seconds, right.peak_memory)


def test_shared_parameters_are_summed_over_the_slower_links() -> None:
    draw = random.Random(7)
    fast = random_profile(draw, devices=2, blocks=2, tied=True)
    links = tuple(replace(level, bandwidth=level.bandwidth / 3) for level in fast.cluster.levels)
    both = unlike(fast, replace(fast, cluster=replace(fast.cluster, levels=links)))
    pricer = LayerPricer(both)
    first, last = pricer.of_group(2, 0), pricer.of_group(2, 1)
    strategy, items = Strategy(data=2), both.graph.ties[0].parameters
    exchanged = [own._exchange(items, strategy, 2) for own in (first, last)]
    assert exchanged[0] == exchanged[1] == pricer._exchange(items, strategy, 2)
    assert exchanged[0] > LayerPricer(both.only(0))._exchange(items, strategy, 2)


def test_an_estimated_model_on_two_types_of_gpu() -> None:
    cluster = load_cluster("a100-v100")
    graph = load_model("llama2-7b", precision="fp16")
    profile = estimate_profile(graph, cluster, precision="fp16", name="both", samples=(1, 2))
    for kind, name in enumerate(("a100-80gb", "v100")):
        own = estimate_profile(graph, load_cluster(name, 16), precision="fp16", name="both", samples=(1, 2))
        found = profile.only(kind)
        assert (found.layers, found.optimizer, found.overhead) == (own.layers, own.optimizer, own.overhead)
        assert found.cluster.levels == own.cluster.levels
    assert [figures.device for figures in profile.types] == [group.device.name for group in cluster.groups]
    strategies = [Strategy(data=8)] * 34
    bounds = []
    for cut in (17, 24):
        made = plan_of(graph, devices=16, global_batch=64, microbatches=8, cuts=(0, cut, 34), strategies=strategies)
        shape = shape_of(made, strategies)
        bounds.append(
            bound_seconds(profile, shape, price_stages(LayerPricer(profile), shape, (cut, 34 - cut), strategies))
        )
    assert bounds[1] < 0.8 * bounds[0]


def test_a_profile_of_two_types_reads_back_the_same_and_is_cut_to_one(tmp_path: Path) -> None:
    cluster, graph = load_cluster("a100-v100"), load_model("gpt2", precision="fp16")
    profile = estimate_profile(graph, cluster, precision="fp16", name="both", samples=(1, 2))
    write_value(tmp_path / "profile.json", profile)
    assert read_value(Profile, tmp_path / "profile.json") == profile
    part = profile.on(first_devices(cluster, 4))
    own = estimate_profile(graph, load_cluster("a100-80gb", 4), precision="fp16", name="both", samples=(1, 2))
    assert (part.layers, part.types, part.cluster.levels) == (
        profile.types[0].layers, (), own.cluster.levels
    )  # fmt: skip
    assert set(own.layers) <= set(part.layers)
