"""Clusters and devices found by name, and clusters read from the user's own file.

The format of a cluster file is described in ``configs/clusters/README.md``.
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

_LEAST_MEMORY, _LEAST_RATE = 2**20, 1e6
"""Bytes, and bytes a second, below which a cluster file has most likely left out a unit."""


def check_sizes(types: Sequence[Sequence[Level]], field: str) -> None:
    """Refuse types of devices whose nodes are not of one size: ranks are laid out in equal levels.

    Raises:
        FileFormatError: names the sizes.
    """
    sizes = [[level.size for level in levels] for levels in types]
    if any(size != sizes[0] for size in sizes):
        raise FileFormatError(
            f"{field}, groups.levels", sizes, "Give all types equally many levels with the same numbers of members."
        )


def slower_levels(types: Sequence[Sequence[Level]]) -> tuple[Level, ...]:
    """What counts among devices of all types: ``slower`` of each level."""
    return tuple(slower(levels) for levels in zip(*types, strict=True))


def slower(levels: Sequence[Level]) -> Level:
    """One level for members joined by unlike links: a message goes through the sender's and the receiver's.

    The least bandwidth counts, for a whole member and for one of its lanes alone; of all else the worst.
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


ANY = "any"
"""Size of an outermost level that takes as many members as the number of GPUs asks for."""


UP_TO = "up to "
"""What stands before the most members of a level that is filled evenly, whatever the number of GPUs."""


_LAUNCH = 4e-6
"""[Empirical] seconds between back-to-back kernels of eager PyTorch on a busy stream."""


@cache
def device_sheets() -> tuple[tuple[Device, tuple[str, ...]], ...]:
    """Every device with a data sheet, and its other names (``configs/devices/devices.yaml``)."""
    data = read_data(config_folder("devices") / "devices.yaml")
    return tuple((_sheet(name, sheet, data), tuple(sheet.get("names", ()))) for name, sheet in data["devices"].items())


def _sheet(name: str, sheet: dict[str, Any], data: dict[str, Any]) -> Device:
    host, host_memory = data["hosts"][sheet["host"]]
    return Device(
        name, round(sheet["memory"] * 2**30), sheet["bandwidth"] * 1e9,
        {precision: peak * 1e12 for precision, peak in sheet["peak"].items()}, sheet["units"], _LAUNCH,
        sheet["context"] * 2**20, data["sources"][sheet["source"]], host * 1e9, host_memory * 1e9,
    )  # fmt: skip


def known_devices() -> tuple[str, ...]:
    """Names of the devices with a data sheet."""
    return tuple(device.name for device, _ in device_sheets())


def known_clusters() -> tuple[str, ...]:
    """Names of the clusters that ship with the package."""
    return tuple(sorted(path.stem for path in config_folder("clusters").glob("*.yaml")))


def _plain(name: str) -> str:
    """A device's name without vendor, punctuation and case: ``NVIDIA A100-SXM4-80GB`` is ``a100sxm480gb``."""
    text = name.lower()
    for word in ("nvidia", "tesla", "geforce"):
        text = text.replace(word, "")
    return "".join(character for character in text if character.isalnum())


def match_device(name: str) -> Device | None:
    """The data sheet of a device by any of its names, also the CUDA driver's; None where there is none."""
    wanted = _plain(name)
    matches = (device for device, names in device_sheets() if wanted in map(_plain, (device.name, *names)))
    return next(matches, None)


def device_named(name: str, field: str = "device") -> Device:
    """The data sheet of a device.

    Raises:
        InputError: no such device; lists the known ones.
    """
    device = match_device(name)
    if device is None:
        raise unknown(field, name, known_devices())
    return device


def load_cluster(name_or_path: str | Path, gpus: int | None = None) -> Cluster:
    """A cluster by name (``a100-80gb``) or from a file, with so many devices.

    Args:
        name_or_path: a name of ``known_clusters()``, or a YAML or JSON file.
        gpus: devices wanted, the first ones in rank order; None: all of a file with fixed sizes, one node of a
            cluster of any size.

    Raises:
        InputError: unknown name, or a number of devices that fills no whole node.
        FileFormatError: a file that does not describe a cluster.
    """
    if gpus is not None:
        check_range("--gpus", gpus, DEVICES)
    path = _find(name_or_path)
    data = read_data(path)
    if not isinstance(data, dict):
        raise FileFormatError(str(path), kind_of(data), "A cluster file is a mapping with name, device and levels.")
    cluster = from_data(Cluster, _expand(dict(data), gpus, str(path)), str(path))
    _check(cluster, str(path))
    return cluster


