"""What a plan's reader should know of the measurements that it was made from."""

from __future__ import annotations

from galvatron_lite.profiler.schema import Origin

UNSURE = 0.2
"""Spread of a profile above which it is told."""


def spread_note(origin: Origin) -> tuple[str, ...]:
    """That what a plan was made from was measured on a busy machine, where it was: a line, or nothing."""
    if origin.spread <= UNSURE:
        return ()
    return (
        f"repeated measurements differ by {origin.spread:.0%} (spread of the profile; below 10% on a machine that does "
        "nothing else), so other plans may be faster: end what else runs there, and profile again",
    )
