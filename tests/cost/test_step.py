"""Whole plans: closed forms by hand, breakdowns that add up, communication that overlaps."""

from __future__ import annotations

import random
from dataclasses import replace
from math import log2

import pytest

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.communication import Links
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.memory import reserved
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.points import figures_at, index_points, key_of
from galvatron_lite.cost.stage import Shape, transfer_seconds
from galvatron_lite.cost.step import device_memory, predict, price_stages, shape_of, straggling, strategies_of
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.pipeline.cost import stride_between
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import LayerRun, MemoryBreakdown, Plan, Schedule
from galvatron_lite.profiler.schema import (
    CollectiveFit,
    CollectivePoint,
    HostOverhead,
    LayerPoint,
    OptimizerCost,
    Overlap,
    Profile,
)
from galvatron_lite.search.result import plan_of
from tests.factories import make_cluster, make_graph, make_kind, make_profile, random_profile
from tests.processor_time import least, process_seconds


def simple(devices: int = 2, latency: float = 0.0) -> Profile:
    """Three equal layers of 1000 parameters; 1 s forward and 2 s backward a sample."""
    kind = make_kind("block", 1000)
    points = [
        LayerPoint("block", count, 1, False, Recompute.NONE, 1.0 * count, 2.0 * count, 100, 150, 100)
        for count in (1, 4)
    ]
    return make_profile(
        make_graph([kind], ["block"] * 3), points, make_cluster(devices, bandwidth=1e4, latency=latency),
        optimizer=OptimizerCost("adamw", 8, 1e-3), overlap=Overlap(),
    )  # fmt: skip


def test_one_device_by_hand() -> None:
    plan = plan_of(simple(1).graph, devices=1, global_batch=4, microbatches=2, cuts=(0, 3), strategies=[Strategy()] * 3)
    prediction = evaluate(simple(1), plan).prediction
    assert prediction.step_seconds == pytest.approx(2 * 3 * (2 + 4) + 3 * 1000 * 1e-3)
    assert prediction.time.forward == pytest.approx(12)
    assert prediction.time.backward == pytest.approx(24)
    assert prediction.time.optimizer == pytest.approx(3)
    # 16 bytes an item, what the layers keep, and the last one's gradient of weights beside the buffer
    assert prediction.peak_memory == 3 * 16000 + 3 * 100 + 4000


def test_pipeline_by_hand() -> None:
    kind = simple(3)
    plan = plan_of(
        kind.graph, devices=3, global_batch=4, microbatches=4, cuts=(0, 1, 2, 3), strategies=[Strategy()] * 3
    )
    prediction = evaluate(kind, plan).prediction
    # With sends: forward 1.1, 1.1, 1.0; backward 2.0, 2.1, 2.1. The middle stage sets the pace: from the first gradient
    # at 2 * 1.1 + 3.1 = 5.3 on it has no pause until its last forward, two backwards and two forwards later, at
    # 5.3 + 2 * 2.1 + 2 * 1.1 = 11.7; from there the last micro-batch goes alone, and the first stage updates.
    send = 1000 / 1e4
    last_forward = 2 * (1 + send) + (3 + send) + 2 * (2 + send) + 2 * (1 + send)
    expected = last_forward + (3 + send) + (2 + send) + 2 + 1
    assert prediction.step_seconds == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(20))
