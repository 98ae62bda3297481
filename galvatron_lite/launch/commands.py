"""The nodes of a job, and the exact commands that start it. Nothing runs here."""

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
"""A line of a hostfile. A name does not begin with ``-``: it would be an option of ssh."""


@dataclass(frozen=True, slots=True)
class Host:
    """A node."""

    name: str  # as ssh knows it
    slots: int  # processes it may run


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a hostfile as DeepSpeed and MPI do: a line ``NAME slots=N`` for each host; one slot by default.

    Raises:
        InputError: a line that cannot be read, a host that is named twice, or no host.
    """
    lines = read_text(path, FILE_BYTES).splitlines()
    hosts = list[Host]()
    for number, line in enumerate(lines, start=1):
        if text := line.split("#")[0].strip():
            field, match = f"--hostfile {path}, line {number}", _LINE.fullmatch(text)
            if match is None:
                raise InputError(field, text, "Write `NAME slots=N`.")
            slots = check_range(f"{field}, slots", int(match["slots"] or 1), DEVICES, "Write `NAME slots=N`.")
            hosts.append(Host(match["name"], slots))
    names = [host.name for host in hosts]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InputError(f"--hostfile {path}", repeated, "Name each host once, with all its slots.")
    if not hosts:
        raise InputError("--hostfile", str(path), "It names no host: write a line `NAME slots=N` for each.")
    return tuple(hosts)


def first_hosts(hosts: tuple[Host, ...], devices: int) -> tuple[Host, ...]:
    """Return the first hosts whose slots are as many as the devices.

    Raises:
        LaunchError: too few slots, hosts with different numbers of slots, or slots that are left over.
    """
    taken: list[Host] = []
    total = 0
    for host in hosts:
        if total < devices:
            taken.append(host)
            total += host.slots
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
"""Makes torchrun use a new store for every attempt: the old one has keys of killed workers, which end the next ones."""
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
    """A program to start on many processes."""

    program: tuple[str, ...]  # the script and its arguments; ``-m MODULE`` and arguments for a module
    devices: int  # number of processes
    nodes: int = 1  # number of nodes, each with as many processes
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of every process
    port: int = PORT  # of the first node, for the rendezvous
    restarts: int = 0  # how often the job is restarted after a process died
    through: Through = Through.LOCAL
    hosts: tuple[Host, ...] = ()  # for ssh
    options: tuple[str, ...] = ()  # for srun: ``--partition=gpu``
    plan: Path | None = None  # absolute path of the plan file
    needed: int = 0  # bytes that the plan needs on a device; 0: not known
    python: str = sys.executable  # the interpreter
    folder: str = field(default_factory=lambda: str(Path.cwd()))  # where the program runs

    @property
    def each(self) -> int:
        """Processes of a node."""
        return self.devices // self.nodes

    def commands(self) -> list[list[str]]:
        """The commands that start the job from this machine, to be run side by side."""
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
        """The commands that run a command once on each node, in the job's folder and environment."""
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
            # Nodes find each other again after a failure at the port of the first one.
            meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "galvatron", "--rdzv-endpoint", f"{first}:{self.port}"]
        else:
            meeting = ["--node-rank", str(number), "--master-addr", first, "--master-port", str(self.port)]
        return [*self._torchrun(), "--nnodes", str(self.nodes), *meeting, *self.program]

    def _over_ssh(self, command: Sequence[str], host: str) -> list[str]:
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        words = ["env", *settings, *command] if settings else list(command)
        line = f"cd {shlex.quote(self.folder)} && exec {shlex.join(words)}"
        # With a terminal (-tt), the remote process ends when ssh does.
        return ["ssh", "-tt", "-o", "BatchMode=yes", host, line]

    def _torchrun(self) -> list[str]:
        restarts = ["--max-restarts", str(self.restarts)] if self.restarts else []
        return [self.python, "-m", "torch.distributed.run", "--nproc-per-node", str(self.each), *restarts]


def shown(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """A command in the syntax of a shell."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*settings, shlex.join(command)])
