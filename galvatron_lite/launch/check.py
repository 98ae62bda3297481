"""What each node of a job has, and whether it goes together: the plan, versions, devices, memory."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from galvatron_lite.errors import LaunchError
from galvatron_lite.files import from_data, to_data
from galvatron_lite.units import format_bytes

PACKAGES = ("galvatron_lite", "torch", "deepspeed")
MARK = "galvatron-node: "
"""Begins the line that holds a report, whatever else a login or a scheduler prints."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node has.

    Attributes:
        host: its name.
        plan: SHA-256 of the plan file, empty where there is no such file.
        versions: of Python and of packages that must be alike.
        devices: GPUs; 0 where there are none.
        device_memory: bytes of the smallest GPU.
        host_memory: bytes of free host memory; 0 where it is not known.
    """

    host: str
    plan: str
    versions: dict[str, str] = field(default_factory=dict)
    devices: int = 0
    device_memory: int = 0
    host_memory: int = 0


def report(plan: Path | None) -> NodeReport:
    """What this node has."""
    devices, memory = _gpus()
    return NodeReport(socket.gethostname(), plan_digest(plan), _versions(), devices, memory, _free_memory())


def plan_digest(plan: Path | None) -> str:
    """SHA-256 of a plan file; empty where there is no such file."""
    return hashlib.sha256(plan.read_bytes()).hexdigest() if plan is not None and plan.is_file() else ""


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def _gpus() -> tuple[int, int]:
    """How many GPUs torch sees, and the memory of the smallest."""
    import torch

    if not torch.cuda.is_available():
        return 0, 0
    sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())]
    return len(sizes), min(sizes)


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return sizes.get("MemAvailable", 0)


def read_reports(output: str) -> list[NodeReport]:
    """The reports among the lines that nodes printed."""
    lines = [line.split(MARK, 1)[1] for line in output.splitlines() if MARK in line]
    return [from_data(NodeReport, json.loads(line), "a node's report") for line in lines]


def check_nodes(reports: Sequence[NodeReport], nodes: int, each: int, plan_hash: str, needed: int) -> None:
    """Refuse nodes that do not go together.

    Args:
        reports: one a node.
        nodes: how many there should be.
        each: processes of a node.
        plan_hash: of the plan file where the job is launched; empty: without a plan.
        needed: bytes that a device of the plan takes; 0: not known.

    Raises:
        LaunchError: with a line for everything that is wrong, by host.
    """
    wrong = [] if len(reports) == nodes else [f"{len(reports)} of {nodes} nodes answered."]
    for one in reports:
        wrong += [f"{one.host}: {what}" for what in _problems(one, reports[0], each, plan_hash, needed)]
    if wrong:
        raise LaunchError("The nodes are not ready:\n  " + "\n  ".join(wrong))


def _problems(one: NodeReport, first: NodeReport, each: int, plan_hash: str, needed: int) -> list[str]:
    found = []
    if one.plan != plan_hash:
        what = "does not have the plan file" if not one.plan else "has another plan file"
        found.append(f"{what}: copy it to the same path on every node, or use a shared file system.")
    for name, version in first.versions.items():
        own = one.versions.get(name, "missing")
        if own != version:
            found.append(f"has {name} {own}, {first.host} has {version}: install the same everywhere.")
    if one.devices and one.devices < each:
        found.append(f"has {one.devices} GPUs for {each} processes: launch {one.devices} a node.")
    return [*found, *_memory(one, each, needed)]


def _memory(one: NodeReport, each: int, needed: int) -> list[str]:
    if one.devices and needed > one.device_memory:
        return [f"a GPU has {format_bytes(one.device_memory)}, the plan takes {format_bytes(needed)}: plan with --mem."]
    if not one.devices and one.host_memory and needed * each > one.host_memory:
        free, wanted = format_bytes(one.host_memory), format_bytes(needed * each)
        return [f"{free} of memory are free, {each} processes of the plan take {wanted}: plan with a smaller --mem."]
    return []


if __name__ == "__main__":
    print(MARK + json.dumps(to_data(report(Path(sys.argv[1]) if len(sys.argv) > 1 else None))), flush=True)
    # CUDA's and gloo's threads have nothing to say
    os._exit(0)
