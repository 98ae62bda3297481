"""The nodes of a job and the exact commands that start it, as lists of words. Nothing runs here."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
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


class Through(StrEnum):
    """What starts the processes of other nodes."""

    LOCAL = "local"
    SSH = "ssh"
    SLURM = "slurm"
    RAY = "ray"


@dataclass(frozen=True, slots=True)
class Job:
    """What to start, and how."""

    program: tuple[str, ...]  # the script and its arguments; ``-m MODULE`` and arguments for a module
    devices: int  # processes in all
    nodes: int = 1  # how many nodes they are spread over evenly
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that every process is given
    port: int = PORT  # of the first node, where processes meet
    restarts: int = 0  # how often a job whose process died starts again
    through: Through = Through.LOCAL
    hosts: tuple[Host, ...] = ()  # of ``ssh``
    options: tuple[str, ...] = ()  # for srun: ``--partition=gpu``
    plan: Path | None = None  # the plan file, absolute; None without one
    needed: int = 0  # bytes a device of the plan takes; 0: not known
    python: str = sys.executable  # the interpreter
    folder: str = field(default_factory=lambda: str(Path.cwd()))  # where the program runs

    @property
    def each(self) -> int:
        """Processes of a node."""
        return self.devices // self.nodes

    def commands(self) -> list[list[str]]:
        """The commands that start it from here, side by side."""
        if self.through is Through.LOCAL:
            return [[*self._torchrun(), "--standalone", *self.program]]
        if self.through is Through.RAY:
            shape = ["--workers", str(self.devices), "--each", str(self.each)]
            return [[self.python, "-m", "galvatron_lite.launch.ray_job", *shape, "--", *self.program]]
        if self.through is Through.SLURM:
            meeting = ["--nnodes", str(self.nodes), "--rdzv-backend", "c10d", "--rdzv-id", "$SLURM_JOB_ID"]
            command = shlex.join([*self._torchrun(), *meeting]).replace("'$SLURM_JOB_ID'", '"$SLURM_JOB_ID"')
            line = f'{_HEAD}; exec {command} --rdzv-endpoint "$HEAD:{self.port}" {shlex.join(self.program)}'
            return self.on_each_node(["bash", "-c", line])
        return [self._over_ssh(self._on_host(number), host.name) for number, host in enumerate(self.hosts)]

    def on_each_node(self, command: Sequence[str]) -> list[list[str]]:
        """The commands that run one once on each node, with the job's folder and environment."""
        if self.through is Through.SSH:
            return [self._over_ssh(command, host.name) for host in self.hosts]
        if self.through is not Through.SLURM:
            return [list(command)]
        settings = ",".join(["ALL", *(f"{name}={value}" for name, value in self.environment.items())])
        shape = [f"--nodes={self.nodes}", f"--ntasks={self.nodes}", "--ntasks-per-node=1", f"--export={settings}"]
        return [["srun", *shape, f"--chdir={self.folder}", *self.options, *command]]

    def _on_host(self, number: int) -> list[str]:
        """torchrun for one of several nodes."""
        first = self.hosts[0].name
        if self.restarts:
            # nodes that come back after a failure find each other at the first one's port
            place = ["--rdzv-backend", "c10d", "--rdzv-id", "galvatron", "--rdzv-endpoint", f"{first}:{self.port}"]
        else:
            place = ["--node-rank", str(number), "--master-addr", first, "--master-port", str(self.port)]
        return [*self._torchrun(), "--nnodes", str(self.nodes), *place, *self.program]

    def _over_ssh(self, command: Sequence[str], host: str) -> list[str]:
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        words = ["env", *settings, *command] if settings else list(command)
        line = f"cd {shlex.quote(self.folder)} && exec {shlex.join(words)}"
        # with a terminal of its own the remote process ends when ssh does
        return ["ssh", "-tt", "-o", "BatchMode=yes", host, line]

    def _torchrun(self) -> list[str]:
        restarts = ["--max-restarts", str(self.restarts)] if self.restarts else []
        return [self.python, "-m", "torch.distributed.run", "--nproc-per-node", str(self.each), *restarts]


def shown(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """A command as it can be pasted into a shell."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*settings, shlex.join(command)])
