"""Branches on groups of devices: against brute force, an integer programme, and what is known of the heuristic."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.branch.cost import (
    BranchGroup,
    BranchSite,
    BranchTraffic,
    Job,
    Option,
    assign,
    border_of,
    buffer_bytes,
    exact,
    longest_first,
    makespan,
    moves,
    on_groups,
    places,
)
from galvatron_lite.parallelism.branch.find import part_of, trunk_of
from tests.branchy import plain_profile, towers
from tests.factories import make_kind

PLENTY = 10**9


def job(draw: random.Random, devices: int, phases: int = 2) -> Job:
    """A branch that more devices make quicker, but not always, with one or two options a size."""
    work = [draw.uniform(1, 10) for _ in range(phases)]
    return {
        size: [
            Option(
                tuple(one * factor / size ** draw.uniform(0.2, 1.1) for one in work),
                draw.randint(0, 6),
                draw.randint(0, 6),
            )
            for factor in (1.0, 1.4)[: draw.randint(1, 2)]
        ]
        for size in range(1, devices + 1)
        if size == 1 or draw.random() < 0.8
    }


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to put items into sets."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [items[0], *rest[place]], *rest[place + 1 :]]


def by_brute_force(jobs: Sequence[Job], devices: int, room: int, node: int) -> float:
    """The least time over every partition, every place of every set, and every option of every branch."""
    lie = places(devices, range(1, devices + 1), node)
    least = float("inf")
    for sets in partitions(range(len(jobs))):
        for where in product(lie, repeat=len(sets)):
            if len({device for place in where for device in place}) < sum(map(len, where)):
                continue
            size_of = {number: len(place) for own, place in zip(sets, where, strict=True) for number in own}
            for options in product(*(jobs[number].get(size_of[number], ()) for number in range(len(jobs)))):
                groups = [
                    BranchGroup(place.start, len(place), tuple((number, options[number]) for number in own))
                    for own, place in zip(sets, where, strict=True)
                ]
                if all(group.memory <= room for group in groups):
                    least = min(least, makespan(groups))
    return least


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 4), st.sampled_from([2, 4]), st.integers(3, 30))
def test_exact_equals_brute_force(seed: int, branches: int, devices: int, node: int, room: int) -> None:
    draw = random.Random(seed)
    jobs = [job(draw, devices) for _ in range(branches)]
    found = exact(jobs, devices, room, node)
    wanted = by_brute_force(jobs, devices, room, node)
    assert (found.seconds if found else float("inf")) == pytest.approx(wanted, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 8), st.sampled_from([2, 4, 8]))
def test_groups_are_disjoint_runs_that_hold_every_branch(seed: int, branches: int, devices: int, node: int) -> None:
    draw = random.Random(seed)
    jobs = [job(draw, devices) for _ in range(branches)]
    for groups in (exact(jobs, devices, PLENTY, node), assign(jobs, devices, PLENTY, node)):
        used = [device for group in groups.groups for device in range(group.first, group.first + group.devices)]
        assert len(used) == len(set(used))
        assert set(used) <= set(range(devices))
        assert sorted(number for group in groups.groups for number, _ in group.branches) == list(range(branches))
        for group in groups.groups:
            assert range(group.first, group.first + group.devices) in places(devices, [group.devices], node)
            assert all(option in jobs[number][group.devices] for number, option in group.branches)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=7), st.integers(1, 4))
def test_longest_first_is_within_its_bound_on_equal_groups(times: list[float], groups: int) -> None:
    jobs = [{1: [Option((seconds,))]} for seconds in times]
    best = exact(jobs, groups, PLENTY, groups)
    quick = on_groups(jobs, [range(place, place + 1) for place in range(groups)], PLENTY)
    assert best.seconds <= makespan(quick) + 1e-9
    assert makespan(quick) <= best.seconds * (4 / 3 - 1 / (3 * groups)) + 1e-9


def test_the_bound_of_longest_first_is_reached() -> None:
    """Graham's own example: 5, 5, 4, 4, 3, 3, 3 on three machines takes 11, where 9 would do."""
    jobs = [{1: [Option((float(seconds),))]} for seconds in (5, 5, 4, 4, 3, 3, 3)]
    quick = longest_first(jobs, 3, PLENTY, 3)
    best = exact(jobs, 3, PLENTY, 3)
    assert (makespan(quick), best.seconds) == (11.0, 9.0)


