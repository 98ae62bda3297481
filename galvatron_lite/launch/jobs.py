"""A job from what was asked: its plan, where it runs, the checks before it starts, and its start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory

from galvatron_lite.errors import InputError
from galvatron_lite.files import read_data
from galvatron_lite.launch import commands
from galvatron_lite.launch.check import check_nodes, plan_digest, read_reports
from galvatron_lite.launch.commands import PLAN_VARIABLE, Job
from galvatron_lite.launch.hosts import Host, chosen, read_hostfile
from galvatron_lite.launch.run import output_of, run_all
from galvatron_lite.launch.told import FOLDER_VARIABLE, last_words
from galvatron_lite.plans.io import read_plan
from galvatron_lite.plans.phases import is_phased, read_phased_plan
from galvatron_lite.plans.schema import Plan


class Through(StrEnum):
    """What starts the processes of other nodes."""

    LOCAL = "local"
    SSH = "ssh"
    SLURM = "slurm"
    RAY = "ray"


@dataclass(frozen=True, slots=True)
class Launch:
    """A job and the way it is started.

    Attributes:
        job: what to start.
        through: how.
        hosts: of ``ssh``.
        options: for srun.
        plan: the plan file, absolute; None without one.
        needed: bytes a device of the plan takes; 0: not known.
    """

    job: Job
    through: Through
    hosts: tuple[Host, ...] = ()
    options: tuple[str, ...] = ()
    plan: Path | None = None
    needed: int = 0

    def commands(self) -> list[list[str]]:
        """What is run from here, side by side."""
        if self.through is Through.SLURM:
            return [commands.under_slurm(self.job, self.options)]
        if self.through is Through.RAY:
            return [commands.on_ray(self.job)]
        if self.through is Through.LOCAL:
            return [commands.on_this_node(self.job)]
        first = self.hosts[0].name
        each = enumerate(self.hosts)
        return [commands.over_ssh(self.job, commands.on_host(self.job, at, first), host.name) for at, host in each]

    def check(self, timeout: float) -> None:
        """See that all nodes have what the job needs; Ray starts workers where it likes, and is not asked.

        Raises:
            LaunchError: names each node, what is wrong with it, and what to do.
        """
        if self.through is Through.RAY:
            return
        own = plan_digest(self.plan)
        found = read_reports(output_of(self._asking(), self.job.environment, timeout))
        check_nodes(found, self.job.nodes, self.job.each, own, self.needed)

    def _asking(self) -> list[list[str]]:
        """What makes each node tell what it has."""
        plan = [] if self.plan is None else [str(self.plan)]
        ask = [self.job.python, "-m", "galvatron_lite.launch.check", *plan]
        if self.through is Through.SLURM:
            return [[*commands.slurm_tasks(self.job, self.options), *ask]]
        if self.through is Through.SSH:
            return [commands.over_ssh(self.job, ask, host.name) for host in self.hosts]
        return [ask]

    def start(self) -> tuple[int, str]:
        """Run the job to its end; its exit status, and the last words of ranks of this machine that failed."""
        with TemporaryDirectory(prefix="galvatron-") as folder:
            status = run_all(self.commands(), {**self.job.environment, FOLDER_VARIABLE: folder})
            return status, last_words(Path(folder))


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user said; see ``galvatron launch --help``."""

    program: tuple[str, ...]
    plan: Path | None = None
    gpus: int | None = None
    per_node: int | None = None
    hostfile: Path | None = None
    through: Through | None = None
    options: tuple[str, ...] = ()
    port: int = commands.PORT
    restarts: int = 0


def launch_of(asked: Asked) -> Launch:
    """What to start for what was asked.

    Raises:
        InputError: neither a plan nor a number of processes, or two that contradict each other; a file that cannot be
            read.
        LaunchError: the hosts do not have the processes.
    """
    devices, needed = _size(asked)
    through = _through(asked)
    hosts = chosen(_hosts(asked), devices) if through is Through.SSH else ()
    nodes = len(hosts) if hosts else _nodes(asked, through, devices)
    plan = None if asked.plan is None else asked.plan.resolve()
    # one thread a process where nothing is said: torchrun's own choice, which it warns of
    threads = {commands.THREADS: os.environ.get(commands.THREADS, "1")}
    environment = threads | ({} if plan is None else {PLAN_VARIABLE: str(plan)})
    if asked.restarts:
        environment |= commands.NEW_STORE
    job = Job(_program(asked), devices, nodes, environment, asked.port, asked.restarts)
    return Launch(job, through, hosts, asked.options, plan, needed)


def _program(asked: Asked) -> tuple[str, ...]:
    """The program; ``profile MODEL`` is this package's own command."""
    if asked.program[0] == "profile" and not Path("profile").exists():
        return ("-m", "galvatron_lite", *asked.program)
    script = asked.program[0]
    if script != "-m" and not Path(script).is_file():
        raise InputError("script", script, "There is no such file. Give a script, -m MODULE, or profile MODEL.")
    return asked.program


def _size(asked: Asked) -> tuple[int, int]:
    """Processes, and bytes that each takes."""
    if asked.plan is None:
        if asked.gpus is None:
            raise InputError("--plan", None, "Give --plan FILE, or --gpus N for a script that plans at its start.")
        return _positive("--gpus", asked.gpus), 0
    plans = _plans(asked.plan)
    devices = plans[0].devices
    if asked.gpus not in (None, devices):
        raise InputError("--gpus", asked.gpus, f"The plan is for {devices}: leave it out, or make another plan.")
    known = [plan.prediction.peak_memory for plan in plans if plan.prediction is not None]
    return devices, max(known, default=0)


def _plans(path: Path) -> list[Plan]:
    if is_phased(read_data(path)):
        return [phase.plan for phase in read_phased_plan(path).phases]
    return [read_plan(path)]


def _through(asked: Asked) -> Through:
    if asked.hostfile is not None:
        if asked.through not in (None, Through.SSH):
            raise InputError("--hostfile", str(asked.hostfile), f"Hosts are reached by ssh, not {asked.through}.")
        return Through.SSH
    if asked.through is Through.SSH:
        raise InputError("--hostfile", None, "It says which hosts ssh goes to: a line `NAME slots=N` for each.")
    return asked.through or (Through.SLURM if "SLURM_JOB_ID" in os.environ else Through.LOCAL)


def _hosts(asked: Asked) -> tuple[Host, ...]:
    hosts = read_hostfile(asked.hostfile) if asked.hostfile is not None else ()
    return hosts if asked.per_node is None else tuple(replace(host, slots=asked.per_node) for host in hosts)


def _nodes(asked: Asked, through: Through, devices: int) -> int:
    if through is Through.LOCAL:
        return 1
    each = _positive("--per-node", asked.per_node or _slurm_each() or devices)
    if devices % each:
        raise InputError("--per-node", each, f"{devices} processes are not a multiple of it.")
    return devices // each


def _slurm_each() -> int | None:
    told: Sequence[str] = [os.environ.get(name, "") for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")]
    return next((int(text) for text in told if text.isdigit() and int(text)), None)


def _positive(field: str, value: int) -> int:
    if value < 1:
        raise InputError(field, value, "Give 1 or more.")
    return value
