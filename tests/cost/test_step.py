"""Whole plans: closed forms by hand, breakdowns that add up, communication that overlaps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from galvatron_lite.cluster.cluster import RankGroup
from galvatron_lite.cost.communication import Links, together
from galvatron_lite.cost.points import figures_at, index_points
from galvatron_lite.cost.step import evaluate
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.base import Collective, Communication, Moment, Strategy
from galvatron_lite.profiler.schema import CollectiveFit, CollectivePoint, LayerPoint, OptimizerCost, Overlap, Profile
from galvatron_lite.search.result import plan_of
from tests.factories import make_cluster, make_graph, make_kind, make_profile, random_profile


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
    assert prediction is not None
    assert prediction.step_seconds == pytest.approx(2 * 3 * (2 + 4) + 3 * 1000 * 1e-3)
    assert prediction.time.forward == pytest.approx(12)
    assert prediction.time.backward == pytest.approx(24)
    assert prediction.time.optimizer == pytest.approx(3)
    # 16 bytes an item, two layers' kept activations and the last one's working memory
    assert prediction.peak_memory == 3 * 16000 + 2 * 100 + 150


def test_pipeline_by_hand() -> None:
    kind = simple(3)
    plan = plan_of(
        kind.graph, devices=3, global_batch=4, microbatches=4, cuts=(0, 1, 2, 3), strategies=[Strategy()] * 3
    )
    prediction = evaluate(kind, plan).prediction
    assert prediction is not None
    send = 1000 / 1e4
    middle = 3 + 2 * send
    expected = (3 + send) * 2 + middle + 3 * middle + 1
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
        assert prediction is not None
        assert prediction.time.total == pytest.approx(prediction.step_seconds)
        assert prediction.time.pipeline == pytest.approx(0, abs=1e-9) or stages > 1


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


def test_together() -> None:
    assert together(3.0, 1.0, Overlap()) == 3.0
    assert together(1.0, 3.0, Overlap()) == 3.0
    # two things that halve one another take as long as one after the other
    assert together(3.0, 1.0, Overlap(2, 2)) == pytest.approx(4.0)
    assert together(1.0, 3.0, Overlap(2, 2)) == pytest.approx(4.0)
    assert together(2.0, 0.0, Overlap(1.3, 1.7)) == 2.0


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


def test_points_lie_on_straight_lines() -> None:
    points = tuple(
        LayerPoint("a", count, 1, False, Recompute.NONE, forward, 1.0, 10 * count, 10 * count, 10 * count)
        for count, forward in ((2, 2.0), (4, 3.0), (8, 9.0))
    )
    known = index_points(points)[("a", 1, False, Recompute.NONE)]
    assert [figures_at(known, count).forward for count in (2, 3, 4, 6, 8, 10)] == [2.0, 2.5, 3.0, 6.0, 9.0, 12.0]
    assert figures_at(known, 1).forward == 1.5
    assert figures_at(known, 3).kept == 30
    assert figures_at(known[:1], 4).forward == 4.0