def test_many_branches_are_assigned_without_proof() -> None:
    jobs = [{1: [Option((float(number % 5 + 1),))]} for number in range(14)]
    found = assign(jobs, 4, PLENTY, 4)
    assert not found.proven
    assert found.seconds == pytest.approx(10.0)  # 38 s of work on four devices take 9.5 s at the least


def test_groups_within_a_node() -> None:
    assert places(4, [3], 2) == [range(3)]  # no node holds it: from the beginning of one
    assert places(4, [4], 2) == [range(4)]
    assert places(6, [2], 3) == [range(2), range(1, 3), range(3, 5), range(4, 6)]


def test_groups_begin_at_the_first_device() -> None:
    found = exact([{1: [Option((2.0,))]}, {1: [Option((1.0,))]}], 4, PLENTY, 4)
    assert found.groups[0].first == 0
    assert [group.first for group in found.groups] == list(range(len(found.groups)))


# What moves at the ends of a branch, by hand.


FORWARD, BACKWARD = Moment.FORWARD, Moment.BACKWARD


def told(sent: tuple[Communication, ...]) -> list[tuple[Collective, float, Moment]]:
    return [(one.collective, one.size, one.moment) for one in sent]


def test_inputs_of_the_model_are_not_moved() -> None:
    graph = plain_profile([1.0, 2.0]).graph
    assert border_of(graph, {"t0.0"}) == BranchTraffic(read=0, written=10)
    assert told(moves(border_of(graph, {"t0.0"}), BranchSite(2, 1, 1, True, 4), training=False)) == [
        (Collective.ALL_TO_ALL, 4 * 10 * 0.5 * 2, FORWARD)
    ]


def test_on_shares_of_samples_a_group_gets_what_it_lacks_and_everyone_its_share() -> None:
    """World 4, a group of 2 that shares 8 samples two ways: each device lacks 1/2 - 1/4 of what it reads. Two other
    devices get a quarter of its output each, which two devices send: a quarter goes over each link."""
    site = BranchSite(4, 2, 2, True, 8)
    half = Collective.ALL_TO_ALL
    assert told(moves(BranchTraffic(read=100, written=40), site)) == [
        (half, pytest.approx(800 * 0.25 * 4 / 3), FORWARD),
        (half, pytest.approx(800 * 0.25 * 4 / 3), BACKWARD),
        (half, pytest.approx(320 * 0.25 * 4 / 3), FORWARD),
        (half, pytest.approx(320 * 0.25 * 4 / 3), BACKWARD),
    ]


def test_one_device_that_feeds_all_others_is_as_slow_as_what_it_sends() -> None:
    """Of eight devices seven get an eighth each, all of it from one."""
    (sent,) = moves(BranchTraffic(written=80), BranchSite(8, 1, 1, True, 8), training=False)
    assert sent.size * 7 / 8 == pytest.approx(640 * 7 / 8)


def test_where_every_device_has_all_samples_outputs_and_gradients_of_inputs_are_broadcast() -> None:
    sent = moves(BranchTraffic(read=100, written=40), BranchSite(3, 1, 1, False, 2))
    assert told(sent) == [(Collective.BROADCAST, 80, FORWARD), (Collective.BROADCAST, 200, BACKWARD)]
    assert (
        told(moves(BranchTraffic(read=100, written=40), BranchSite(3, 1, 1, False, 2), training=False))
        == told(sent)[:1]
    )


def test_nothing_moves_on_one_device() -> None:
    assert moves(BranchTraffic(10, 10, 10), BranchSite(1, 1, 1, True, 4)) == ()


def test_buffers_of_its_own_devices_and_of_those_that_wait() -> None:
    border, site = BranchTraffic(read=100, written=40), BranchSite(4, 2, 2, True, 8)
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
