"""What plans of cyclic data parallelism cost, against closed forms (systems.md 2.3) and laws."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.cluster.cluster import Collective, Level, RankGroup
from galvatron_lite.cluster.collectives import collective_seconds
from galvatron_lite.cost.cyclic import price, split, stage_figures
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import evaluate, price_plan
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.cyclic.programme import CyclicProgramme, MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting, device_count
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Cyclic, Plan, Schedule
from galvatron_lite.profiler.schema import HostOverhead, LayerPoint, OptimizerCost, Overlap, Profile
from galvatron_lite.search.result import plan_of
from tests.factories import make_cluster, make_graph, make_kind, make_profile, random_profile

KEPT, ITEMS, SECONDS = 10**6, 250, 1e-3
STATES = 8 * ITEMS
"""Bytes of AdamW's states of a layer; its parameters and gradients are 4 bytes an item."""


def even(layers: int, devices: int, bandwidth: float = 1e15) -> Profile:
    """Equal layers that keep ``KEPT`` bytes and take 1 + 2 ms, any micro-batch; links without latency."""
    graph = make_graph([make_kind("block", ITEMS)], ["block"] * layers)
    points = [
        LayerPoint("block", samples, 1, False, Recompute.NONE, SECONDS, 2 * SECONDS, KEPT, KEPT, KEPT)
        for samples in (1, 64)
    ]
    cluster = make_cluster(devices, bandwidth=bandwidth, latency=0.0)
    optimizer = OptimizerCost("adamw", 8, 0.0)
    return make_profile(graph, points, cluster, optimizer=optimizer, overlap=Overlap(), overhead=HostOverhead())


def plan_on(profile: Profile, setting: CyclicSetting, rule: CyclicRule, count: int, batch: int = 0) -> Plan:
    """Equal-time stages without a prediction."""
    batch = batch or 2 * count
    plan = plan_of(
        profile.graph, devices=device_count(setting, count), global_batch=batch, microbatches=count,
        cuts=split(LayerPricer(profile), count, batch // count), strategies=[Strategy()] * len(profile.graph.layers),
        schedule=Schedule.CYCLIC,
    )  # fmt: skip
    return replace(plan, cyclic=Cyclic(rule, setting))


def seconds_of(profile: Profile, plan: Plan) -> float:
    found = evaluate(profile, plan).prediction
    assert found.time.total == pytest.approx(found.step_seconds)
    return found.step_seconds


@pytest.mark.parametrize("rule", CyclicRule)
@pytest.mark.parametrize("count", range(2, 9))
def test_closed_forms_of_equal_stages(count: int, rule: CyclicRule) -> None:
    layers = 2 * count
    memory = {}
    for setting in CyclicSetting:
        profile = even(layers, device_count(setting, count))
        plan = evaluate(profile, plan_on(profile, setting, rule, count))
        alone = count if setting is CyclicSetting.SINGLE else 1
        assert plan.prediction.step_seconds == pytest.approx(alone * layers * 3 * SECONDS)
        memory[setting] = max((stage.memory for stage in plan.stages), key=lambda own: own.total)
    whole, part = layers * KEPT, layers * KEPT // count
    # Activations: (N+1)/2 of A on one device (plain: N A), A on each of N, A/N on each of N(N+1)/2.
    assert memory[CyclicSetting.SINGLE].activations == (count + 1) * whole // 2
    assert memory[CyclicSetting.DATA].activations == whole
    assert memory[CyclicSetting.STAGES].activations == part
    # States: P on each device with all stages, P/N elsewhere.
    assert memory[CyclicSetting.SINGLE].optimizer == memory[CyclicSetting.DATA].optimizer == layers * STATES
    assert memory[CyclicSetting.STAGES].optimizer == 2 * STATES
    assert memory[CyclicSetting.DATA].parameters == 4 * ITEMS * layers
    assert memory[CyclicSetting.STAGES].parameters == 4 * ITEMS * 2
    assert 4 * ITEMS * layers < memory[CyclicSetting.SINGLE].parameters <= 2 * 4 * ITEMS * layers
    # Messages: gradients of one stage a time step; one to come, one to be applied and passed on, two on their way.
    assert memory[CyclicSetting.DATA].communication <= 5 * 4 * ITEMS * 2


def test_what_messages_hold() -> None:
    profile = even(4, 3)
    kinds = {}
    for setting in CyclicSetting:
        priced = price(LayerPricer(profile), plan_on(profile, setting, CyclicRule.V2, 2, 8))
        kinds |= {message.kind: priced.message_bytes(message) for message in priced.loop.messages}
    own = 4 * ITEMS * 2
    assert kinds[MessageContent.ACTIVATION] == kinds[MessageContent.GRADIENT] == 1000 * 4  # boundary bytes a sample
    assert kinds[MessageContent.PARTIAL] == kinds[MessageContent.UPDATE] == own


@pytest.mark.parametrize("setting", CyclicSetting)
def test_host_work_and_updates_count(setting: CyclicSetting) -> None:
    count = 3
    profile = even(6, 6)
    plain = seconds_of(profile, plan_on(profile, setting, CyclicRule.V1, count))
    slow = replace(profile, optimizer=replace(profile.optimizer, seconds_per_item=1e-6))
    update = 6 * ITEMS * 1e-6
    more = seconds_of(slow, plan_on(slow, setting, CyclicRule.V1, count)) - plain
    # Every device with all stages makes all updates in a step.
    if setting in (CyclicSetting.SINGLE, CyclicSetting.DATA):
        assert more == pytest.approx(update)
    assert 0 < more <= update * 1.01
    busy = replace(profile, overhead=HostOverhead(pipeline=1e-4, microbatch=1e-4, step=5e-4))
    known = price(LayerPricer(busy), plan_on(busy, setting, CyclicRule.V1, count))
    messages = len(known.loop.messages)
    added = seconds_of(busy, plan_on(busy, setting, CyclicRule.V1, count)) - plain
    if setting is CyclicSetting.SINGLE:
        assert messages == 0
        assert added == pytest.approx(count * count * 1e-4 + 5e-4)
    else:
        assert added >= count * 1e-4 + 5e-4


def test_messages_between_nodes_take_longer() -> None:
    near = even(8, 4, bandwidth=1e7)
    levels = (replace(near.cluster.levels[0], size=2), Level("cluster", 2, 1e5, 0.0))
    far = replace(near, cluster=replace(near.cluster, levels=levels))
    one, two = (seconds_of(own, plan_on(own, CyclicSetting.DATA, CyclicRule.V2, 4)) for own in (near, far))
    assert two > one
    priced = price(LayerPricer(far), plan_on(far, CyclicSetting.DATA, CyclicRule.V2, 4))
    taken = {(one.source, one.target): priced.message_seconds(one) for one in priced.loop.messages}
    assert taken[0, 1] == taken[2, 3] == pytest.approx(8 * ITEMS / 1e7)
    assert taken[1, 2] == pytest.approx(8 * ITEMS / 1e5)


def test_half_of_a_node_sends_to_the_other_half_at_once() -> None:
    """By a law of links that all devices slow down: pairs of a node send together, those of other nodes wait."""
    profile = even(8, 4, bandwidth=1e7)
    busy = replace(profile.cluster.levels[0], contention=3.0)
    profile = replace(profile, cluster=replace(profile.cluster, levels=(busy,)))
    priced = price(LayerPricer(profile), plan_on(profile, CyclicSetting.DATA, CyclicRule.V2, 4))
    message = next(one for one in priced.loop.messages if (one.source, one.target) == (0, 1))
    seconds = collective_seconds(profile.cluster, Collective.SEND_RECV, 8 * ITEMS, RankGroup(2, 1, 2))
    assert priced.message_seconds(message) == pytest.approx(seconds)
    alone = collective_seconds(profile.cluster, Collective.SEND_RECV, 8 * ITEMS, RankGroup(2, 1, 1))
    assert seconds > 1.4 * alone


def test_a_stage_holds_what_its_first_layers_keep_before_the_last_works() -> None:
    """By hand: the most of what is kept already and of what the next layer needs."""
    profile = even(3, 1)
    pricer = LayerPricer(profile)
    cost = pricer.price("block", Strategy(), 2, 1)
    (stage,) = stage_figures(pricer, (0, 3), 2)
    assert stage.kept == 3 * cost.kept
    assert stage.forward_peak == 2 * cost.kept + max(cost.forward_working, cost.kept)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from(CyclicRule), st.sampled_from(CyclicSetting))
