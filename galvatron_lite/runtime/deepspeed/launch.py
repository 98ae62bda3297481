"""DeepSpeed's launcher: the command that starts the world of a plan. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from galvatron_lite.errors import LaunchError
from galvatron_lite.launch.commands import Host, read_hostfile
from galvatron_lite.plans.schema import Plan


def launch_command(plan: Plan, script: Sequence[str], hostfile: Path | None = None, cpu: bool = False) -> list[str]:
    """The command that starts a script on the devices of a plan.

    Args:
        plan: says how many processes.
        script: the script and its arguments.
        hostfile: hosts and their devices; None: this host alone.
        cpu: whether there are no GPUs.

    Raises:
        LaunchError: the hostfile has other than the plan's devices.
        InputError: see ``launch.hosts.read_hostfile``.
    """
    command = ["deepspeed", "--no_local_rank"]
    if hostfile is None:
        return [*command, "--num_accelerators" if cpu else "--num_gpus", str(plan.devices), *script]
    _check_slots(plan, read_hostfile(hostfile), hostfile)
    return [*command, "--hostfile", str(hostfile), *script]


def _check_slots(plan: Plan, hosts: Sequence[Host], hostfile: Path) -> None:
    slots = sum(host.slots for host in hosts)
    if slots != plan.devices:
        said = ", ".join(f"{host.name} {host.slots}" for host in hosts)
        raise LaunchError(
            f"The plan is for {plan.devices} device(s), but {hostfile} has {slots} ({said}). Change its slots, or make "
            f"a plan for {slots} (--gpus {slots})."
        )
