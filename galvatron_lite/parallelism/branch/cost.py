"""Assign branches to groups of consecutive devices, each of which runs its branches one after another.

A step has phases (forward, backward, update) after which all groups wait for the slowest, so its time is

    sum over phases p of max over groups g of sum of t_bp(d_g) over the branches b of g

with t_bp(d) of branch b on d devices. Branches of a group share its memory: their persistent bytes add up, their
transient bytes do not. Few branches are assigned exactly (``exact``, a dynamic programme over subsets), many by longest
processing time first (``longest_first``: on m equal groups at most 4/3 - 1/(3m) of the optimum; Graham 1969, "Bounds on
multiprocessing timing anomalies", theorem 2).

The trunk (all layers outside branches) uses all D devices: each processes its share of the samples if they divide
evenly (spread), else all samples. A branch uses d devices, with its samples split b ways. For X bytes of a tensor of a
micro-batch, the ends of a branch communicate:

    in     spread: a device lacks X (1/b - 1/D); else nothing: all devices have all samples, as they have of the
           model's inputs
    out    spread: D - d devices get X/D each, and d devices send it: X max(1/D, (D - d) / (d D)) on the busiest;
           else, and for outputs of the model, a broadcast of X to all devices
    back   spread: the same for gradients; else all devices have the gradients of a branch's outputs, and those of its
           inputs are broadcast

The host of each device defers each call of a branch, and hands over what it returns (``HostOverhead.branch``). Each
further message of a pass is a send or receive of a device of the group (``messages``, ``HostOverhead.pipeline``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.base import Communication, Moment

NAME = "branch"


@dataclass(frozen=True, slots=True)
class BranchTraffic:
    """Bytes of a sample that enter and leave a set of layers."""

    read: int = 0  # outputs of layers outside that it reads; inputs of the model do not count
    written: int = 0  # its outputs that layers outside read
    results: int = 0  # its outputs that no layer reads


@dataclass(frozen=True, slots=True)
class BranchSite:
    """The devices of a branch; see the module."""

    world: int  # all devices (D)
    devices: int  # of its group (d)
    sharing: int  # how many ways its group splits the samples (b)
    spread: bool  # whether the trunk splits the samples over all devices
    microbatch: int  # samples

    @property
    def everyone(self) -> RankGroup:
        """All devices."""
        return RankGroup(self.world)


def border_of(graph: ModelGraph, layers: Collection[str]) -> BranchTraffic:
    """Return the traffic of some layers of a graph with tensors between layers."""
    read = sum(t.size for t in graph.tensors if t.producer not in layers and not set(layers).isdisjoint(t.readers))
    entering = sum(t.size for t in graph.tensors if t.producer in layers and not set(layers).issuperset(t.readers))
    producers = {tensor.producer for tensor in graph.tensors}
    ends = (layer for layer in graph.layers if layer.name in layers and layer.name not in producers)
    return BranchTraffic(read, entering, sum(graph.kind_of(layer).output_bytes for layer in ends))


def moves(border: BranchTraffic, site: BranchSite, training: bool = True) -> tuple[Communication, ...]:
    """Return what a device of a branch's group, or a device that waits for it, communicates for one micro-batch."""
    if site.world == 1:
        return ()
    moments = (Moment.FORWARD, Moment.BACKWARD) if training else (Moment.FORWARD,)
    samples = site.microbatch
    broadcasts = [(border.results, Moment.FORWARD)]
    exchanges: list[Communication] = []
    if site.spread:
        exchanges += [_exchange(border.read * samples * _lacking(site), site, moment) for moment in moments]
        exchanges += [_exchange(border.written * samples * _leaving(site), site, moment) for moment in moments]
    elif site.devices < site.world or site.sharing > 1:
        broadcasts += [(border.written, Moment.FORWARD), *([(border.read, Moment.BACKWARD)] * training)]
    sent = [
        Communication(Collective.BROADCAST, size * samples, site.everyone, moment, False, 1, NAME)
        for size, moment in broadcasts
    ]
    return tuple(communication for communication in (*sent, *exchanges) if communication.size > 0)


