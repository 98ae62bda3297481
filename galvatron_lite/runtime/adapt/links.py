"""Measures the links between two steps: an all-reduce on the groups that go over one level of the cluster alone.

Collectives inside a step tell little of a link: they wait for whoever is last. Between steps all ranks start together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import distributed as dist

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.profiler.measure_hardware import GroupShape, make_group, prepare
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runtime.adapt.correct import members_of, points_of
from galvatron_lite.runtime.adapt.schema import LinkPoint

_REPETITIONS = 9
"""Of which the second quickest counts: other work of the machine makes a transfer longer, nothing makes it shorter."""


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """One level's groups."""

    level: str  # its name
    group: dist.ProcessGroup | None  # this rank's; None: the whole world
    points: tuple[tuple[int, float], ...]  # bytes of the tensor, and predicted seconds


def probes_of(profile: Profile) -> tuple[LinkProbe, ...]:
    """A probe of every level that joins several members; all ranks of the world call it together."""
    found = []
    for (name, shape), (_, points) in zip(members_of(profile.cluster), points_of(profile), strict=True):
        group = make_group(GroupShape(int(shape.size), int(shape.stride), int(shape.siblings)))
        found.append(LinkProbe(name, group, points))
    return tuple(found)


def measure_links(probes: tuple[LinkProbe, ...], device: torch.device) -> tuple[LinkPoint, ...]:
    """What the links do now; all ranks of the world call it together, and get the same."""
    found = []
    for probe in probes:
        for size, predicted in probe.points:
            call = prepare(Collective.ALL_REDUCE, size, probe.group, device)
            seconds = _seconds(call, device)
            found.append(LinkPoint(probe.level, size, seconds, predicted))
    return tuple(found)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call that all ranks start together, of the slowest rank; the same on every rank."""
    call()
    own = torch.tensor([_once(call, device) for _ in range(_REPETITIONS)], device=device, dtype=torch.float32)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return float(own.sort().values[1])


def _once(call: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    _settle(device)
    before = perf_counter()
    call()
    _settle(device)
    return perf_counter() - before


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
