"""Tests that provoke a time-out: it is short, so that nobody waits long, and longer where the machine stood still."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from tests.pool import JobError

_LONGER, _ATTEMPTS = 4, 3
Made = TypeVar("Made")


def patiently(attempt: Callable[[float], Made], is_meant: Callable[[Made], bool], first: float) -> Made:
    """What comes of an attempt.

    Where something else than what is meant times out (the machine was taken away for that long), it is made anew with
    four times the patience; what the last attempt comes to is given back, or raised, in any case.

    Args:
        attempt: takes the seconds after which whatever hangs is given up.
        is_meant: whether this was given up that was to be.
        first: seconds of the first attempt.
    """
    *early, last = _seconds(first)
    for seconds in early:
        try:
            made = attempt(seconds)
        except JobError:
            continue
        if is_meant(made):
            return made
    return attempt(last)


def _seconds(first: float) -> Iterator[float]:
    return (first * _LONGER**number for number in range(_ATTEMPTS))
