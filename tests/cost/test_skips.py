"""Tensors that skip layers: bytes that travel, are laid out anew and are kept, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.stage import Shape, price_stage
from galvatron_lite.cost.step import price_stages
from galvatron_lite.model.graph import Passed
from galvatron_lite.model.shapes.tape import with_skips
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.result import plan_of
from tests.cost.test_step import simple
from tests.factories import make_graph, make_kind

BOUNDARY, SKIP, BANDWIDTH = 1000, 300, 1e4


def skipping(profile: Profile, *skips: Passed) -> Profile:
    return replace(profile, graph=with_skips(profile.graph, skips))


def plan(profile: Profile, schedule: Schedule = Schedule.ONE_F_ONE_B) -> Plan:
    made = plan_of(
        profile.graph, devices=3, global_batch=4, microbatches=4, cuts=(0, 1, 2, 3), strategies=[Strategy()] * 3,
        schedule=schedule,
    )  # fmt: skip
    return evaluate(profile, made)


@pytest.mark.parametrize("borrowed", [False, True])
def test_a_skip_travels_through_every_stage_between(borrowed: bool) -> None:
    chain = plan(simple(3))
    skipped = plan(skipping(simple(3), Passed("l0", ("l2",), SKIP, borrowed=borrowed)))
    more = [b.memory.total - a.memory.total for a, b in zip(chain.stages, skipped.stages, strict=True)]
    # A buffer for each send and receive of it and of its gradient; the last stage, one micro-batch in flight, keeps it.
    assert more == [2 * SKIP, 4 * SKIP, 2 * SKIP + (SKIP if borrowed else 0)]
    seconds = [b.microbatch_seconds - a.microbatch_seconds for a, b in zip(chain.stages, skipped.stages, strict=True)]
    assert seconds == pytest.approx([0, 0, 0], abs=1e-9)
    shape = Shape(3, 3, 4, 1)
    costs = price_stages(
        LayerPricer(skipping(simple(3), Passed("l0", ("l2",), SKIP))), shape, [1, 1, 1], [Strategy()] * 3
    )
    sends = [(cost.times.send_forward, cost.times.send_backward) for cost in costs]
    one = (BOUNDARY + SKIP) / BANDWIDTH
    assert sends == [pytest.approx((one, 0)), pytest.approx((one, one)), pytest.approx((0, one))]


def test_every_stage_that_reads_a_borrowed_tensor_keeps_it_for_each_micro_batch_in_flight() -> None:
    lent = Passed("l0", ("l1", "l2"), SKIP, borrowed=True)
    chain, skipped = plan(simple(3)), plan(skipping(simple(3), lent))
    more = [b.memory.activations - a.memory.activations for a, b in zip(chain.stages, skipped.stages, strict=True)]
    assert more == [0, 2 * SKIP, SKIP]
    chain, skipped = plan(simple(3), Schedule.GPIPE), plan(skipping(simple(3), lent), Schedule.GPIPE)
    more = [b.memory.activations - a.memory.activations for a, b in zip(chain.stages, skipped.stages, strict=True)]
    assert more == [0, 4 * SKIP, 4 * SKIP]


def test_a_skip_is_laid_out_anew_with_what_goes_beside_it() -> None:
    kind = make_kind("block", 1000, tensor_degrees=2, boundary=BOUNDARY)
    points = simple(2).layers
    points = (*points, *(replace(point, tensor=2) for point in points))
    chain = replace(simple(2), graph=make_graph([kind], ["block"] * 3), layers=points)
    skipped = skipping(chain, Passed("l0", ("l2",), SKIP))
    strategies = [Strategy(data=2), Strategy(data=2), Strategy(tensor=2)]
    shape = Shape(2, 1, 1, 4)
    costs = [price_stage(LayerPricer(one), shape, 0, range(3), strategies) for one in (chain, skipped)]
    # Each of two devices sends its half of the micro-batch's samples to the other; on the way back each has the
    # gradients of all samples already.
    moved = [4 * size / 2 / BANDWIDTH for size in (BOUNDARY, BOUNDARY + SKIP)]
    assert [cost.moving for cost in costs] == pytest.approx(moved)


def test_inside_a_stage_a_skip_goes_straight_to_its_readers() -> None:
    kind = make_kind("block", 1000, tensor_degrees=2, boundary=BOUNDARY)
    points = (*simple(4).layers, *(replace(point, tensor=2) for point in simple(4).layers))
    chain = replace(simple(4), graph=make_graph([kind], ["block"] * 5), layers=points)
    skipped = skipping(chain, Passed("l0", ("l2", "l4"), SKIP))
    by_sample, by_rows = Strategy(data=2), Strategy(tensor=2)
    strategies = [by_sample, by_rows, by_sample, by_sample, by_rows]
    costs = price_stages(LayerPricer(skipped), Shape(4, 2, 2, 4), [3, 2], strategies)
    # In the first stage it waits by samples until the third layer reads it, and leaves as that layer has it; in the
    # second it comes in by samples, and goes to the last layer together with what the first one of the stage makes.
    moved = [4 * size / 2 / BANDWIDTH for size in (2 * BOUNDARY, BOUNDARY + SKIP)]
    assert [cost.moving for cost in costs] == pytest.approx(moved)


def test_equal_stages_of_unlike_boundaries_are_not_taken_for_one_another() -> None:
    profile = skipping(simple(3), Passed("l0", ("l2",), SKIP, borrowed=True))
    shape, strategies = Shape(3, 3, 4, 1), [Strategy()] * 3
    together = price_stages(LayerPricer(profile), shape, [1, 1, 1], strategies)
    alone = [price_stage(LayerPricer(profile), shape, s, range(s, s + 1), strategies) for s in range(3)]
    assert together == alone
