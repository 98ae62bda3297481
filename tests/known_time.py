"""A clock on which work and links take times that a test sets, and all else the processor time that it takes.

Tests whose subject is what takes how long would fail by chance where they sleep: a machine that does other things, or
is taken away for a while, sleeps longer. Here waiting is not done but counted, so that it is exact and takes no time;
what is not waiting is measured, in processor seconds of the thread that trains. While a process stands still, so does
its clock.

Processes that wait for one another tell each other what their clocks show (``tests/runtime/monitor/slow_link.py``).
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from torch.profiler import record_function

READERS = ("monitor.clock", "monitor.adaptive")
"""Modules of ``galvatron_lite.runtime`` that ask for the time while a model trains."""
_MARK = "known time "
_BESIDE = 1e-6
"""Known seconds of a real one before the first mark of a trace, and behind its last one: order is all that is kept."""


class KnownClock:
    """See the module's text. Made in the process, and by the thread, whose time it tells."""

    def __init__(self) -> None:
        self._own, self._waited = time.pthread_getcpuclockid(threading.get_ident()), 0.0

    def now(self) -> float:
        """Seconds since some moment."""
        return self._waited + time.clock_gettime(self._own)

    def wait(self, until: float) -> None:
        """Show a moment, where it is not over."""
        before = self.now()
        after = max(before, until)
        # for ``retimed``: a trace has times of the machine's clock
        with record_function(f"{_MARK}{before!r} {after!r}"):
            self._waited += after - before

    def work(self, seconds: float) -> None:
        """Take so long."""
        self.wait(self.now() + seconds)

    @contextmanager
    def told(self) -> Iterator[None]:
        """What trains here asks this clock."""
        with ExitStack() as patches:
            for module in READERS:
                patches.enter_context(patch(f"galvatron_lite.runtime.{module}.perf_counter", self.now))
            yield


def retimed(path: Path) -> None:
    """Write a trace anew with the times that ``KnownClock`` showed, which left marks in it."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    events = [event for event in trace["traceEvents"] if "ts" in event]
    marks = sorted((event["ts"], event.get("dur", 0.0), _shown(event)) for event in events if _is_mark(event))
    real = np.array([moment for start, took, _ in marks for moment in (start, start + max(took, 1e-3))])
    known = np.array([1e6 * moment for _, _, shown in marks for moment in shown])

    def moment(ts: float) -> float:
        beside = min(ts - real[0], 0.0) + max(ts - real[-1], 0.0)
        return float(np.interp(ts, real, known)) + _BESIDE * beside

    for event in events:
        start = moment(event["ts"])
        if "dur" in event:
            event["dur"] = moment(event["ts"] + event["dur"]) - start
        event["ts"] = start
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)


def _is_mark(event: dict[str, Any]) -> bool:
    return str(event.get("name")).startswith(_MARK)


def _shown(event: dict[str, Any]) -> tuple[float, float]:
    before, after = event["name"].removeprefix(_MARK).split()
    return float(before), float(after)
