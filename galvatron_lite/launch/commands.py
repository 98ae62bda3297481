"""The nodes of a job and the exact commands that start it, as lists of words. Nothing runs here."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from galvatron_lite.errors import InputError, LaunchError
from galvatron_lite.files import read_text
from galvatron_lite.limits import DEVICES, FILE_BYTES, check_range

_LINE = re.compile(
    r"(?P<name>[\w.@\[\]][\w.@\[\]-]*)(\s+slots\s*=\s*(?P<slots>\d{1,9}))?(\s+max[_-]slots\s*=\s*\d+)?", re.ASCII
)
"""What begins with ``-`` would be an option of ssh."""


@dataclass(frozen=True, slots=True)
class Host:
    """A node."""

    name: str  # as ssh knows it
    slots: int  # processes it may run


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file with a line ``NAME slots=N`` each, as DeepSpeed and MPI read it; else one slot."""
    lines = read_text(path, FILE_BYTES).splitlines()
    hosts = list[Host]()
    for number, line in enumerate(lines, start=1):
        if text := line.split("#")[0].strip():
            field, words = f"--hostfile {path}, line {number}", _LINE.fullmatch(text)
            if words is None:
                raise InputError(field, text, "Write `NAME slots=N`.")
            slots = check_range(f"{field}, slots", int(words["slots"] or 1), DEVICES, "Write `NAME slots=N`.")
            hosts.append(Host(words["name"], slots))
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"--hostfile {path}", twice, "Name each host once, with all its slots.")
    if not hosts:
        raise InputError("--hostfile", str(path), "It names no host: write a line `NAME slots=N` for each.")
    return tuple(hosts)


def chosen(hosts: tuple[Host, ...], devices: int) -> tuple[Host, ...]:
    """The first hosts that have so many slots together, all of them used."""
    taken: list[Host] = []
    for host in hosts:
        if sum(one.slots for one in taken) < devices:
            taken.append(host)
    total = sum(host.slots for host in taken)
    if total < devices:
        raise LaunchError(f"{devices} processes are to be started, but the hosts have {total} slots. Add hosts.")
    unlike = next((host for host in taken if host.slots != taken[0].slots), None)
    if unlike is not None:
        raise LaunchError(
            f"Host {unlike.name} has {unlike.slots} slots, {taken[0].name} has {taken[0].slots}. A plan's ranks are "
            "counted in nodes of equal size: give every host the same number of slots."
        )
    if total != devices:
        raise LaunchError(
            f"{devices} processes do not fill {len(taken)} hosts of {taken[0].slots} slots. Give other slots, or make "
            f"a plan for {total} devices."
        )
    return tuple(taken)


PLAN_VARIABLE = "GALVATRON_PLAN"
"""Environment variable by which ``auto_parallelize`` finds the plan that a job was launched with."""
THREADS = "OMP_NUM_THREADS"
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Gives every attempt a store of its own; torchrun's holds the keys by which killed workers met, which end the next."""
PORT = 29500
_HEAD = 'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


@dataclass(frozen=True, slots=True)
class Job:
    """What to start."""

    program: tuple[str, ...]  # the script and its arguments; ``-m MODULE`` and arguments for a module
    devices: int  # processes in all
    nodes: int = 1  # how many nodes they are spread over evenly
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that every process is given
    port: int = PORT  # of the first node, where processes meet
    restarts: int = 0  # how often a job whose process died starts again
    python: str = sys.executable  # the interpreter
    folder: str = field(default_factory=lambda: str(Path.cwd()))  # where the program runs

    @property
    def each(self) -> int:
        """Processes of a node."""
        return self.devices // self.nodes


def on_this_node(job: Job) -> list[str]:
    """torchrun for all processes here."""
    return [*_torchrun(job), "--standalone", *job.program]


def on_host(job: Job, number: int, first: str) -> list[str]:
    """torchrun for one of several nodes.

    Args:
        job: what to start.
        number: of the node.
        first: name of the first node.
    """
    nodes = ["--nnodes", str(job.nodes)]
    if job.restarts:
        # nodes that come back after a failure find each other at the first one's port
        place = ["--rdzv-backend", "c10d", "--rdzv-id", "galvatron", "--rdzv-endpoint", f"{first}:{job.port}"]
    else:
        place = ["--node-rank", str(number), "--master-addr", first, "--master-port", str(job.port)]
    return [*_torchrun(job), *nodes, *place, *job.program]


def over_ssh(job: Job, command: Sequence[str], host: str) -> list[str]:
    """A command of one node, through ssh, with the job's folder and environment."""
    settings = [f"{name}={value}" for name, value in job.environment.items()]
    words = ["env", *settings, *command] if settings else list(command)
    line = f"cd {shlex.quote(job.folder)} && exec {shlex.join(words)}"
    # with a terminal of its own the remote process ends when ssh does
    return ["ssh", "-tt", "-o", "BatchMode=yes", host, line]


def under_slurm(job: Job, options: Sequence[str] = ()) -> list[str]:
    """srun with one torchrun a node, inside an allocation or making one.

    Args:
        job: what to start.
        options: for srun: ``--partition=gpu``.
    """
    meeting = ["--nnodes", str(job.nodes), "--rdzv-backend", "c10d", "--rdzv-id", "$SLURM_JOB_ID"]
    command = shlex.join([*_torchrun(job), *meeting]).replace("'$SLURM_JOB_ID'", '"$SLURM_JOB_ID"')
    line = f'{_HEAD}; exec {command} --rdzv-endpoint "$HEAD:{job.port}" {shlex.join(job.program)}'
    return [*slurm_tasks(job, options), "bash", "-c", line]


def slurm_tasks(job: Job, options: Sequence[str] = ()) -> list[str]:
    """srun for one task on each of the job's nodes."""
    settings = ",".join(["ALL", *(f"{name}={value}" for name, value in job.environment.items())])
    shape = [f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1", f"--export={settings}"]
    return ["srun", *shape, f"--chdir={job.folder}", *options]


def on_ray(job: Job) -> list[str]:
    """A Ray Train job of as many workers, on the cluster that Ray's address names."""
    shape = ["--workers", str(job.devices), "--each", str(job.each)]
    return [job.python, "-m", "galvatron_lite.launch.ray_job", *shape, "--", *job.program]


def shown(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """A command as it can be pasted into a shell."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*settings, shlex.join(command)])


def _torchrun(job: Job) -> list[str]:
    restarts = ["--max-restarts", str(job.restarts)] if job.restarts else []
    return [job.python, "-m", "torch.distributed.run", "--nproc-per-node", str(job.each), *restarts]
