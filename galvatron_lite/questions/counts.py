"""Numbers of devices that a cluster offers, and the cluster that its first devices make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from galvatron_lite.cluster.cluster import Cluster, DeviceGroup, Level
from galvatron_lite.errors import InputError


def device_counts(cluster: Cluster) -> tuple[int, ...]:
    """Every number of devices that fills whole members of each level: 1 to a node, then whole nodes; ascending."""
    counts, unit = [1], 1
    for level in cluster.levels:
        counts += [unit * members for members in range(2, level.size + 1)]
        unit *= level.size
    return tuple(counts)


def even_counts(cluster: Cluster) -> tuple[int, ...]:
    """Those of ``device_counts`` that divide well: 2^a or 3 * 2^a members of a level, and whole levels; ascending."""
    counts, unit = [1], 1
    for level in cluster.levels:
        counts += [unit * members for members in range(2, level.size + 1) if even(members) or members == level.size]
        unit *= level.size
    return tuple(counts)


def even(number: int) -> bool:
    """Whether a number is 2^a or 3 * 2^a."""
    while number % 2 == 0:
        number //= 2
    return number in (1, 3)


def first_devices(cluster: Cluster, devices: int) -> Cluster:
    """The cluster that the first devices in rank order make.

    Raises:
        InputError: more devices than there are, or a number that fills no whole node.
    """
    if devices == cluster.devices:
        return cluster
    if not 1 <= devices < cluster.devices:
        raise InputError("--gpus", devices, f"The cluster has {cluster.devices}; give 1 to that many.")
    levels, groups = _levels(cluster.levels, devices), _groups(cluster, devices)
    if len(groups) == 1 and groups[0].levels:
        levels, groups = groups[0].levels, (replace(groups[0], levels=()),)
    return replace(cluster, levels=levels, groups=groups)


def _levels(whole: Sequence[Level], devices: int) -> tuple[Level, ...]:
    levels, wanted = list[Level](), devices
    for level in whole:
        if wanted <= level.size:
            return (*levels, replace(level, size=wanted))
        if wanted % level.size:
            raise InputError(
                "--gpus", devices, f"A {level.name} has {level.size} members; give a number of whole ones."
            )
        levels.append(level)
        wanted //= level.size
    return tuple(levels)


def _groups(cluster: Cluster, devices: int) -> tuple[DeviceGroup, ...]:
    groups, left = list[DeviceGroup](), devices
    for group in cluster.groups:
        if left > 0:
            own = _levels(group.levels, devices) if group.levels else ()
            groups.append(replace(group, count=min(left, group.count), levels=own))
        left -= group.count
    return tuple(groups)