def test_parts_add_up_and_are_not_negative(seed: int, count: int, rule: CyclicRule, setting: CyclicSetting) -> None:
    profile = random_profile(random.Random(seed), devices=device_count(setting, count), blocks=4)
    plan = plan_on(profile, setting, rule, count)
    priced = price_plan(LayerPricer(profile), plan)
    assert priced.prediction.peak_memory == max(stage.memory.total for stage in priced.stages)
    assert all(part >= 0.0 for part in vars_of(priced))
    quicker = replace(profile.cluster.levels[0], bandwidth=10 * profile.cluster.levels[0].bandwidth, latency=0.0)
    better = replace(profile, cluster=replace(profile.cluster, levels=(quicker, *profile.cluster.levels[1:])))
    assert seconds_of(better, plan) <= priced.prediction.step_seconds * (1 + 1e-9)
    # No device is quicker than its own work: of all stages, or its share of one.
    work = [stage.microbatch_seconds for stage in priced.stages]
    replicas = CyclicProgramme(rule, setting, count).replicas
    shares = [count / replicas(stage) * seconds for stage, seconds in enumerate(work)]
    least = max(shares) if setting is CyclicSetting.STAGES else sum(shares)
    assert priced.prediction.step_seconds >= least * (1 - 1e-9)


def vars_of(plan: Plan) -> list[float]:
    time = plan.prediction.time if plan.prediction else None
    return [getattr(time, name) for name in ("forward", "backward", "communication", "pipeline", "optimizer", "other")]


def test_plans_that_cannot_be_priced_are_refused() -> None:
    profile = random_profile(random.Random(1), devices=2, blocks=4, tied=True)
    plan = plan_of(
        profile.graph, devices=2, global_batch=4, microbatches=2, cuts=(0, 3, 6),
        strategies=[Strategy()] * 6, schedule=Schedule.CYCLIC,
    )  # fmt: skip
    with pytest.raises(InputError, match="l0 and l5 share parameters"):
        evaluate(profile, replace(plan, cyclic=Cyclic(CyclicRule.V2, CyclicSetting.DATA)))
    even_plan = plan_on(even(4, 2), CyclicSetting.DATA, CyclicRule.V2, 2)
    with pytest.raises(InputError, match="devices"):
        evaluate(even(4, 2), replace(even_plan, devices=3))
