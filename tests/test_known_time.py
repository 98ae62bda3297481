"""The clock of known time, and traces on it."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile, record_function

from tests.known_time import KnownClock, retimed


def _spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def _stand_still(seconds: float) -> None:
    """All of this process."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def test_waiting_is_counted_and_work_is_measured() -> None:
    clock = KnownClock()
    begun, really = clock.now(), time.perf_counter()
    clock.work(1000.0)
    clock.wait(begun + 500.0)  # long over
    assert time.perf_counter() - really < 500.0
    assert clock.now() - begun == pytest.approx(1000.0, abs=1.0)
    begun = clock.now()
    _spin(0.2)
    assert 0.2 <= clock.now() - begun < 0.4


def test_while_the_process_stands_still_so_does_the_clock() -> None:
    clock = KnownClock()
    begun = clock.now()
    _stand_still(0.5)
    assert clock.now() - begun < 0.2


def test_a_trace_gets_known_times(tmp_path: Path) -> None:
    clock, path = KnownClock(), tmp_path / "trace.json.gz"
    with profile(activities=[ProfilerActivity.CPU]) as made:
        with record_function("before"):
            time.sleep(0.05)
        for name, seconds in (("one", 20.0), ("two", 30.0)):
            with record_function(name), record_function(f"{name} within"):
                clock.work(seconds)
                time.sleep(0.05)  # is not counted
        with record_function("behind"):
            time.sleep(0.05)
    made.export_chrome_trace(str(path))
    retimed(path)
    with gzip.open(path, "rt") as file:
        found = {event["name"]: event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"}
    seconds = {name: event["dur"] / 1e6 for name, event in found.items()}
    for name, wanted in (("before", 0.0), ("one", 20.0), ("one within", 20.0), ("two", 30.0), ("behind", 0.0)):
        assert seconds[name] == pytest.approx(wanted, abs=1.0), name
    order = [found[name]["ts"] for name in ("before", "one", "one within", "two", "two within", "behind")]
    assert order == sorted(order)
    assert found["two"]["ts"] >= found["one within"]["ts"] + found["one within"]["dur"]
