"""A slow link, for real: two processes in two network namespaces, joined by a wire whose rate ``tc tbf`` sets."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from galvatron_lite.files import read_data
from galvatron_lite.runtime.monitor.log import read_log, replay
from galvatron_lite.runtime.monitor.schema import AdaptAction, Decided
from galvatron_lite.units import format_seconds

NAMES = (f"galvatron{os.getpid()}a", f"galvatron{os.getpid()}b")
ADDRESSES = ("10.231.77.1", "10.231.77.2")
PORT = 29877


def run(*words: str, check: bool = True) -> None:
    """A command of the system."""
    subprocess.run(words, check=check, capture_output=True)


def set_rate(megabits: float) -> None:
    """Both ends of the wire send at most so many megabits a second."""
    for name in NAMES:
        words = ("tbf", "rate", f"{megabits:g}mbit", "burst", "64kb", "latency", "2s")
        run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "wire", "root", *words)


def lay_wire(megabits: float) -> None:
    """Two namespaces and the wire between them."""
    for name in NAMES:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
    run("ip", "-n", NAMES[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", NAMES[1])
    for name, address in zip(NAMES, ADDRESSES, strict=True):
        run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "wire")
        run("ip", "-n", name, "link", "set", "wire", "up")
    set_rate(megabits)


def take_away() -> None:
    """Without the namespaces their wire is gone too."""
    for name in NAMES:
        run("ip", "netns", "delete", name, check=False)


def start(rank: int, folder: Path, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    """A training process in its namespace."""
    environment = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "wire",
    }  # fmt: skip
    words = [
        "ip", "netns", "exec", NAMES[rank], sys.executable, "scripts/adaptation_train.py", "--folder", str(folder),
        "--quick", str(arguments.quick), "--slow", str(arguments.slow), "--rate", str(arguments.rate),
    ]  # fmt: skip
    return subprocess.Popen(words, env=environment)


def wait_for(processes: list[subprocess.Popen[bytes]], slow: Path, rate: float) -> None:
    """Until all have ended; the wire becomes slow when training asks for it."""
    asked = False
    while any(process.poll() is None for process in processes):
        if slow.exists() and not asked:
            set_rate(rate)
            asked = True
            slow.with_name("is-slow").touch()
        try:
            processes[0].wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        for process in processes:
            process.wait()
    if any(process.returncode for process in processes):
        raise SystemExit("A training process failed.")


def tell(folder: Path, factor: float) -> None:
    """What happened, from the log and the times of the steps."""
    records = read_log(folder / "log.jsonl")
    measured = read_data(folder / "steps.json")
    decisions = [record.decision for record in records if isinstance(record, Decided)]
    for decision in decisions:
        print(f"step {decision.step}: {decision.action.value}. {decision.reason}")
    behind = [decision for decision in decisions if decision.step > measured["quick_steps"]]
    planned = [decision for decision in behind if decision.action is AdaptAction.PLAN]
    found = [link.per_byte for decision in planned for link in decision.corrections.links]
    estimate = f"{found[0]:.3g} (error {found[0] / factor - 1:+.1%})" if found else "not at all"
    print(f"\nslowed by {factor:g}, estimated {estimate}")
    print(
        f"step: {format_seconds(measured['quick'])} before, {format_seconds(measured['slow'])} slowed, "
        f"{format_seconds(measured['after'])} at the end"
    )
    switches = sum(decision.action in (AdaptAction.SWITCH, AdaptAction.BACK) for decision in behind)
    print(
        f"switches decided behind the slowing: {switches}; replayed alike: {all(one.same for one in replay(records))}"
    )


def main() -> None:
    """Lay the wire, train, slow it down, tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=800.0, help="megabits a second of the wire")
    parser.add_argument("--factor", type=float, default=16.0, help="by which it is slowed")
    parser.add_argument("--quick", type=int, default=50, help="steps before")
    parser.add_argument("--slow", type=int, default=80, help="steps after")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            lay_wire(arguments.rate)
            processes = [start(rank, folder, arguments) for rank in range(2)]
            wait_for(processes, folder / "make-slow", arguments.rate / arguments.factor)
        finally:
            take_away()
        tell(folder, arguments.factor)


if __name__ == "__main__":
    main()
