"""A job: what was requested, the checks on each node before it starts, its processes, and their end when one fails."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from galvatron_lite.errors import InputError, LaunchError
from galvatron_lite.files import from_data, parse_line, to_data
from galvatron_lite.launch.commands import (
    NEW_STORE,
    PLAN_VARIABLE,
    PORT,
    THREADS,
    Host,
    Job,
    Through,
    chosen,
    read_hostfile,
)
from galvatron_lite.launch.error_reports import FOLDER_VARIABLE, last_words
from galvatron_lite.limits import DEVICES, Name, Size, check_range
from galvatron_lite.plans.phases import PhasedPlan, read_training_plan
from galvatron_lite.units import format_bytes

_LOOK = 0.2
"""Seconds between looks at what runs."""
_GRACE = 10.0
"""Seconds that what is told to end has to do so."""


def run_all(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> int:
    """Run commands side by side, their output going where this process' goes.

    When one fails, or this process is interrupted, the others are ended.

    Returns:
        The first exit status that is not 0; 0 where all went well.
    """
    started = [_start(command, environment) for command in commands]
    try:
        # every one is asked: one that fails while an earlier runs would not be seen otherwise
        while None in [one.poll() for one in started] and not _failed(started):
            time.sleep(_LOOK)
        return _failed(started)
    finally:
        _end([one for one in started if one.poll() is None])


def output_of(commands: Sequence[Sequence[str]], environment: Mapping[str, str], timeout: float) -> str:
    """What commands print, run side by side."""
    started = [_start(command, environment, subprocess.PIPE) for command in commands]
    deadline = time.monotonic() + timeout
    try:
        outputs = [one.communicate(timeout=max(0.1, deadline - time.monotonic()))[0] for one in started]
    except subprocess.TimeoutExpired as error:
        remedy = "See that the node can be reached, or give it longer (--timeout)."
        raise LaunchError(f"No answer in {timeout:g} s: {_name(error.cmd)}. {remedy}") from error
    finally:
        _end([one for one in started if one.poll() is None])
    for one, text in zip(started, outputs, strict=True):
        if one.returncode:
            raise LaunchError(f"{_name(one.args)} ended with status {one.returncode}:\n{text.strip()[-2000:]}")
    return "\n".join(outputs)


def _start(command: Sequence[str], environment: Mapping[str, str], output: int | None = None) -> subprocess.Popen[str]:
    errors = None if output is None else subprocess.STDOUT
    try:
        return subprocess.Popen(
            list(command), env={**os.environ, **environment}, stdout=output, stderr=errors, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise LaunchError(f"There is no program {command[0]!r} here. Install it, or launch another way.") from error


def _failed(started: Sequence[subprocess.Popen[str]]) -> int:
    """The first exit status that tells of a failure; a signal's as shells give it."""
    codes = [one.returncode for one in started if one.returncode]
    return (codes[0] if codes[0] > 0 else 128 - codes[0]) if codes else 0


def _end(running: Sequence[subprocess.Popen[str]]) -> None:
    for one in running:
        one.terminate()
    deadline = time.monotonic() + _GRACE
    for one in running:
        try:
            one.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


def _name(command: object) -> str:
    words = command if isinstance(command, (list, tuple)) else [command]
    return " ".join(str(word) for word in words)[:200]


PACKAGES = ("galvatron_lite", "torch", "deepspeed")
MARK = "galvatron-node: "
"""Begins the line that holds a report, whatever else a login or a scheduler prints."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node has."""

    host: Name  # its name
    plan: Name  # SHA-256 of the plan file, empty where there is no such file
    versions: dict[str, str] = field(default_factory=dict)  # of Python and of packages that must be alike
    devices: Size = 0  # GPUs; 0 where there are none
    device_memory: Size = 0  # bytes of the smallest GPU
    host_memory: Size = 0  # bytes of free host memory; 0 where it is not known


def report(plan: Path | None) -> NodeReport:
    """What this node has."""
    import torch

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(count)]
    return NodeReport(
        socket.gethostname(), plan_digest(plan), versions, count, min(sizes, default=0), _free_memory()
    )  # fmt: skip


def plan_digest(plan: Path | None) -> str:
    """SHA-256 of a plan file; empty where there is no such file."""
    return hashlib.sha256(plan.read_bytes()).hexdigest() if plan is not None and plan.is_file() else ""


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
    return [from_data(NodeReport, parse_line(line, "a node's report"), "a node's report") for line in lines]


def check_nodes(reports: Sequence[NodeReport], nodes: int, each: int, plan_hash: str, needed: int) -> None:
    """Refuse nodes that do not go together.

    Args:
        nodes: how many there should be.
        each: processes of a node.
        plan_hash: of the plan file where the job is launched; empty: without a plan.
        needed: bytes that a device of the plan takes; 0: not known.
    """
    wrong = [] if len(reports) == nodes else [f"{len(reports)} of {nodes} nodes answered."]
    for one in reports:
        wrong += [f"{one.host}: {what}" for what in _problems(one, reports[0], each, plan_hash, needed)]
    if wrong:
        raise LaunchError("The nodes are not ready:\n  " + "\n  ".join(wrong))


