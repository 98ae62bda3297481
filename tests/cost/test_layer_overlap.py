"""What compute hides of communication, against a simulation of two queues."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.communication import exposed_by, hidden_share, moment_of, overlapped_seconds
from galvatron_lite.cost.points import LayerFigures
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.profiler.schema import Overlap

GROUP = RankGroup(4)
FREE = Overlap()
SLOWED = Overlap(1.1256, 1.3)


def message(
    cause: str = "zero",
    moment: Moment = Moment.FORWARD,
    overlaps: bool = True,
    collective: Collective = Collective.REDUCE_SCATTER,
) -> Communication:
    return Communication(collective, 1.0, GROUP, moment, overlaps, 1, cause)


def figures(forward: float = 1.0, backward: float = 2.0) -> LayerFigures:
    return LayerFigures(forward, backward, 0, 0, 0)


def simulated(compute: float, communication: float, overlap: Overlap) -> float:
    """Both advance in small steps, each slowed while the other still runs."""
    left, sent, clock, tick = compute, communication, 0.0, 1e-4
    while left > 0 or sent > 0:
        both = left > 0 and sent > 0
        left -= tick / (overlap.compute_slowdown if both else 1.0)
        sent -= tick / (overlap.communication_slowdown if both else 1.0)
        clock += tick
    return clock


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(1.0, 2.0), st.floats(1.0, 2.0))
def test_compute_and_communication_slow_each_other_down(
    compute: float, communication: float, a: float, b: float
) -> None:
    overlap = Overlap(a, b)
    assert overlapped_seconds(compute, communication, overlap) == pytest.approx(
        simulated(compute, communication, overlap), abs=1e-3
    )


def test_without_named_shares_a_dimension_decides() -> None:
    parts = [(message("data", Moment.STEP), 5.0), (message("tensor", overlaps=False), 0.25)]
    exposed = exposed_by(parts, figures(), {}, FREE)
    assert (exposed.forward, exposed.backward, exposed.step) == pytest.approx((0.25, 0.0, 3.0))


@pytest.mark.parametrize(("share", "left"), [(0.0, 1.5), (0.5, 0.75), (1.0, 0.5)])
def test_the_named_share_overlaps_and_the_rest_blocks(share: float, left: float) -> None:
    """1.5 s beside 1 s of forward: the share that may hide does so up to the compute."""
    exposed = exposed_by([(message("tensor", overlaps=False), 1.5)], figures(), {"tensor": share}, FREE)
    assert exposed.forward == pytest.approx(left)
    assert (exposed.backward, exposed.step) == (0.0, 0.0)


def test_a_share_for_one_moment_goes_before_that_of_the_cause() -> None:
    hidden = {"zero": 0.25, "zero.backward": 0.75}
    assert hidden_share(message("zero", Moment.BACKWARD), hidden) == 0.75
    assert hidden_share(message("zero", Moment.FORWARD), hidden) == 0.25
    assert hidden_share(message("data", Moment.STEP), hidden) == 1.0
    assert hidden_share(message("tensor", overlaps=False), hidden) == 0.0


def test_gradients_hide_behind_the_last_backward_and_new_parameters_behind_the_first_forward() -> None:
    scatter = message(moment=Moment.STEP)
    gather = message(moment=Moment.STEP, collective=Collective.ALL_GATHER)
    assert (moment_of(scatter), moment_of(gather)) == ("step", "gather")
    assert exposed_by([(scatter, 2.0)], figures(), {}, FREE).step == pytest.approx(0.0)
    assert exposed_by([(gather, 2.0)], figures(), {}, FREE).step == pytest.approx(1.0)
    assert exposed_by([(scatter, 3.0), (gather, 3.0)], figures(), {}, FREE).step == pytest.approx(1.0 + 2.0)
    blocked = exposed_by([(scatter, 3.0), (gather, 3.0)], figures(), {"zero.gather": 0.0}, FREE)
    assert blocked.step == pytest.approx(1.0 + 3.0)


def test_overlap_in_micro_batches_leaves_less_for_the_step() -> None:
    parts = [(message(moment=Moment.BACKWARD), 1.5), (message("data", Moment.STEP), 1.0)]
    exposed = exposed_by(parts, figures(), {}, FREE)
    assert (exposed.backward, exposed.step) == pytest.approx((0.0, 0.5))


def test_the_embedding_without_compute_is_the_tail() -> None:
    exposed = exposed_by([(message("data", Moment.STEP), 0.7)], figures(0.0, 0.0), {}, SLOWED)
    assert exposed.step == pytest.approx(0.7)


def queue_tail(layers: list[tuple[float, float]]) -> float:
    """Seconds from the last backward to the last reduction: buckets go one after another, each after its layer."""
    clock = free = 0.0
    for compute, bucket in layers:
        clock += compute
        free = max(free, clock) + bucket
    return free - clock


@given(st.integers(1, 40), st.floats(0.01, 2.0), st.floats(0.01, 2.0), st.floats(0.0, 5.0))
def test_layer_by_layer_the_tail_of_a_stage_is_right_up_to_one_bucket(
    count: int, compute: float, bucket: float, embedding: float
) -> None:
    """Equal layers, then the embedding, against buckets in one queue."""
    layers = [(compute, bucket)] * count
    one = exposed_by([(message("data", Moment.STEP), bucket)], figures(backward=compute), {}, FREE).step
    tail = exposed_by([(message("data", Moment.STEP), embedding)], figures(backward=0.0), {}, FREE).step
    exact = queue_tail([*layers, (0.0, embedding)])
    assert exact - min(bucket, compute) - 1e-9 <= count * one + tail <= exact + 1e-9
