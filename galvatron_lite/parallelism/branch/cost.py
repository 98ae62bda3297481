"""Which branch runs on which devices: groups of consecutive devices, each of which runs its branches one by one.

A step has phases (forward, backward, update) between which all groups wait for the slowest, so that the time is

    sum over phases p of max over groups g of sum of t_bp(d_g) over the branches b of g

with t_bp(d) of branch b on d devices. Branches of a group share its memory: what each holds throughout adds up, what
it needs while it runs does not. Few branches are assigned exactly (``exact``, a dynamic programme over subsets), many
by longest processing time first (``longest_first``: on m equal groups no more than 4/3 - 1/(3m) of the optimum; Graham
1969, "Bounds on multiprocessing timing anomalies", theorem 2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.base import Communication, Moment

# What moves at the ends of a branch that has devices of its own, and what that takes in memory.
#
# The trunk (all layers outside branches) works on all D devices: each on its share of the samples where they can be
# shared evenly (spread), else every device on all of them. A branch works on d of them, with b ways to share the
# samples. Bytes of one micro-batch, X of a tensor:
#
#     in     a device lacks X (1/b - 1/D) where the trunk is spread; nothing where every device has all samples,
#            as it has
#            of what the model is given
#     out    spread: D - d devices get X/D each, d devices send it: X max(1/D, (D - d) / (d D)) on the busiest;
#            else, and of what the model gives, X to every device, in one broadcast
#     back   where spread the same ways with gradients; else every device has the gradients of what came out of a
#            branch,
#            and those of what went in go to every device
#
# The host of every device puts off each call of a branch, and gives or takes what it returns (``HostOverhead.branch``);
# each further message of one pass is a send or receive of a group's device (``messages``, ``HostOverhead.pipeline``).
#
# A step waits for the slowest group in forward, in backward and in the update; groups work side by side (``assign``).


NAME = "branch"


@dataclass(frozen=True, slots=True)
class BranchTraffic:
    """What enters and leaves a set of layers, bytes a sample."""

    read: int = 0  # tensors that layers outside make and it reads; what the model is given is not counted
    written: int = 0  # tensors that it makes and layers outside read
    results: int = 0  # outputs that no layer reads


@dataclass(frozen=True, slots=True)
class BranchSite:
    """Where a branch works."""

    world: int  # all devices (D)
    devices: int  # of its group (d)
    sharing: int  # ways that its group shares the samples (b)
    spread: bool  # whether the trunk shares the samples among all devices
    microbatch: int  # samples

    @property
    def everyone(self) -> RankGroup:
        """All devices."""
        return RankGroup(self.world)


def border_of(graph: ModelGraph, layers: Collection[str]) -> BranchTraffic:
    """What enters and leaves some layers of a graph that says which tensors go between them."""
    read = sum(t.size for t in graph.tensors if t.producer not in layers and not set(layers).isdisjoint(t.readers))
    entering = sum(t.size for t in graph.tensors if t.producer in layers and not set(layers).issuperset(t.readers))
    producers = {tensor.producer for tensor in graph.tensors}
    ends = (layer for layer in graph.layers if layer.name in layers and layer.name not in producers)
    return BranchTraffic(read, entering, sum(graph.kind_of(layer).output_bytes for layer in ends))


def moves(border: BranchTraffic, site: BranchSite, training: bool = True) -> tuple[Communication, ...]:
    """What a device of a branch's group, or one that waits for it, sends or receives for one micro-batch."""
    if site.world == 1:
        return ()
    both = (Moment.FORWARD, Moment.BACKWARD) if training else (Moment.FORWARD,)
    samples = site.microbatch
    broadcast = Communication(
        Collective.BROADCAST, border.results * samples, site.everyone, Moment.FORWARD, False, 1, NAME
    )
    found = [broadcast]
    if site.spread:
        found += [_exchange(border.read * samples * _lacking(site), site, moment) for moment in both]
        found += [_exchange(border.written * samples * _leaving(site), site, moment) for moment in both]
    else:
        ends = [(border.written, Moment.FORWARD), *([(border.read, Moment.BACKWARD)] * training)]
        found += [
            Communication(Collective.BROADCAST, size * samples, site.everyone, moment, False, 1, NAME)
            for size, moment in ends
            if site.devices < site.world or site.sharing > 1
        ]
    return tuple(one for one in found if one.size > 0)