def messages(border: BranchTraffic, site: BranchSite) -> int:
    """Return the messages that a device of the group sends or receives in a pass, beyond one for the output."""
    if site.world == 1:
        return 0
    peers = max(-(-(site.world - site.devices) // site.devices), 1)
    return peers * (1 + (border.read > 0)) - 1


def _lacking(site: BranchSite) -> float:
    """The share of a tensor that a device of the group receives."""
    return max(1 / site.sharing - 1 / site.world, 0.0)


def _leaving(site: BranchSite) -> float:
    """The share of a tensor that the busiest device sends or receives."""
    if site.devices == site.world:
        return _lacking(site)
    return max(1 / site.world, (site.world - site.devices) / (site.devices * site.world))


def _exchange(volume: float, site: BranchSite, moment: Moment) -> Communication:
    """An exchange in which each device sends and receives at most ``volume`` bytes.

    One of the ``world`` parts of an all-to-all stays on its device.
    """
    size = volume * site.world / (site.world - 1)
    return Communication(Collective.ALL_TO_ALL, size, site.everyone, moment, False, 1, NAME)


def buffer_bytes(border: BranchTraffic, site: BranchSite, member: bool, training: bool = True) -> int:
    """Return the bytes on a device of inputs and outputs of a branch, and in training of their gradients."""
    inputs = border.read / site.sharing if member else 0.0
    outputs = border.written * (1 / site.world if site.spread else 1.0) + border.results
    return round((inputs + outputs) * site.microbatch * (2 if training else 1))


Value = TypeVar("Value")
Phases = tuple[float, ...]
"""Seconds of each phase of a step."""

MOST_WORK = 300_000
"""Most subsets times places for an exact assignment."""


@dataclass(frozen=True, slots=True)
class Option:
    """A strategy of a branch on a number of devices."""

    seconds: Phases
    held: int = 0  # persistent bytes on each device, also while other branches of the group run
    working: int = 0  # transient bytes on each device, while the branch runs

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds)


Job = Mapping[int, Sequence[Option]]
"""The options of a branch, by the size of its group."""


@dataclass(frozen=True, slots=True)
class BranchGroup:
    """A group of devices and its branches."""

    first: int  # its first device
    devices: int
    branches: tuple[tuple[int, Option], ...]  # index and option of each branch, in the order they run

    @property
    def seconds(self) -> Phases:
        """Seconds of each phase."""
        return _summed([option.seconds for _, option in self.branches])

    @property
    def memory(self) -> int:
        """Bytes on each device."""
        return sum(option.held for _, option in self.branches) + max(option.working for _, option in self.branches)


@dataclass(frozen=True, slots=True)
class Assignment:
    """The groups of all branches."""

    groups: tuple[BranchGroup, ...]  # by their first device
    proven: bool  # whether no assignment is faster

    @property
    def seconds(self) -> float:
        """Seconds of a step; see ``makespan``."""
        return makespan(self.groups)


def makespan(groups: Iterable[BranchGroup]) -> float:
    """Return the seconds of a step: the sum over phases of the slowest group."""
    return sum(_longest(group.seconds for group in groups))


def assign(jobs: Sequence[Job], devices: int, room: int, node: int, least: int = 1) -> Assignment | None:
    """Assign branches to devices: exactly if that is cheap, else by longest processing time first.

    Args:
        jobs: the branches.
        devices: number of devices.
        room: bytes for branches on each device.
        node: devices of a node; groups that fit into a node do not cross nodes.
        least: fewest groups.

    Returns:
        The fastest assignment; None if a branch fits nowhere.
    """
    sizes = {size for job in jobs for size in job if size <= devices}
    if 3 ** len(jobs) * devices * len(sizes) <= MOST_WORK:
        return exact(jobs, devices, room, node, least)
    assignment = longest_first(jobs, devices, room, node, least)
    return None if assignment is None else Assignment(assignment, proven=False)


def places(devices: int, sizes: Iterable[int], node: int) -> list[range]:
    """Return the possible groups of devices: inside a node if they fit, else from the first device of a node."""
    return [
        range(first, first + size)
        for size in sorted(set(sizes))
        for first in range(devices - size + 1)
        if first % node + size <= node or (size > node and first % node == 0)
    ]


def exact(jobs: Sequence[Job], devices: int, room: int, node: int, least: int = 1) -> Assignment | None:
    """Return the fastest of all assignments; see ``assign``.

    A dynamic programme over (remaining branches, first free device, groups still required) keeps all Pareto-best tuples
    of phases.
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
    """Pareto-best options of a set of branches on one group of ``size`` devices, within its memory."""
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
    """The candidates that no other equals or beats in all figures; of equal ones the first."""
    kept: list[tuple[Phases, Value]] = []
    for candidate in sorted(candidates, key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other[0], candidate[0], strict=True)) for other in kept):
            kept.append(candidate)
    return tuple(kept)


def longest_first(
    jobs: Sequence[Job], devices: int, room: int, node: int, least: int = 1
) -> tuple[BranchGroup, ...] | None:
    """Assign by longest processing time first on groups of equal size, for the best size; None if nothing fits.

    There are ``least`` groups or more, of which some may stay empty.
    """
    candidates = []
    for size in sorted({size for job in jobs for size in job}):
        groups = [place for place in places(devices, [size], node) if place.start % size == 0]
        for count in range(least, min(len(groups), len(jobs)) + 1):
            assigned = on_groups(jobs, groups[:count], room)
            candidates += [] if assigned is None else [assigned]
    return min(candidates, key=makespan, default=None)


def on_groups(jobs: Sequence[Job], groups: Sequence[range], room: int) -> tuple[BranchGroup, ...] | None:
    """Assign each branch, the longest first, to the group that completes it first.

    A branch uses its fastest option within the group's memory; the result is None if it has none in any group.
    """
    assigned: list[tuple[tuple[int, Option], ...]] = [()] * len(groups)
    fastest = [
        min((option.total for place in groups for option in job.get(len(place), ())), default=0.0) for job in jobs
    ]
    for index in sorted(range(len(jobs)), key=lambda index: -fastest[index]):
        ends = [
            (sum(BranchGroup(0, len(place), longer).seconds), group, longer)
            for group, place in enumerate(groups)
            for option in jobs[index].get(len(place), ())
            if BranchGroup(0, len(place), longer := (*assigned[group], (index, option))).memory <= room
        ]
        if not ends:
            return None
        _, group, longer = min(ends, key=lambda end: end[:2])
        assigned[group] = longer
    return tuple(
        BranchGroup(place.start, len(place), tuple(sorted(branches, key=lambda pair: pair[0])))
        for place, branches in zip(groups, assigned, strict=True)
        if branches
    )


def _summed(phases: Sequence[Phases]) -> Phases:
    return tuple(map(sum, zip(*phases, strict=True)))


def _longest(phases: Iterable[Phases]) -> Phases:
    return tuple(map(max, zip(*phases, strict=True)))
