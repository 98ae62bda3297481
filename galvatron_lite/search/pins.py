"""What the user pinned and ruled out, checked against itself before anything is searched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.backends import Backend
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.space import STRATEGY_FIELDS, Fixed

Pin = tuple[str, str, object]
"""What the user wrote, field of ``Strategy``, value."""


def check_pins(graph: ModelGraph, fixed: Fixed) -> None:
    """Raise InputError where pins contradict one another or what is forbidden, or name no layer."""
    for names, field, value in fixed.layers:
        if not any(fnmatchcase(layer.name, names) for layer in graph.layers):
            some = ", ".join(layer.name for layer in graph.layers[:3])
            raise InputError(f"--fix {names}.{field}", value, f"No layer has that name; there are {some}, ...")
    if "pipeline" in fixed.forbidden and (fixed.pipeline or 1) > 1:
        raise InputError("--fix pp", fixed.pipeline, "--forbid pipeline rules it out; lift one of the two.")
    if fixed.pipeline == 1 and (fixed.virtual or 1) > 1:
        raise InputError("--fix virtual", fixed.virtual, "It needs a pipeline, and --fix pp=1 rules that out.")
    whole = [(f"--fix {field}", field, value) for field, value in fixed.strategy]
    _check_against(whole, fixed.forbidden)
    _check_one_another(whole)
    for layer in graph.layers:
        own = [(f"--fix {names}.{f}", f, v) for names, f, v in fixed.layers if fnmatchcase(layer.name, names)]
        _check_against(own, fixed.forbidden)
        _check_one_another([*whole, *own])


def _check_against(pins: Sequence[Pin], forbidden: Sequence[str]) -> None:
    for (said, field, value), (dimension, plain) in ((pin, off) for pin in pins for off in _off(forbidden, pin[1])):
        if value != plain:
            raise InputError(said, _shown(value), f"--forbid {dimension} rules {field} out; lift one of the two.")


def _off(forbidden: Sequence[str], field: str) -> Iterator[tuple[str, object]]:
    """Forbidden dimensions that set a field of ``Strategy``, with the value that is left."""
    for dimension in forbidden:
        if field in STRATEGY_FIELDS.get(dimension, ()):
            yield dimension, getattr(Strategy(), field)


def _check_one_another(pins: Sequence[Pin]) -> None:
    first: dict[str, Pin] = {}
    for pin in pins:
        said, field, value = pin
        other = first.setdefault(field, pin)
        if other[2] != value:
            raise InputError(said, _shown(value), f"{other[0]}={_shown(other[2])} asks for another; lift one of them.")


def _shown(value: object) -> object:
    return getattr(value, "value", value)


def schedules_for(fixed: Fixed, schedules: Sequence[Schedule] | None, backend: Backend) -> tuple[Schedule, ...]:
    """The schedules to choose from.

    Args:
        fixed: may pin one, or a number of virtual stages.
        schedules: that are asked for; None: all that the backend runs.
        backend: what is to run the plan.

    Raises:
        InputError: none is named, the backend does not run one, or pins leave none.
    """
    asked = backend.schedules if schedules is None else tuple(schedules)
    if not asked:
        raise InputError("schedules", schedules, "Name at least one.")
    offered = ", ".join(schedule.value for schedule in backend.schedules)
    for schedule in asked:
        if schedule not in backend.schedules:
            raise InputError("schedules", schedule.value, f"Backend {backend.name} does not train with it; {offered}.")
    if fixed.schedule is not None:
        if fixed.schedule not in asked:
            raise InputError("--fix schedule", fixed.schedule.value, f"Backend {backend.name} offers {offered}.")
        asked = (fixed.schedule,)
    several = [own for own in asked if own.virtual_stages != 1]
    if (fixed.virtual or 1) > 1 and not several:
        said = ", ".join(own.value for own in asked)
        raise InputError("--fix virtual", fixed.virtual, f"Schedule {said} runs one stage a group of devices.")
    return asked
