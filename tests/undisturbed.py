"""Measuring with the machine's clock while the machine does other things, or is taken away for moments.

Beside what is measured a thread sleeps for moments, and adds up what it overslept: a process that does not get a core,
or stands still, shows there. What was disturbed is measured again, some times; the least disturbed time counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

_MOMENT, _SLACK = 0.005, 0.001
"""Seconds that the thread sleeps, and what it oversleeps where nothing disturbs it."""
_LITTLE, _MOST = 0.02, 3
"""A share of the time, overslept, that does not count; and how often something is measured at most."""
Found = TypeVar("Found")


class Disturbance:
    """How much of a stretch of time this process could not run, roughly.

    Attributes:
        share: of the time; once the stretch is over.
    """

    def __enter__(self) -> Disturbance:
        self.share, self._overslept, self._done = 0.0, 0.0, threading.Event()
        self._began, self._thread = time.perf_counter(), threading.Thread(target=self._sleep, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.share = self._overslept / (time.perf_counter() - self._began)

    def _sleep(self) -> None:
        before = time.perf_counter()
        while not self._done.is_set():
            time.sleep(_MOMENT)
            now = time.perf_counter()
            self._overslept += max(now - before - _MOMENT - _SLACK, 0.0)
            before = now


def undisturbed(measure: Callable[[], Found]) -> Found:
    """What was measured when the machine disturbed it least; in a world all ranks ask for it together, and agree."""
    found: list[tuple[float, Found]] = []
    while len(found) < _MOST and (not found or found[-1][0] > _LITTLE):
        with Disturbance() as beside:
            made = measure()
        found.append((_worst(beside.share), made))
    return min(found, key=lambda one: one[0])[1]


def _worst(share: float) -> float:
    """Of all ranks."""
    if not dist.is_initialized():
        return share
    shared = torch.tensor([share])
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared)
