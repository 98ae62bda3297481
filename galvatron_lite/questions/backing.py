"""Pins that the backend cannot run, told in the words that they were typed in, before anything is searched."""

from __future__ import annotations

from collections.abc import Sequence

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.backends import ANY, Backend
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.questions.pin_names import pin_named

_WORDS = {
    "context": "context parallelism", "ulysses": "context parallelism", "expert": "expert parallelism",
    "zero_stage": "ZeRO-1", "offload": "offload",
    "virtual": "several stages a group of devices",
}  # fmt: skip
"""What fields of ``Strategy`` and of ``Fixed`` stand for where a backend lacks them."""
_SEVERAL = (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE_V)


def check_backend(fix: Sequence[str], schedules: Sequence[str], backend: Backend) -> None:
    """Refuse what is pinned or asked for and the backend does not run.

    Args:
        fix: pins as they were typed: ``cp=2``, ``layers.3.offload=on``.
        schedules: names of the schedules asked for.
        backend: what is to run the plan.

    Raises:
        InputError: names the pin or schedule, and the backend that offers it.
    """
    for given in fix:
        left, equals, text = given.partition("=")
        name = left.strip().rpartition(".")[2]
        lacking = _lacking(name, text.strip().lower(), backend) if equals and text.strip() else ""
        if lacking:
            raise _refused("--fix", given, lacking, backend)
    for given in schedules:
        lacking = _lacking("schedule", given.lower(), backend)
        if lacking:
            raise _refused("--schedule", given, lacking, backend)


def _refused(option: str, given: str, lacking: str, backend: Backend) -> InputError:
    other = f"; --backend {ANY.name} offers it" if backend.name != ANY.name else ""
    return InputError(option, given, f"Backend {backend.name} cannot run {lacking}{other}.")


def _lacking(name: str, text: str, backend: Backend) -> str:
    """What the backend would need for one pin, in words; empty where it runs it."""
    pin = pin_named(name)
    value = pin.read(pin.name, text)
    if pin.field == "schedule":
        return "" if value in (*backend.schedules, Schedule.CYCLIC) else f"the {Schedule(str(value)).value} schedule"
    if pin.field == "virtual":
        runs = value == 1 or any(order in backend.schedules for order in _SEVERAL)
    elif pin.field == "ulysses":
        runs = value is False or backend.values.get("context") != (1,)
    else:
        runs = value in backend.values.get(pin.field, (value,))
    return "" if runs else _WORDS.get(pin.field, pin.means)
