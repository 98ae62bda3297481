"""What moves at the ends of a branch, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.branch.assign import BranchSite, BranchTraffic, border_of, buffer_bytes, moves
from galvatron_lite.parallelism.branch.find import part_of, trunk_of
from tests.branchy import plain_profile, towers
from tests.factories import make_kind

FORWARD, BACKWARD = Moment.FORWARD, Moment.BACKWARD


def told(sent: tuple[Communication, ...]) -> list[tuple[Collective, float, Moment]]:
    return [(one.collective, one.size, one.moment) for one in sent]


def test_nothing_moves_in_where_the_input_is_the_models() -> None:
    graph = plain_profile([1.0, 2.0]).graph
    assert border_of(graph, {"t0.0"}) == BranchTraffic(read=0, given=10)
    assert told(moves(border_of(graph, {"t0.0"}), BranchSite(2, 1, 1, True, 4), training=False)) == [
        (Collective.ALL_TO_ALL, 4 * 10 * 0.5 * 2, FORWARD)
    ]


def test_on_shares_of_samples_a_group_gets_what_it_lacks_and_everyone_its_share() -> None:
    """World 4, a group of 2 that shares 8 samples two ways: each device lacks 1/2 - 1/4 of what it reads. Two other
    devices get a quarter of its output each, which two devices send: a quarter goes over each link."""
    site = BranchSite(4, 2, 2, True, 8)
    half = Collective.ALL_TO_ALL
    assert told(moves(BranchTraffic(read=100, given=40), site)) == [
        (half, pytest.approx(800 * 0.25 * 4 / 3), FORWARD),
        (half, pytest.approx(800 * 0.25 * 4 / 3), BACKWARD),
        (half, pytest.approx(320 * 0.25 * 4 / 3), FORWARD),
        (half, pytest.approx(320 * 0.25 * 4 / 3), BACKWARD),
    ]


def test_one_device_that_feeds_all_others_is_as_slow_as_what_it_sends() -> None:
    """Of eight devices seven get an eighth each, all of it from one."""
    (sent,) = moves(BranchTraffic(given=80), BranchSite(8, 1, 1, True, 8), training=False)
    assert sent.size * 7 / 8 == pytest.approx(640 * 7 / 8)


def test_where_every_device_has_all_samples_outputs_and_gradients_of_inputs_are_broadcast() -> None:
    sent = moves(BranchTraffic(read=100, given=40), BranchSite(3, 1, 1, False, 2))
    assert told(sent) == [(Collective.BROADCAST, 80, FORWARD), (Collective.BROADCAST, 200, BACKWARD)]
    assert (
        told(moves(BranchTraffic(read=100, given=40), BranchSite(3, 1, 1, False, 2), training=False)) == told(sent)[:1]
    )


def test_what_the_model_gives_goes_to_every_device() -> None:
    assert told(moves(BranchTraffic(results=6), BranchSite(2, 1, 1, True, 5))) == [(Collective.BROADCAST, 30, FORWARD)]


def test_nothing_moves_on_one_device() -> None:
    assert moves(BranchTraffic(10, 10, 10), BranchSite(1, 1, 1, True, 4)) == ()


def test_buffers_of_its_own_devices_and_of_those_that_wait() -> None:
    border, site = BranchTraffic(read=100, given=40), BranchSite(4, 2, 2, True, 8)
    assert buffer_bytes(border, site, member=True) == 2 * (100 * 8 / 2 + 40 * 8 / 4)
    assert buffer_bytes(border, site, member=False) == 2 * 40 * 8 / 4
    assert buffer_bytes(border, replace(site, spread=False), member=False, training=False) == 40 * 8


def test_parts_of_a_model() -> None:
    kinds = {name: make_kind(name, 1) for name in ("before", "after", "t0", "t1")}
    graph = towers([2, 1], kinds, read=30)
    left = part_of(graph, {"t0.0", "t0.1"})
    assert left.edges == (("t0.0", "t0.1"),)
    assert set(left.kinds) == {"t0"}
    rest = part_of(graph, {"before", "after"})
    assert rest.exchanges(range(2)) == ()  # what goes between them went through branches
    assert trunk_of(graph, []) == graph.layers