def test_time_parts_add_up(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_profile(draw, blocks=4)
    for stages in (1, 2, 4):
        strategy = Strategy(data=4 // stages)
        cuts = (0, *sorted(draw.sample(range(1, 6), stages - 1)), 6)
        plan = plan_of(profile.graph, devices=4, global_batch=8, microbatches=2, cuts=cuts, strategies=[strategy] * 6)
        prediction = evaluate(profile, plan).prediction
        assert prediction.time.total == pytest.approx(prediction.step_seconds)
        assert prediction.time.pipeline == 0.0 or stages > 1


def test_unknown_layer_and_wrong_numbers_are_named() -> None:
    profile = simple(2)
    plan = plan_of(profile.graph, devices=2, global_batch=4, microbatches=2, cuts=(0, 3), strategies=[Strategy()] * 3)
    with pytest.raises(InputError, match="use them all"):
        evaluate(profile, plan)
    other = make_graph([make_kind("block", 1)], ["block"] * 2)
    short = plan_of(other, devices=2, global_batch=4, microbatches=2, cuts=(0, 2), strategies=[Strategy(2)] * 2)
    with pytest.raises(InputError, match="3 layers"):
        evaluate(profile, short)
    odd = plan_of(profile.graph, devices=2, global_batch=4, microbatches=4, cuts=(0, 3), strategies=[Strategy(2)] * 3)
    with pytest.raises(InputError, match="do not divide"):
        evaluate(profile, odd)


def test_errors_name_the_layer_that_follows_and_numbers_that_do_not_divide() -> None:
    profile = random_profile(random.Random(3), devices=4, blocks=2)
    names = [layer.name for layer in profile.graph.layers]
    runs = (LayerRun(names[-1], names[-1], 1, Strategy()),)
    whole = plan_of(
        profile.graph, devices=4, global_batch=8, microbatches=2, cuts=[0, len(names)],
        strategies=[Strategy(data=4)] * len(names),
    )  # fmt: skip
    wrong = replace(whole, stages=(replace(whole.stages[0], runs=runs),))
    with pytest.raises(InputError, match=rf"goes on with {names[0]} \.\. {names[0]}"):
        strategies_of(wrong, profile)
    for other, field in ((replace(whole, microbatches=3), "microbatches"), (replace(whole, microbatches=0), "micro")):
        with pytest.raises(InputError, match=field):
            shape_of(other, [Strategy(data=4)])


def test_measured_groups_come_first() -> None:
    fit = CollectiveFit(Collective.ALL_REDUCE, 2, 1, 2, 1.0, 10.0, 0.0)
    profile = simple(4, latency=0.5)
    points = tuple(CollectivePoint(Collective.ALL_GATHER, 2, 1, 1, size, size / 5.0) for size in (10, 30))
    links = Links(replace(profile, fits=(fit,), collectives=points))

    def seconds(collective: Collective, size: float, group: RankGroup) -> float:
        return links.seconds(Communication(collective, size, group, Moment.STEP, False))

    assert seconds(Collective.ALL_REDUCE, 20, RankGroup(2, 1, 2)) == pytest.approx(3.0)
    assert seconds(Collective.ALL_GATHER, 20, RankGroup(2, 1, 1)) == pytest.approx(4.0)
    assert seconds(Collective.ALL_REDUCE, 20, RankGroup(4)) > 0.5
    assert seconds(Collective.ALL_REDUCE, 20, RankGroup(1)) == 0.0


def test_samples_between_measured_points_are_interpolated() -> None:
    points = tuple(
        LayerPoint("a", count, 1, False, Recompute.NONE, forward, 1.0, 10 * count, 10 * count, 10 * count)
        for count, forward in ((2, 2.0), (4, 3.0), (8, 9.0))
    )
    known = index_points(points)[key_of("a", Strategy())]
    assert [figures_at(known, count).forward for count in (2, 3, 4, 6, 8, 10)] == [2.0, 2.5, 3.0, 6.0, 9.0, 12.0]
    assert figures_at(known, 1).forward == 1.5
    assert figures_at(known, 3).kept == 30
    assert figures_at(known[:1], 4).forward == 4.0


def pipelined(
    schedule: Schedule, groups: int, virtual: int, layers: int, microbatches: int, overhead: HostOverhead | None = None
) -> Plan:
    """Equal layers over ``groups * virtual`` stages, priced."""
    profile = replace(simple_of(layers, groups), overhead=overhead or HostOverhead())
    stages = groups * virtual
    cuts = tuple(range(0, layers + 1, layers // stages))
    plan = plan_of(
        profile.graph, devices=groups, global_batch=microbatches, microbatches=microbatches, cuts=cuts,
        strategies=[Strategy()] * layers, schedule=schedule,
    )  # fmt: skip
    return evaluate(profile, replace(plan, virtual_stages=virtual))


def simple_of(layers: int, devices: int) -> Profile:
    """``simple`` with so many layers and transfers that take no time."""
    kind = make_kind("block", 1000)
    points = [LayerPoint("block", 1, 1, False, Recompute.NONE, 1.0, 2.0, 100, 150, 100)]
    return make_profile(
        make_graph([kind], ["block"] * layers), points, make_cluster(devices, bandwidth=1e15, latency=0.0),
        optimizer=OptimizerCost("adamw", 8, 1e-3), overlap=Overlap(),
    )  # fmt: skip


def test_virtual_stages_divide_the_bubble_and_hold_more() -> None:
    plain = pipelined(Schedule.ONE_F_ONE_B, 4, 1, 8, 8)
    split = pipelined(Schedule.INTERLEAVED, 4, 2, 8, 8)
    # two layers a group: 6 s a micro-batch, (p - 1) / v of them in the bubble; two layers of 1000 items are updated
    assert plain.prediction.step_seconds == pytest.approx((8 + 3) * 6 + 2, rel=1e-6)
    assert split.prediction.step_seconds == pytest.approx((8 + 3 / 2) * 6 + 2, rel=1e-6)
    assert split.prediction.time.total == pytest.approx(split.prediction.step_seconds)
    # 4 micro-batches of two layers, or 2 * 3 + 4 + 1 = 11 chunks of one layer; in backward a gradient
    # beside the buffer
    states, buffers = 2 * 16000 + 4000, [stage.memory.communication for stage in (plain.stages[0], split.stages[0])]
    assert device_memory(plain)[0].total == states + 4 * 2 * 100 + buffers[0]
    assert device_memory(split)[0].total == states + 11 * 100 + buffers[1]


def test_stages_of_one_group_say_the_memory_of_its_devices() -> None:
    plan = pipelined(Schedule.INTERLEAVED, 4, 2, 8, 8)
    groups = device_memory(plan)
    assert [stage.memory for stage in plan.stages] == [groups[place % 4] for place in range(8)]
    assert groups[0].activations > groups[3].activations
    assert plan.prediction.peak_memory == max(memory.total for memory in groups)


@pytest.mark.parametrize(("schedule", "slower"), [(Schedule.ONE_F_ONE_B, 0.0), (Schedule.ZERO_BUBBLE_2P, 0.1)])
def test_gradients_in_passes_of_their_own_take_longer(schedule: Schedule, slower: float) -> None:
    overhead = HostOverhead(split_share=0.1)
    steps = [pipelined(schedule, 4, 1, 8, 12, each).prediction.step_seconds for each in (None, overhead)]
    # two layers a group, each with 1 s of gradients of weights, are busy for 12 micro-batches, and wait for 3 at most
    assert 12 * 2 * slower <= steps[1] - steps[0] + 1e-9 <= (12 + 3) * 2 * slower + 2e-9


def test_zero_bubble_is_quicker_and_holds_what_its_limit_says() -> None:
    steps, kept = {}, {}
    for schedule in (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE_1P, Schedule.ZERO_BUBBLE_2P):
        plan = pipelined(schedule, 4, 1, 4, 12)
        steps[schedule], kept[schedule] = plan.prediction.step_seconds, device_memory(plan)[0].activations
    assert steps[Schedule.ZERO_BUBBLE_2P] < steps[Schedule.ZERO_BUBBLE_1P] < steps[Schedule.ONE_F_ONE_B]
    assert steps[Schedule.ZERO_BUBBLE_2P] >= 12 * 3 + 1
    assert kept[Schedule.ZERO_BUBBLE_1P] == kept[Schedule.ONE_F_ONE_B] == 4 * 100
    # it may fill its limit of 2 p, and 2 p - 1 are enough to leave no bubble
    assert 7 * 100 <= kept[Schedule.ZERO_BUBBLE_2P] <= 8 * 100


def test_a_step_ends_with_the_last_group_to_be_done() -> None:
    """The last stage ends its backward first: work of its own once a step hides behind the stages before it."""
    profile = simple_of(2, 2)
    plan = plan_of(
        profile.graph, devices=2, global_batch=4, microbatches=4, cuts=(0, 1, 2), strategies=[Strategy()] * 2
    )
    strategies = strategies_of(plan, profile)
    shape = shape_of(plan, strategies)
    costs = price_stages(LayerPricer(profile), shape, [1, 1], strategies)
    late = predict(profile, plan, shape, [costs[0], replace(costs[1], step=costs[1].step + 1.5)])
    assert late.step_seconds == pytest.approx(predict(profile, plan, shape, costs).step_seconds)
    first = predict(profile, plan, shape, [replace(costs[0], step=costs[0].step + 1.5), costs[1]])
    assert first.step_seconds == pytest.approx(late.step_seconds + 1.5)


def test_transfers_know_the_links_they_cross_and_what_is_scattered() -> None:
    assert [stride_between(a, b, 2, 8) for a, b in ((0, 1), (3, 4), (7, 0))] == [2, 8, 8]
    assert stride_between(0, 1, 16, 8) == 16
    profile = replace(simple(8), cluster=make_cluster(8, bandwidth=1e4, latency=0.0))
    shape, sender = Shape(8, 2, 1, 1), Strategy(tensor=4)
    whole = transfer_seconds(LayerPricer(profile), 1000, sender, shape, (0, 1))
    pricer = LayerPricer(replace(profile, scattered_sends=True))
    parts = transfer_seconds(pricer, 1000, sender, shape, (0, 1))
    gathered = pricer.links.seconds(
        Communication(Collective.ALL_GATHER, 1000, RankGroup(4, 1, 1), Moment.FORWARD, overlaps=False)
    )
    assert parts == pytest.approx(whole / 4 + gathered)
    shared = replace(sender, sequence_parallel=True)
    assert transfer_seconds(pricer, 250, shared, shape, (0, 1)) == pytest.approx(whole / 4)


@pytest.mark.parametrize(
    ("straggles", "sharing", "nodes", "factor"),
    [(0.01, 0.0, 8, 1.03), (0.0, 0.02, 1, 1.0), (0.01, 0.02, 2, 1.01)],
)
def test_stragglers_grow_with_the_doublings_of_nodes_and_of_those_that_share_a_host(
    straggles: float, sharing: float, nodes: int, factor: float
) -> None:
    profile = replace(simple(8), straggling=straggles, sharing=sharing)
    node = profile.cluster.levels[0].size
    assert straggling(profile, 1) == 1.0
    assert straggling(profile, nodes * node) == pytest.approx(factor * (1 + sharing * log2(node)))


def test_schedules_and_virtual_stages_must_go_together() -> None:
    with pytest.raises(InputError, match="virtual_stages"):
        pipelined(Schedule.ONE_F_ONE_B, 2, 2, 4, 4)
    with pytest.raises(InputError, match="virtual_stages"):
        pipelined(Schedule.ZERO_BUBBLE_V, 2, 1, 2, 4)


def test_reserved_memory_is_above_the_peak_and_within_the_device() -> None:
    memory = MemoryBreakdown(parameters=850, context=100)
    assert reserved(memory, 10_000) == 1100
    assert reserved(memory, 1000) == 1000
    assert reserved(memory, 900) == 950
    assert reserved(memory, 10_000, 850) == 950


def test_large_plans_are_priced_within_milliseconds() -> None:
    profile = simple_of(96, 64)
    cuts = tuple(round(place * 96 / 64) for place in range(65))
    plan = plan_of(
        profile.graph, devices=64, global_batch=128, microbatches=128, cuts=cuts, strategies=[Strategy()] * 96
    )
    # some 3 ms; loose, as machines differ
    assert least(lambda: process_seconds(lambda: evaluate(profile, plan)), 0.015) < 0.015
