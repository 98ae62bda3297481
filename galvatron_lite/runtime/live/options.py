"""What ``auto_parallelize`` is given of seeing training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from galvatron_lite.errors import InputError


@dataclass(frozen=True, slots=True)
class ObserverOptions:
    """What is wanted of a run."""

    log: Path | None = None  # folder that it is written to; None: none
    live: bool = False  # whether it is shown while it goes on
    profile_steps: range = range(0)  # steps of which traces are made, from the first to before the last; empty: none


def seen_of(log: Path | str | None, live: bool, profile_steps: range | None) -> ObserverOptions | None:
    """What is wanted; None: nothing.

    Raises:
        InputError: traces without a folder, or of steps that do not follow one another.
    """
    steps = range(0) if profile_steps is None else profile_steps
    if not isinstance(steps, range) or steps.step != 1 or (steps and steps.start < 0):
        raise InputError("profile_steps", str(profile_steps), "Give steps in a row, as range(10, 13).")
    if steps and log is None:
        raise InputError("profile_steps", str(profile_steps), "Traces go into the folder of the run: give log=FOLDER.")
    if log is None and not live:
        return None
    return ObserverOptions(None if log is None else Path(log), live, steps)
