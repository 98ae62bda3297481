"""Data sheets of devices by name, and clusters by name or from a user's file.

``configs/clusters/README.md`` describes the format of a cluster file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import ceil, prod
from pathlib import Path
from typing import Any

from galvatron_lite.cluster.cluster import Cluster, Device, Level
from galvatron_lite.cluster.links import level_of_link
from galvatron_lite.errors import FileFormatError, InputError, unknown
from galvatron_lite.files import from_data, kind_of, read_data, to_data
from galvatron_lite.folders import config_folder
from galvatron_lite.limits import DEVICES, check_range
from galvatron_lite.units import parse_bytes

ANY = "any"
"""Size of an outermost level that holds as many members as the requested number of GPUs needs."""

UP_TO = "up to "
"""Prefix of the largest size of a level; with fewer GPUs its members are filled evenly."""

_MIN_MEMORY, _MIN_RATE = 2**20, 1e6
"""Bytes, and bytes a second, below which a cluster file most likely lacks a unit."""

_LAUNCH = 4e-6
"""[Empirical] seconds between back-to-back kernels of eager PyTorch on a busy stream."""


@cache
def device_sheets() -> tuple[tuple[Device, tuple[str, ...]], ...]:
    """Return every device with a data sheet and its other names (``configs/devices/devices.yaml``)."""
    data = read_data(config_folder("devices") / "devices.yaml")
    return tuple((_device(name, sheet, data), tuple(sheet.get("names", ()))) for name, sheet in data["devices"].items())


def _device(name: str, sheet: dict[str, Any], data: dict[str, Any]) -> Device:
    host, host_memory = data["hosts"][sheet["host"]]
    return Device(
        name, round(sheet["memory"] * 2**30), sheet["bandwidth"] * 1e9,
        {precision: peak * 1e12 for precision, peak in sheet["peak"].items()}, sheet["units"], _LAUNCH,
        sheet["context"] * 2**20, data["sources"][sheet["source"]], host * 1e9, host_memory * 1e9,
    )  # fmt: skip


def known_devices() -> tuple[str, ...]:
    """Return the names of the devices with a data sheet."""
    return tuple(device.name for device, _ in device_sheets())


def known_clusters() -> tuple[str, ...]:
    """Return the names of the clusters that ship with the package."""
    return tuple(sorted(path.stem for path in config_folder("clusters").glob("*.yaml")))


def _normalized(name: str) -> str:
    """Drop vendor, punctuation and case of a device's name: ``NVIDIA A100-SXM4-80GB`` becomes ``a100sxm480gb``."""
    text = name.lower()
    for word in ("nvidia", "tesla", "geforce"):
        text = text.replace(word, "")
    return "".join(character for character in text if character.isalnum())


def match_device(name: str) -> Device | None:
    """Return the data sheet of a device by any of its names, the CUDA driver's included; None if there is none."""
    wanted = _normalized(name)
    matches = (device for device, names in device_sheets() if wanted in map(_normalized, (device.name, *names)))
    return next(matches, None)


def device_named(name: str, field: str = "device") -> Device:
    """Return the data sheet of a device.

    Raises:
        InputError: unknown device; lists the known ones.
    """
    device = match_device(name)
    if device is None:
        raise unknown(field, name, known_devices())
    return device


def load_cluster(name_or_path: str | Path, gpus: int | None = None) -> Cluster:
    """Return a cluster by name (``a100-80gb``) or from a file.

    Args:
        name_or_path: a name of ``known_clusters()``, or a YAML or JSON file.
        gpus: number of devices, the first ones in rank order; None: all of a file with fixed sizes, one node of a
            cluster of any size.

    Raises:
        InputError: unknown name, or a number of devices that does not fill whole nodes.
        FileFormatError: a file that does not describe a cluster.
    """
    if gpus is not None:
        check_range("--gpus", gpus, DEVICES)
    path = _path_of(name_or_path)
    data = read_data(path)
    if not isinstance(data, dict):
        raise FileFormatError(str(path), kind_of(data), "A cluster file is a mapping with name, device and levels.")
    cluster = from_data(Cluster, _expand(dict(data), gpus, str(path)), str(path))
    _check_figures(cluster, str(path))
    return cluster


