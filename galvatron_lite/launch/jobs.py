"""Jobs: made from the options of the user, checked on each node, and run until all processes end or one fails."""

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
    first_hosts,
    read_hostfile,
)
from galvatron_lite.launch.error_reports import FOLDER_VARIABLE, last_words
from galvatron_lite.limits import DEVICES, Name, Size, check_range
from galvatron_lite.plans.phases import PhasedPlan, read_training_plan
from galvatron_lite.units import format_bytes

_POLL = 0.2  # seconds between looks at the processes
_GRACE = 10.0  # seconds that a terminated process has to end
PACKAGES = ("galvatron_lite", "torch", "deepspeed")  # whose versions must be equal on all nodes
MARK = "galvatron-node: "  # begins the line of a report, among other output of logins and schedulers


def run_all(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> int:
    """Run commands side by side, with the output of this process.

    If one fails, or this process is interrupted, the others are ended.

    Returns:
        The first exit status that is not 0, or 0.
    """
    processes = [_start(command, environment) for command in commands]
    try:
        # Poll all processes, as a later one may fail while an earlier one runs.
        while None in [process.poll() for process in processes] and not _first_failure(processes):
            time.sleep(_POLL)
        return _first_failure(processes)
    finally:
        _end(processes)


def output_of(commands: Sequence[Sequence[str]], environment: Mapping[str, str], timeout: float) -> str:
    """Run commands side by side and return what they print.

    Raises:
        LaunchError: a command fails, or does not end in ``timeout`` seconds.
    """
    processes = [_start(command, environment, subprocess.PIPE) for command in commands]
    deadline = time.monotonic() + timeout
    try:
        outputs = [process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0] for process in processes]
    except subprocess.TimeoutExpired as error:
        remedy = "See that the node can be reached, or give it longer (--timeout)."
        raise LaunchError(f"No answer in {timeout:g} s: {_name(error.cmd)}. {remedy}") from error
    finally:
        _end(processes)
    for process, text in zip(processes, outputs, strict=True):
        if process.returncode:
            status = f"status {process.returncode}:\n{text.strip()[-2000:]}"
            raise LaunchError(f"{_name(process.args)} ended with {status}")
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


