"""Lines that tell a training script's user that it is measuring before it trains."""

from __future__ import annotations

from time import monotonic

from galvatron_lite.profiler.measure_tasks import Progress
from galvatron_lite.saying import say

EVERY = 15.0
"""Seconds between lines."""


def notices(title: str) -> Progress:
    """A function (done, total, label) that says a line at the start, and every so often (``saying.say``).

    Training scripts have no place of their own for it, and minutes of silence look like a hang.
    """
    told = [float("-inf")]

    def tell(done: int, total: int, label: str) -> None:
        if monotonic() - told[0] >= EVERY:
            told[0] = monotonic()
            say(f"{title}: {done} of {total} ({label})")

    return tell