def _problems(one: NodeReport, first: NodeReport, each: int, plan_hash: str, needed: int) -> Iterator[str]:
    if one.plan != plan_hash:
        what = "does not have the plan file" if not one.plan else "has another plan file"
        yield f"{what}: copy it to the same path on every node, or use a shared file system."
    for name, version in first.versions.items():
        own = one.versions.get(name, "missing")
        if own != version:
            yield f"has {name} {own}, {first.host} has {version}: install the same everywhere."
    if one.devices and one.devices < each:
        yield f"has {one.devices} GPUs for {each} processes: launch {one.devices} a node."
    if one.devices and needed > one.device_memory:
        yield f"a GPU has {format_bytes(one.device_memory)}, the plan takes {format_bytes(needed)}: plan with --mem."
    if not one.devices and one.host_memory and needed * each > one.host_memory:
        free, wanted = format_bytes(one.host_memory), format_bytes(needed * each)
        yield f"{free} of memory are free, {each} processes of the plan take {wanted}: plan with a smaller --mem."


def check_job(job: Job, timeout: float) -> None:
    """See that all nodes have what a job needs; Ray starts workers where it likes, and is not asked.

    Raises:
        LaunchError: a node is not ready, or does not answer in so many seconds.
    """
    if job.through is Through.RAY:
        return
    ask = [job.python, "-m", "galvatron_lite.launch.jobs", *([] if job.plan is None else [str(job.plan)])]
    reports = read_reports(output_of(job.on_each_node(ask), job.environment, timeout))
    check_nodes(reports, job.nodes, job.each, plan_digest(job.plan), job.needed)


def start_job(job: Job) -> tuple[int, str]:
    """Run a job to its end; its exit status, and the last words of ranks of this machine that failed."""
    with TemporaryDirectory(prefix="galvatron-") as folder:
        status = run_all(job.commands(), {**job.environment, FOLDER_VARIABLE: folder})
        return status, last_words(Path(folder))


def job_of(
    program: Sequence[str],
    plan: Path | None = None,
    gpus: int | None = None,
    per_node: int | None = None,
    hostfile: Path | None = None,
    through: Through | None = None,
    options: Sequence[str] = (),
    port: int = PORT,
    restarts: int = 0,
) -> Job:
    """What to start for what the user typed; see ``galvatron launch --help`` for the arguments.

    Raises:
        InputError: they do not go together, or name no file.
        LaunchError: the hosts do not have the slots.
    """
    devices, needed = _size(plan, gpus)
    check_range("--port", port, 2**16 - 1)
    through, hosts = _through(through, hostfile), tuple[Host, ...]()
    if hostfile is not None:
        hosts = read_hostfile(hostfile)
        if per_node is not None:
            slots = check_range("--per-node", per_node, DEVICES)
            hosts = tuple(replace(host, slots=slots) for host in hosts)
        hosts = chosen(hosts, devices)
    plan = None if plan is None else plan.resolve()
    # one thread a process where nothing is said: torchrun's own choice, which it warns of
    environment = {THREADS: os.environ.get(THREADS, "1")}
    environment |= {} if plan is None else {PLAN_VARIABLE: str(plan)}
    environment |= NEW_STORE if restarts else {}
    words = tuple(program)
    if words[0] == "profile" and not Path("profile").exists():
        words = ("-m", "galvatron_lite", *words)
    elif words[0] != "-m" and not Path(words[0]).is_file():
        raise InputError("script", words[0], "There is no such file. Give a script, -m MODULE, or profile MODEL.")
    nodes = len(hosts) or _nodes(per_node, through, devices)
    return Job(words, devices, nodes, environment, port, restarts, through, hosts, tuple(options), plan, needed)


def _size(plan: Path | None, gpus: int | None) -> tuple[int, int]:
    """Processes, and the bytes that a device takes."""
    if plan is None:
        if gpus is None:
            raise InputError("--plan", None, "Give --plan FILE, or --gpus N for a script that plans at its start.")
        return check_range("--gpus", gpus, DEVICES), 0
    read = read_training_plan(plan)
    plans = [phase.plan for phase in read.phases] if isinstance(read, PhasedPlan) else [read]
    devices = plans[0].devices
    if gpus not in (None, devices):
        raise InputError("--gpus", gpus, f"The plan is for {devices}: leave it out, or make another plan.")
    return devices, max((one.prediction.peak_memory for one in plans if one.prediction is not None), default=0)


def _through(through: Through | None, hostfile: Path | None) -> Through:
    if hostfile is not None:
        if through not in (None, Through.SSH):
            raise InputError("--hostfile", str(hostfile), f"Hosts are reached by ssh, not {through}.")
        return Through.SSH
    if through is Through.SSH:
        raise InputError("--hostfile", None, "It says which hosts ssh goes to: a line `NAME slots=N` for each.")
    return through or (Through.SLURM if "SLURM_JOB_ID" in os.environ else Through.LOCAL)


def _nodes(per_node: int | None, through: Through, devices: int) -> int:
    if through is Through.LOCAL:
        return 1
    each = _slurm_each() or devices if per_node is None else per_node
    check_range("--per-node", each, DEVICES)
    if devices % each:
        raise InputError("--per-node", each, f"{devices} processes are not a multiple of it.")
    return devices // each


def _slurm_each() -> int | None:
    """GPUs of a node as Slurm has it: ``8``, or ``a100:8``; None where it says nothing."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        text = os.environ.get(name, "")
        number = re.fullmatch(r"([\w-]+:)?(\d{1,9})", text, re.ASCII)
        if text and (number is None or not int(number[2])):
            raise InputError(name, text, "It is a number of GPUs. Give --per-node, or unset it.")
        if number is not None:
            return int(number[2])
    return None


if __name__ == "__main__":
    print(MARK + json.dumps(to_data(report(Path(sys.argv[1]) if len(sys.argv) > 1 else None))), flush=True)
    # CUDA's and gloo's threads have nothing to say
    os._exit(0)