def _first_failure(processes: Sequence[subprocess.Popen[str]]) -> int:
    """The first exit status that is not 0, for a signal as shells report it; or 0."""
    codes = [process.returncode for process in processes if process.returncode]
    return (codes[0] if codes[0] > 0 else 128 - codes[0]) if codes else 0


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Terminate the processes that still run, and kill those that do not end."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _GRACE
    for process in running:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _name(command: object) -> str:
    words = command if isinstance(command, (list, tuple)) else [command]
    return " ".join(str(word) for word in words)[:200]


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The plan, software and devices of a node."""

    host: Name
    plan: Name  # SHA-256 of the plan file; empty without such a file
    versions: dict[str, str] = field(default_factory=dict)  # of Python and of ``PACKAGES``
    devices: Size = 0  # number of GPUs
    device_memory: Size = 0  # bytes of the smallest GPU
    host_memory: Size = 0  # bytes of free host memory; 0: not known


def report(plan: Path | None) -> NodeReport:
    """Report on this node."""
    import torch

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(count)]
    return NodeReport(socket.gethostname(), plan_digest(plan), versions, count, min(sizes, default=0), _free_memory())


def plan_digest(plan: Path | None) -> str:
    """SHA-256 of a plan file; empty without such a file."""
    return hashlib.sha256(plan.read_bytes()).hexdigest() if plan is not None and plan.is_file() else ""


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return sizes.get("MemAvailable", 0)


def read_reports(output: str) -> list[NodeReport]:
    """Find and parse the reports in what nodes print."""
    lines = [line.split(MARK, 1)[1] for line in output.splitlines() if MARK in line]
    return [from_data(NodeReport, parse_line(line, "a node's report"), "a node's report") for line in lines]


def check_nodes(reports: Sequence[NodeReport], nodes: int, each: int, plan_hash: str, needed: int) -> None:
    """Check that all nodes are ready for a job.

    Args:
        reports: of the nodes.
        nodes: expected number of nodes.
        each: processes of a node.
        plan_hash: of the plan file on the launching node; empty without a plan.
        needed: bytes that the plan needs on a device; 0: not known.

    Raises:
        LaunchError: lists what is wrong on each node.
    """
    problems = [] if len(reports) == nodes else [f"{len(reports)} of {nodes} nodes answered."]
    for node in reports:
        problems += [f"{node.host}: {problem}" for problem in _problems(node, reports[0], each, plan_hash, needed)]
    if problems:
        raise LaunchError("The nodes are not ready:\n  " + "\n  ".join(problems))


def _problems(node: NodeReport, first: NodeReport, each: int, plan_hash: str, needed: int) -> Iterator[str]:
    if node.plan != plan_hash:
        problem = "does not have the plan file" if not node.plan else "has another plan file"
        yield f"{problem}: copy it to the same path on every node, or use a shared file system."
    for name, expected in first.versions.items():
        version = node.versions.get(name, "missing")
        if version != expected:
            yield f"has {name} {version}, {first.host} has {expected}: install the same everywhere."
    if node.devices and node.devices < each:
        yield f"has {node.devices} GPUs for {each} processes: launch {node.devices} a node."
    if node.devices and needed > node.device_memory:
        yield f"a GPU has {format_bytes(node.device_memory)}, the plan takes {format_bytes(needed)}: plan with --mem."
    if not node.devices and node.host_memory and needed * each > node.host_memory:
        free, total = format_bytes(node.host_memory), format_bytes(needed * each)
        yield f"{free} of memory are free, {each} processes of the plan take {total}: plan with a smaller --mem."


def check_job(job: Job, timeout: float) -> None:
    """Check that all nodes are ready for a job, except under Ray, which chooses the nodes itself.

    Raises:
        LaunchError: a node is not ready, or does not answer in ``timeout`` seconds.
    """
    if job.through is Through.RAY:
        return
    command = [job.python, "-m", "galvatron_lite.launch.jobs", *([] if job.plan is None else [str(job.plan)])]
    reports = read_reports(output_of(job.on_each_node(command), job.environment, timeout))
    check_nodes(reports, job.nodes, job.each, plan_digest(job.plan), job.needed)


def start_job(job: Job) -> tuple[int, str]:
    """Run a job to its end; return its exit status, and the errors of ranks of this machine."""
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
    """Make the job of a user's options; see ``galvatron launch --help`` for the arguments.

    Raises:
        InputError: options that exclude each other, or a file that does not exist.
        LaunchError: the hosts do not have enough slots.
    """
    devices, needed = _size(plan, gpus)
    check_range("--port", port, 2**16 - 1)
    through, hosts = _through(through, hostfile), tuple[Host, ...]()
    if hostfile is not None:
        hosts = read_hostfile(hostfile)
        if per_node is not None:
            slots = check_range("--per-node", per_node, DEVICES)
            hosts = tuple(replace(host, slots=slots) for host in hosts)
        hosts = first_hosts(hosts, devices)
    plan = None if plan is None else plan.resolve()
    # One thread a process is torchrun's default, too, but it prints a warning about it.
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
    """The number of processes, and the bytes that the plan needs on a device (0: not known)."""
    if plan is None:
        if gpus is None:
            raise InputError("--plan", None, "Give --plan FILE, or --gpus N for a script that plans at its start.")
        return check_range("--gpus", gpus, DEVICES), 0
    loaded = read_training_plan(plan)
    plans = [phase.plan for phase in loaded.phases] if isinstance(loaded, PhasedPlan) else [loaded]
    devices = plans[0].devices
    if gpus not in (None, devices):
        raise InputError("--gpus", gpus, f"The plan is for {devices}: leave it out, or make another plan.")
    peaks = (phase.prediction.peak_memory for phase in plans if phase.prediction is not None)
    return devices, max(peaks, default=0)


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
    each = _slurm_gpus() or devices if per_node is None else per_node
    check_range("--per-node", each, DEVICES)
    if devices % each:
        raise InputError("--per-node", each, f"{devices} processes are not a multiple of it.")
    return devices // each


def _slurm_gpus() -> int | None:
    """GPUs of a node from Slurm's variables (``8``, or ``a100:8``); None if they are not set."""
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
    os._exit(0)  # without waiting for the threads of CUDA and gloo
