"""What is said of parameters that train nothing."""

from __future__ import annotations

from collections.abc import Collection

from galvatron_lite.model.graph import DeadParameters
from galvatron_lite.units import format_bytes, format_count

_ADAM = 16
"""Bytes that a trainable parameter item costs with Adam in fp32: itself, its gradient and two moments."""
_NAMED = 4  # modules that a note names at most


def dead_note(dead: Collection[DeadParameters], parameters: int, goal: str) -> tuple[str, ...]:
    """A line on dead parameters, where there are some: how many, which, what they cost, what to do."""
    if not dead:
        return ()
    items = sum(one.items for one in dead)
    largest = [one.path for one in sorted(dead, key=lambda one: -one.items)]
    more = f" and {len(dead) - _NAMED} more" if len(dead) > _NAMED else ""
    return (
        f"{format_count(items)} of {format_count(parameters)} parameters never reach {goal}: "
        f"{', '.join(largest[:_NAMED])}{more}. They train nothing and cost {format_bytes(_ADAM * items)} of states "
        "with Adam in fp32: use what these modules give, or remove them.",
    )