def _find(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml", ".json"} or len(path.parts) > 1:
        return path
    clusters = known_clusters()
    name = str(name_or_path).lower()
    if name not in clusters:
        raise unknown("--cluster", name, clusters, "Or give a YAML file.")
    return config_folder("clusters") / f"{name}.yaml"


def _expand(data: dict[str, Any], gpus: int | None, field: str) -> dict[str, Any]:
    """A cluster file's mapping with device names, ``size: any`` and the number of devices worked out."""
    data.pop("description", None)
    groups = _groups(data, field)
    if any("levels" in group for group in groups):
        return _unlike(data, groups, gpus, field)
    if gpus is None and "count" in groups[-1]:
        gpus = sum(int(group["count"]) for group in groups)
    data["levels"] = _levels(data.get("levels"), gpus, f"{field}, levels", field)
    devices = prod(level["size"] for level in data["levels"])
    data["groups"] = _first_devices(groups, devices, field)
    return data


def _levels(levels_data: Any, gpus: int | None, place: str, field: str) -> list[dict[str, Any]]:
    """A file's levels with what their links imply, cut to so many devices."""
    if (
        not isinstance(levels_data, list)
        or not levels_data
        or not all(isinstance(level, dict) for level in levels_data)
    ):
        raise FileFormatError(place, levels_data, "Give a list of levels, innermost first.")
    linked = [level_of_link(level, f"{place}.{number}") for number, level in enumerate(levels_data)]
    for number, level in enumerate(linked):  # those beyond so many devices, too
        size = _size(level.get("size"), f"{place}.{number}.size", number == len(linked) - 1)
        from_data(Level, level | {"size": size or 1}, f"{place}.{number}")
    return _sized(linked, gpus, field)


def _unlike(data: dict[str, Any], groups: list[dict[str, Any]], gpus: int | None, field: str) -> dict[str, Any]:
    """``_expand`` where types of devices have links of their own: a node is of one type; above it the slower counts."""
    common, there = data.pop("levels", None), sum(int(group["count"]) for group in groups)
    devices = gpus or there
    if devices > there:
        raise InputError("--gpus", gpus, f"{field} has {there} devices.")
    for number, group in enumerate(groups):  # those beyond so many devices, too
        _levels(group.get("levels", common), None, f"{field}, groups.{number}.levels", field)
    kept = _first_devices(groups, devices, field)
    for number, group in enumerate(kept):
        place = f"{field}, groups.{number}.levels"
        own = _levels(group.get("levels", common), devices, place, place)
        if group["count"] % own[0]["size"]:
            raise FileFormatError(place, group["count"], f"A node has {own[0]['size']} devices: give whole nodes.")
        group["levels"] = [from_data(Level, level, place) for level in own]
    check_sizes([group["levels"] for group in kept], field)
    shared_levels = common is not None and len(kept) > 1
    shared = (
        [from_data(Level, level, field) for level in _levels(common, devices, f"{field}, levels", field)]
        if shared_levels
        else None
    )
    levels = shared or slower_levels([group["levels"] for group in kept])
    alone = all(tuple(group["levels"]) == tuple(levels) for group in kept)
    data["levels"] = [to_data(level) for level in levels]
    links = [{} if alone else {"levels": [to_data(level) for level in group["levels"]]} for group in kept]
    runs = [{"device": group["device"], "count": group["count"]} for group in kept]
    data["groups"] = [run | link for run, link in zip(runs, links, strict=True)]
    return data


def _groups(data: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """The runs of equal devices; a single ``device:`` is a run without a count."""
    if ("device" in data) == ("groups" in data):
        present = [key for key in ("device", "groups") if key in data]
        raise FileFormatError(field, present, "Give either device (all alike) or groups (runs of device and count).")
    runs = [{"device": data.pop("device")}] if "device" in data else data["groups"]
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise FileFormatError(f"{field}, groups", runs, "Give a list of entries with device and count.")
    counted = "groups" in data
    for number, run in enumerate(runs):
        count = run.get("count")
        if counted and (type(count) is not int or count < 1):
            raise FileFormatError(
                f"{field}, groups.{number}.count", count, "Give how many such devices follow one another."
            )
    return [run | {"device": _device(run.get("device"), f"{field}, device")} for run in runs]


def _device(data: Any, field: str) -> Any:
    """Plain data of a device given by name, or by figures with a readable memory size (``80GiB``)."""
    if isinstance(data, str):
        return to_data(device_named(data, field))
    if isinstance(data, dict) and isinstance(data.get("memory"), str):
        return data | {"memory": parse_bytes(data["memory"], f"{field}.memory")}
    return data


def _sized(levels: list[dict[str, Any]], gpus: int | None, field: str) -> list[dict[str, Any]]:
    """The levels that so many devices fill, each with its size."""
    sized: list[dict[str, Any]] = []
    wanted, unit = gpus, 1
    for number, level in enumerate(levels):
        size = _size(level.get("size"), f"{field}, levels.{number}.size", number == len(levels) - 1)
        if wanted is None:
            fixed = size if level["size"] == size else None
            sized += [level | {"size": fixed or 1}] if fixed or not sized else []
            continue
        if size is None or wanted <= size:
            return [*sized, level | {"size": wanted}]
        if level["size"] != size:
            size = next(share for share in range(size, 0, -1) if wanted % share == 0)
        if wanted % size:
            above, below = unit * size, wanted // size * unit * size
            remedy = f"A {level.get('name', 'node')} has {above} devices; give a number that fills whole ones, such as "
            raise InputError("--gpus", unit * wanted, f"{remedy}{below} or {below + above}.")
        sized.append(level | {"size": size})
        wanted, unit = wanted // size, unit * size
    if wanted is not None:
        raise InputError("--gpus", gpus, f"{field} has {unit} devices.")
    return sized


def _size(value: Any, place: str, outermost: bool) -> int | None:
    """A level's size, the most of one filled evenly (``up to 17``); None where it takes as many as there are."""
    if value == ANY and outermost:
        return None
    if isinstance(value, str) and (most := value.removeprefix(UP_TO)) != value and most.isdecimal() and int(most):
        return int(most)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        remedy = "Give a number, up to a number for even shares, or any for the outermost level."
        raise FileFormatError(place, value, remedy)
    return value


def _first_devices(groups: list[dict[str, Any]], devices: int, field: str) -> list[dict[str, Any]]:
    """The runs that the first so many devices make."""
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


def _check(cluster: Cluster, field: str) -> None:
    """Refuse figures no cost can be computed from; their ranges are the schema's."""
    figures = {group.device.name: group.device for group in cluster.groups}
    for group in cluster.groups:
        device = group.device
        if device != figures[device.name]:
            raise FileFormatError(f"{field}, groups", device.name, "Give devices of other figures another name.")
        if not device.peak or device.memory < 1:
            name, value = ("memory", device.memory) if device.peak else ("peak", device.peak)
            remedy = "Give bytes above 0, and FLOP/s for one precision at least."
            raise FileFormatError(f"{field}, device {device.name}.{name}", value, remedy)
        if device.memory < _LEAST_MEMORY:
            remedy = f"That is {device.memory} bytes: write a unit, as in {device.memory}GB."
            raise FileFormatError(f"{field}, device {device.name}.memory", device.memory, remedy)
        rates = {f"device {device.name}.memory_bandwidth": device.memory_bandwidth}
        rates |= {f"levels.{level.name}.bandwidth": level.bandwidth for level in group.levels or cluster.levels}
        for name, rate in rates.items():
            if rate < _LEAST_RATE:
                remedy = f"That is {rate:g} bytes a second: write {rate:g}e+9 for {rate:g} GB/s."
                raise FileFormatError(f"{field}, {name}", rate, remedy)
