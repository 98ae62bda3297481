"""Pipeline schedules by name."""

from __future__ import annotations

from collections.abc import Sequence

from galvatron_lite.errors import InputError
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.questions.pin_names import pin_named


def schedules_named(given: Sequence[Schedule | str] | None, pinned: Schedule | None) -> tuple[Schedule, ...] | None:
    """The schedules to choose from, in the order given; None where that is left to the search.

    Args:
        given: names; None or none: not said.
        pinned: the only one that is wanted.

    Raises:
        InputError: an unknown name, or a pinned schedule that is not among those given.
    """
    named = tuple(dict.fromkeys(_schedule(name) for name in given or ()))
    if pinned is None:
        return named or None
    if named and pinned not in named:
        raise InputError("--fix schedule", pinned.value, f"It is not among --schedule {', '.join(named)}.")
    return (pinned,)


def _schedule(name: str) -> Schedule:
    try:
        schedule = Schedule(str(pin_named("schedule").read("schedule", name.lower())))
    except InputError as error:
        raise InputError("--schedule", name, error.remedy) from None
    if schedule is Schedule.CYCLIC:
        raise InputError("--schedule", name, "It is of no pipeline: --allow-delay --fix schedule=cyclic.")
    return schedule
