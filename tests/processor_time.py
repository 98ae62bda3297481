"""Limits on processor time, whatever else the machine does."""

from __future__ import annotations

import time
from collections.abc import Callable


def least(seconds: Callable[[], float], below: float, most: int = 20) -> float:
    """The least of some measurements of processor time, up to the first that is below a limit.

    Other work of the machine makes the same work longer (caches, a core that is shared), and nothing makes it shorter.
    """
    found = seconds()
    for _ in range(most - 1):
        if found < below:
            break
        found = min(found, seconds())
    return found


def process_seconds(run: Callable[[], object]) -> float:
    """Of the processor, for a call."""
    begun = time.process_time()
    run()
    return time.process_time() - begun