def _path_of(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml", ".json"} or len(path.parts) > 1:
        return path
    clusters = known_clusters()
    name = str(name_or_path).lower()
    if name not in clusters:
        raise unknown("--cluster", name, clusters, "Or give a YAML file.")
    return config_folder("clusters") / f"{name}.yaml"


def _expand(data: dict[str, Any], gpus: int | None, field: str) -> dict[str, Any]:
    """Return the fields of a ``Cluster``: devices and links looked up by name, sizes fixed for ``gpus`` devices."""
    data.pop("description", None)
    groups = _device_groups(data, field)
    if any("levels" in group for group in groups):
        return _expand_unlike(data, groups, gpus, field)
    if gpus is None and "count" in groups[-1]:
        gpus = sum(int(group["count"]) for group in groups)
    data["levels"] = _levels(data.get("levels"), gpus, f"{field}, levels", field)
    data["groups"] = _first_devices(groups, prod(level["size"] for level in data["levels"]), field)
    return data


def _expand_unlike(data: dict[str, Any], groups: list[dict[str, Any]], gpus: int | None, field: str) -> dict[str, Any]:
    """Expand a file whose types of devices have their own links.

    A node holds one type. Between types the file's common levels count, else the slower link of each level.
    """
    common, available = data.pop("levels", None), sum(int(group["count"]) for group in groups)
    devices = gpus or available
    if devices > available:
        raise InputError("--gpus", gpus, f"{field} has {available} devices.")
    for number, group in enumerate(groups):  # check the groups beyond ``devices``, too
        _levels(group.get("levels", common), None, f"{field}, groups.{number}.levels", field)
    kept = _first_devices(groups, devices, field)
    links = list[list[Level]]()
    for number, group in enumerate(kept):
        place = f"{field}, groups.{number}.levels"
        levels = _levels(group.get("levels", common), devices, place, place)
        node = levels[0]["size"]
        if group["count"] % node:
            raise FileFormatError(place, group["count"], f"A node has {node} devices: give whole nodes.")
        links.append([from_data(Level, level, place) for level in levels])
    _check_sizes(links, field)
    between: Sequence[Level] = slower_levels(links)
    if common is not None and len(kept) > 1:
        between = [from_data(Level, level, field) for level in _levels(common, devices, f"{field}, levels", field)]
    are_common = all(tuple(levels) == tuple(between) for levels in links)
    data["levels"] = [to_data(level) for level in between]
    data["groups"] = [
        {"device": group["device"], "count": group["count"], "levels": [] if are_common else list(map(to_data, levels))}
        for group, levels in zip(kept, links, strict=True)
    ]
    return data


def _check_sizes(links: Sequence[Sequence[Level]], field: str) -> None:
    """Refuse types of devices whose levels differ in size, since ranks are numbered over equal levels."""
    sizes = [[level.size for level in levels] for levels in links]
    if any(size != sizes[0] for size in sizes):
        raise FileFormatError(
            f"{field}, groups.levels", sizes, "Give all types equally many levels with the same numbers of members."
        )


def slower_levels(links: Sequence[Sequence[Level]]) -> tuple[Level, ...]:
    """Return the levels that count between devices of several types: ``slower`` of each level."""
    return tuple(slower(levels) for levels in zip(*links, strict=True))


def slower(levels: Sequence[Level]) -> Level:
    """Merge the links of unlike members into one level, since a message crosses the sender's and the receiver's.

    The bandwidth is the least one, of a whole member and of a single lane; all other figures are the worst.
    """
    worst = min(levels, key=lambda level: level.bandwidth * level.efficiency)
    if all(level == worst for level in levels):
        return worst
    reached = worst.bandwidth * worst.efficiency
    lane = min(level.bandwidth * level.efficiency / level.lanes for level in levels)
    return replace(
        worst,
        latency=max(level.latency for level in levels),
        contention=max(level.contention for level in levels),
        half_size=max(level.half_size for level in levels),
        start=max(level.start for level in levels),
        lanes=max(worst.lanes, ceil(reached / lane * (1 - 1e-9))),
    )


def _device_groups(data: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """Return the runs of equal devices; a single ``device:`` is a run without a count."""
    if ("device" in data) == ("groups" in data):
        present = [key for key in ("device", "groups") if key in data]
        raise FileFormatError(field, present, "Give either device (all alike) or groups (runs of device and count).")
    groups = [{"device": data.pop("device")}] if "device" in data else data["groups"]
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise FileFormatError(f"{field}, groups", groups, "Give a list of entries with device and count.")
    for number, group in enumerate(groups if "groups" in data else ()):
        count = group.get("count")
        if type(count) is not int or count < 1:
            place = f"{field}, groups.{number}.count"
            raise FileFormatError(place, count, "Give how many such devices follow one another.")
    return [group | {"device": _device_data(group.get("device"), f"{field}, device")} for group in groups]


def _device_data(data: Any, field: str) -> Any:
    """Return the plain data of a device named, or described with a readable memory size (``80GiB``)."""
    if isinstance(data, str):
        return to_data(device_named(data, field))
    if isinstance(data, dict) and isinstance(data.get("memory"), str):
        return data | {"memory": parse_bytes(data["memory"], f"{field}.memory")}
    return data


def _levels(data: Any, gpus: int | None, place: str, field: str) -> list[dict[str, Any]]:
    """Return a file's levels with the figures their links imply, cut to ``gpus`` devices."""
    if not isinstance(data, list) or not data or not all(isinstance(level, dict) for level in data):
        raise FileFormatError(place, data, "Give a list of levels, innermost first.")
    levels = [level_of_link(level, f"{place}.{number}") for number, level in enumerate(data)]
    for number, level in enumerate(levels):  # check the levels beyond ``gpus`` devices, too
        size = _max_size(level.get("size"), f"{place}.{number}.size", number == len(levels) - 1)
        from_data(Level, level | {"size": size or 1}, f"{place}.{number}")
    return _filled(levels, gpus, field)


def _filled(levels: list[dict[str, Any]], gpus: int | None, field: str) -> list[dict[str, Any]]:
    """Return the levels that ``gpus`` devices fill, each with its size."""
    filled: list[dict[str, Any]] = []
    members, unit = gpus, 1  # members still to join, and devices in each of them
    for number, level in enumerate(levels):
        size = _max_size(level.get("size"), f"{field}, levels.{number}.size", number == len(levels) - 1)
        if members is None:
            fixed = size if level["size"] == size else None
            filled += [level | {"size": fixed or 1}] if fixed or not filled else []
            continue
        if size is None or members <= size:
            return [*filled, level | {"size": members}]
        if level["size"] != size:
            size = next(share for share in range(size, 0, -1) if members % share == 0)
        if members % size:
            above, below = unit * size, members // size * unit * size
            remedy = f"A {level.get('name', 'node')} has {above} devices; give a number that fills whole ones, such as "
            raise InputError("--gpus", unit * members, f"{remedy}{below} or {below + above}.")
        filled.append(level | {"size": size})
        members, unit = members // size, unit * size
    if members is not None:
        raise InputError("--gpus", gpus, f"{field} has {unit} devices.")
    return filled


def _max_size(value: Any, place: str, is_outermost: bool) -> int | None:
    """Return the largest size of a level (17 of ``up to 17``); None if it is ``any``."""
    if value == ANY and is_outermost:
        return None
    if isinstance(value, str) and (most := value.removeprefix(UP_TO)) != value and most.isdecimal() and int(most):
        return int(most)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        remedy = "Give a number, up to a number for even shares, or any for the outermost level."
        raise FileFormatError(place, value, remedy)
    return value


def _first_devices(groups: list[dict[str, Any]], devices: int, field: str) -> list[dict[str, Any]]:
    """Return the runs that the first ``devices`` devices form."""
    if "count" not in groups[0]:
        return [groups[0] | {"count": devices}]
    kept, left = [], devices
    for group in groups:
        count = min(left, group["count"])
        if count:
            kept.append(group | {"count": count})
        left -= count
    if left:
        raise FileFormatError(f"{field}, groups", devices - left, f"The levels join {devices} devices: list as many.")
    return kept


def _check_figures(cluster: Cluster, field: str) -> None:
    """Refuse figures that no cost can be computed from; the schema has checked their ranges."""
    figures = {group.device.name: group.device for group in cluster.groups}
    for group in cluster.groups:
        device = group.device
        if device != figures[device.name]:
            raise FileFormatError(f"{field}, groups", device.name, "Give devices of other figures another name.")
        if not device.peak or device.memory < 1:
            name, value = ("memory", device.memory) if device.peak else ("peak", device.peak)
            remedy = "Give bytes above 0, and FLOP/s for one precision at least."
            raise FileFormatError(f"{field}, device {device.name}.{name}", value, remedy)
        if device.memory < _MIN_MEMORY:
            remedy = f"That is {device.memory} bytes: write a unit, as in {device.memory}GB."
            raise FileFormatError(f"{field}, device {device.name}.memory", device.memory, remedy)
        rates = {f"device {device.name}.memory_bandwidth": device.memory_bandwidth}
        rates |= {f"levels.{level.name}.bandwidth": level.bandwidth for level in group.levels or cluster.levels}
        for name, rate in rates.items():
            if rate < _MIN_RATE:
                remedy = f"That is {rate:g} bytes a second: write {rate:g}e+9 for {rate:g} GB/s."
                raise FileFormatError(f"{field}, {name}", rate, remedy)