def messages(border: BranchTraffic, site: BranchSite) -> int:
    """Messages in or out that a device of the group sends or receives in one pass, beyond one of what comes out."""
    if site.world == 1:
        return 0
    peers = max(-(-(site.world - site.devices) // site.devices), 1)
    return peers * (1 + (border.read > 0)) - 1


def _lacking(site: BranchSite) -> float:
    """Share of a tensor that a device of the group gets from others."""
    return max(1 / site.sharing - 1 / site.world, 0.0)


def _leaving(site: BranchSite) -> float:
    """Share of a tensor that the busiest device sends or gets."""
    if site.devices == site.world:
        return _lacking(site)
    return max(1 / site.world, (site.world - site.devices) / (site.devices * site.world))


def _exchange(volume: float, site: BranchSite, moment: Moment) -> Communication:
    """Every device sends and gets so many bytes at the most; an all-to-all keeps one part of its size where it is."""
    size = volume * site.world / (site.world - 1)
    return Communication(Collective.ALL_TO_ALL, size, site.everyone, moment, False, 1, NAME)


def buffer_bytes(border: BranchTraffic, site: BranchSite, member: bool, training: bool = True) -> int:
    """Bytes on a device of what goes in and out of a branch, and in training of their gradients."""
    entering = border.read / site.sharing if member else 0.0
    leaving = border.written * (1 / site.world if site.spread else 1.0) + border.results
    return round((entering + leaving) * site.microbatch * (2 if training else 1))


Value = TypeVar("Value")
Phases = tuple[float, ...]
"""Seconds of each phase of a step."""

MOST_WORK = 300_000
"""Subsets times places that the exact assignment looks at, at the most."""


@dataclass(frozen=True, slots=True)
class Option:
    """A way to run a branch on so many devices."""

    seconds: Phases  # of each phase
    held: int = 0  # bytes on each device that stay while other branches of the group run
    working: int = 0  # bytes beyond them while it runs

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds)


Job = Mapping[int, Sequence[Option]]
"""What a branch may do, by devices of its group; sizes that are absent are not offered."""


@dataclass(frozen=True, slots=True)
class BranchGroup:
    """A group of devices and what it runs."""

    first: int  # its first device
    devices: int
    branches: tuple[tuple[int, Option], ...]  # number of each branch and its option, in the order they run

    @property
    def seconds(self) -> Phases:
        """Of each phase."""
        return _summed([option.seconds for _, option in self.branches])

    @property
    def memory(self) -> int:
        """Bytes on each of its devices."""
        return sum(option.held for _, option in self.branches) + max(option.working for _, option in self.branches)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Every branch in a group."""

    groups: tuple[BranchGroup, ...]  # by their first device
    proven: bool  # whether none is quicker

    @property
    def seconds(self) -> float:
        """Of a step: each phase lasts as long as its slowest group."""
        return makespan(self.groups)


def makespan(groups: Iterable[BranchGroup]) -> float:
    """Seconds of a step, see the module."""
    return sum(_longest(group.seconds for group in groups))


def assign(jobs: Sequence[Job], devices: int, room: int, node: int, least: int = 1) -> Assignment | None:
    """The quickest assignment: exact where that is cheap, else by longest processing time first.

    Args:
        jobs: the branches.
        devices: how many there are.
        room: bytes that the branches of a device may take.
        node: devices of a node; a group that one node can hold lies within one.
        least: groups that there are at the least.

    Returns:
        None where some branch fits nowhere.
    """
    sizes = {size for job in jobs for size in job if size <= devices}
    if 3 ** len(jobs) * devices * len(sizes) <= MOST_WORK:
        return exact(jobs, devices, room, node, least)
    assignment = longest_first(jobs, devices, room, node, least)
    return None if assignment is None else Assignment(assignment, proven=False)


def places(devices: int, sizes: Iterable[int], node: int) -> list[range]:
    """Where groups may lie: within a node where one can hold them, else from the beginning of one."""
    return [
        range(first, first + size)
        for size in sorted(set(sizes))
        for first in range(devices - size + 1)
        if first % node + size <= node or (size > node and first % node == 0)
    ]


def exact(jobs: Sequence[Job], devices: int, room: int, node: int, least: int = 1) -> Assignment | None:
    """The quickest assignment there is, see ``assign``; None where some branch fits nowhere.

    Dynamic programme over (branches left, first free device, groups needed yet), which keeps every Pareto-best tuple of
    phases.
    """
    by_start: dict[int, list[range]] = {}
    for place in places(devices, {size for job in jobs for size in job}, node):
        by_start.setdefault(place.start, []).append(place)

    @cache
    def team(subset: int, size: int) -> tuple[tuple[tuple[int, Option], ...], ...]:
        return tuple(_teams(jobs, subset, size, room))

    @cache
    def best(left: int, first: int, needed: int) -> tuple[tuple[Phases, tuple[BranchGroup, ...]], ...]:
        if not left:
            return () if needed else (((), ()),)
        if first >= devices:
            return ()
        options = list[tuple[Phases, tuple[BranchGroup, ...]]]()
        for place in by_start.get(first, ()):
            for subset in _subsets(left):
                teams = team(subset, len(place))
                rest = best(left ^ subset, place.stop, max(needed - 1, 0)) if teams else ()
                options += [_with(BranchGroup(first, len(place), team), tail) for team in teams for tail in rest]
        return _pareto([*options, *best(left, first + 1, needed)])

    ends = best((1 << len(jobs)) - 1, 0, least)
    groups = min(ends, key=lambda end: sum(end[0]))[1] if ends else ()
    return Assignment(groups, proven=True) if groups else None


def _with(group: BranchGroup, tail: tuple[Phases, tuple[BranchGroup, ...]]) -> tuple[Phases, tuple[BranchGroup, ...]]:
    return _longest([group.seconds, *([tail[0]] if tail[0] else [])]), (group, *tail[1])


def _subsets(bits: int) -> Iterator[int]:
    part = bits
    while part:
        yield part
        part = (part - 1) & bits


def _teams(jobs: Sequence[Job], subset: int, size: int, room: int) -> list[tuple[tuple[int, Option], ...]]:
    """Pareto-best ways to run some branches one by one on a group of so many devices, within its memory."""
    teams: list[tuple[tuple[int, Option], ...]] = [()]
    for number in (number for number in range(len(jobs)) if subset >> number & 1):
        longer = [(*team, (number, option)) for team in teams for option in jobs[number].get(size, ())]
        fitting = [team for team in longer if BranchGroup(0, size, team).memory <= room]
        teams = [team for _, team in _pareto([(_figures(team), team) for team in fitting])]
    return teams


def _figures(team: Sequence[tuple[int, Option]]) -> Phases:
    options = [option for _, option in team]
    sizes = sum(option.held for option in options), max(option.working for option in options)
    return (*_summed([option.seconds for option in options]), *map(float, sizes))


def _pareto(candidates: Sequence[tuple[Phases, Value]]) -> tuple[tuple[Phases, Value], ...]:
    """Those that no other equals or beats in everything; of equal ones the first."""
    kept: list[tuple[Phases, Value]] = []
    for candidate in sorted(candidates, key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other[0], candidate[0], strict=True)) for other in kept):
            kept.append(candidate)
    return tuple(kept)


def longest_first(
    jobs: Sequence[Job], devices: int, room: int, node: int, least: int = 1
) -> tuple[BranchGroup, ...] | None:
    """Longest processing time first on groups of equal size, for the best of all sizes; None where nothing fits.

    Groups without a branch count: there are ``least`` to choose from, be they used or not.
    """
    phases = []
    for size in sorted({size for job in jobs for size in job}):
        every = [place for place in places(devices, [size], node) if place.start % size == 0]
        for count in range(least, min(len(every), len(jobs)) + 1):
            groups = on_groups(jobs, every[:count], room)
            phases += [] if groups is None else [groups]
    return min(phases, key=makespan, default=None)


def on_groups(jobs: Sequence[Job], groups: Sequence[range], room: int) -> tuple[BranchGroup, ...] | None:
    """Longest processing time first: each branch, the longest first, to the group that is done with it first.

    A branch takes its quickest option that leaves the group within its memory; None where it has none in any group.
    """
    taken: list[tuple[tuple[int, Option], ...]] = [()] * len(groups)
    least = [min((one.total for place in groups for one in job.get(len(place), ())), default=0.0) for job in jobs]
    for number in sorted(range(len(jobs)), key=lambda number: -least[number]):
        ends = [
            (sum(BranchGroup(0, len(place), longer).seconds), group, longer)
            for group, place in enumerate(groups)
            for option in jobs[number].get(len(place), ())
            if BranchGroup(0, len(place), longer := (*taken[group], (number, option))).memory <= room
        ]
        if not ends:
            return None
        _, group, longer = min(ends, key=lambda end: end[:2])
        taken[group] = longer
    return tuple(
        BranchGroup(place.start, len(place), tuple(sorted(jobs_of_group, key=lambda pair: pair[0])))
        for place, jobs_of_group in zip(groups, taken, strict=True)
        if jobs_of_group
    )


def _summed(every: Sequence[Phases]) -> Phases:
    return tuple(map(sum, zip(*every, strict=True)))


def _longest(every: Iterable[Phases]) -> Phases:
    return tuple(map(max, zip(*every, strict=True)))
