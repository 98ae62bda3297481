"""What moves at the ends of a branch that has devices of its own, and what that takes in memory.

The trunk (all layers outside branches) works on all D devices: each on its share of the samples where they can be
shared evenly (spread), else every device on all of them. A branch works on d of them, with b ways to share the samples.
Bytes of one micro-batch, X of a tensor:

    in     a device lacks X (1/b - 1/D) where the trunk is spread; nothing where every device has all samples, as it has
           of what the model is given
    out    spread: D - d devices get X/D each, d devices send it: X max(1/D, (D - d) / (d D)) on the busiest;
           else, and of what the model gives, X to every device, in one broadcast
    back   where spread the same ways with gradients; else every device has the gradients of what came out of a branch,
           and those of what went in go to every device

The host of every device puts off each call of a branch, and gives or takes what it returns (``HostOverhead.branch``);
each further message of one pass is a send or receive of a group's device (``messages``, ``HostOverhead.pipeline``).

A step waits for the slowest group in forward, in backward and in the update; groups work side by side (``assign``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.base import Communication, Moment

NAME = "branch"


@dataclass(frozen=True, slots=True)
class BranchTraffic:
    """What enters and leaves a set of layers, bytes a sample."""

    read: int = 0  # tensors that layers outside make and it reads; what the model is given is not counted
    given: int = 0  # tensors that it makes and layers outside read
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
    given = sum(t.size for t in graph.tensors if t.producer in layers and not set(layers).issuperset(t.readers))
    told = {tensor.producer for tensor in graph.tensors}
    ends = (layer for layer in graph.layers if layer.name in layers and layer.name not in told)
    return BranchTraffic(read, given, sum(graph.kind_of(layer).output_bytes for layer in ends))


def moves(border: BranchTraffic, site: BranchSite, training: bool = True) -> tuple[Communication, ...]:
    """What a device of a branch's group, or one that waits for it, sends or receives for one micro-batch."""
    if site.world == 1:
        return ()
    both = (Moment.FORWARD, Moment.BACKWARD) if training else (Moment.FORWARD,)
    samples = site.microbatch
    whole = Communication(Collective.BROADCAST, border.results * samples, site.everyone, Moment.FORWARD, False, 1, NAME)
    found = [whole]
    if site.spread:
        found += [_exchange(border.read * samples * _lacking(site), site, moment) for moment in both]
        found += [_exchange(border.given * samples * _leaving(site), site, moment) for moment in both]
    else:
        ends = [(border.given, Moment.FORWARD), *([(border.read, Moment.BACKWARD)] * training)]
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
    leaving = border.given * (1 / site.world if site.spread else 1.0) + border.results
    return round((entering + leaving) * site.microbatch * (2 if training else 1))
