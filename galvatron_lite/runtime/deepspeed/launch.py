"""DeepSpeed's launcher: hostfiles, and the command that starts the world of a plan. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from galvatron_lite.errors import FileFormatError, LaunchError
from galvatron_lite.plans.schema import Plan

_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\d+)")


def read_hostfile(path: Path) -> dict[str, int]:
    """Devices by host, in the file's order: lines of ``worker-1 slots=8``; empty lines and comments (``#``) are skipped.

    Raises:
        FileFormatError: it cannot be read, or names the first line that is no host with slots, or comes twice.
    """
    hosts: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError("--hostfile", path, f"It cannot be read ({error}).") from error
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None or int(found["slots"]) < 1 or found["host"] in hosts:
            remedy = "Give one line a host: worker-1 slots=8."
            raise FileFormatError(f"{path}, line {number}", text, remedy)
        hosts[found["host"]] = int(found["slots"])
    if not hosts:
        raise FileFormatError("--hostfile", path, "It names no host: worker-1 slots=8.")
    return hosts


def launch_command(plan: Plan, script: Sequence[str], hostfile: Path | None = None, cpu: bool = False) -> list[str]:
    """The command that starts a script on the devices of a plan.

    Args:
        plan: says how many processes.
        script: the script and its arguments.
        hostfile: hosts and their devices; None: this host alone.
        cpu: whether there are no GPUs.

    Raises:
        LaunchError: the hostfile has other than the plan's devices.
        FileFormatError: see ``read_hostfile``.
    """
    command = ["deepspeed", "--no_local_rank"]
    if hostfile is None:
        return [*command, "--num_accelerators" if cpu else "--num_gpus", str(plan.devices), *script]
    _check_slots(plan, read_hostfile(hostfile), hostfile)
    return [*command, "--hostfile", str(hostfile), *script]


def _check_slots(plan: Plan, hosts: Mapping[str, int], hostfile: Path) -> None:
    slots = sum(hosts.values())
    if slots != plan.devices:
        said = ", ".join(f"{host} {count}" for host, count in hosts.items())
        raise LaunchError(
            f"The plan is for {plan.devices} device(s), but {hostfile} has {slots} ({said}). Change its slots, or make a "
            f"plan for {slots} (--gpus {slots})."
        )
