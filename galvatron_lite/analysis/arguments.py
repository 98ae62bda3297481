"""What callers of the Python functions pass, read as the command line reads it; what cannot be read is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

from galvatron_lite.errors import InputError
from galvatron_lite.plans.schema import Mode
from galvatron_lite.search.pin_names import near
from galvatron_lite.units import parse_bytes, parse_count, parse_seconds

_WORDS = {"seq": "sequence", "seq_len": "sequence", "seq_length": "sequence", "budget": "mem", "global_batch": "batch"}
"""Arguments by names that they have elsewhere."""


def check_names(given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse an argument that there is not."""
    for name in given:
        if name not in known:
            meant = f"Did you mean {_WORDS[name]}? " if name in _WORDS else near(name, known)
            raise InputError("argument", name, f"{meant}Known: {', '.join(known)}.")


def texts(name: str, given: object) -> tuple[str, ...]:
    """Several words, of which one may come alone, or a mapping of names to values (``{"pp": 2}``)."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (_word(given),)
    if isinstance(given, Mapping):
        return tuple(f"{key}={_word(value)}" for key, value in given.items())
    listed = list(given) if isinstance(given, Iterable) else []
    if not isinstance(given, Iterable) or not all(isinstance(one, str) for one in listed):
        raise InputError(name, given, "Give a text, or a list of texts.")
    return tuple(_word(one) for one in listed)


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value.value if isinstance(value, Enum) else value)


def mode_named(given: object) -> Mode:
    """What a plan is for, by its name."""
    names = [mode.value for mode in Mode]
    if not isinstance(given, str) or given not in names:
        raise InputError("--mode", given, f"Give one of {', '.join(names)}.")
    return Mode(given)


def switch(name: str, given: object) -> bool:
    """Yes or no."""
    if not isinstance(given, bool):
        raise InputError(name, given, "Give True or False.")
    return given


def memory(given: object, name: str = "mem") -> str | int:
    """A budget a device: bytes, a text, or a share of each device's own memory as a fraction (0.8)."""
    if isinstance(given, str) or (isinstance(given, int) and not isinstance(given, bool)):
        return given
    if isinstance(given, float) and 0 < given <= 1:
        return f"{100 * given:g}%"
    if isinstance(given, float) and given.is_integer() and given > 1:
        return int(given)
    raise InputError(name, given, "Give bytes (40e9), a text ('40GB', '40GiB', '80%') or a share of the memory (0.8).")


def whole(name: str, given: object) -> int | None:
    """A whole number, or None."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool)):
        return given
    raise InputError(name, given, "Give a whole number.")


def number(name: str, given: object, read: Callable[[str, str], float] = parse_count) -> float | None:
    """A number, a text that ``read`` understands, or None."""
    if isinstance(given, str):
        return read(given, name)
    if given is None or (isinstance(given, (int, float)) and not isinstance(given, bool)):
        return given
    raise InputError(name, given, "Give a number, or a text with a unit.")


def seconds(name: str, given: object) -> float | None:
    """Seconds, of a number or a text such as ``130ms``; or None."""
    return number(name, given, parse_seconds)


def share(name: str, given: object) -> float | None:
    """A share from 0 to below 1: a fraction (0.01), or a text (``1%``, ``0.01``); or None."""
    if given is None:
        return None
    try:
        text = str(given).strip()
        found = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        found = -1.0
    if isinstance(given, bool) or not 0.0 <= found < 1.0:
        raise InputError(name, given, "Give a share from 0 to below 1: 0.01, or 1%.")
    return found


def size(name: str, given: object) -> int | None:
    """Bytes, of a number or a text such as ``400MB``; or None."""
    return whole(name, parse_bytes(given, name) if isinstance(given, str) else given)


def place(name: str, given: object) -> None:
    """Check what names a thing or a file."""
    if isinstance(given, (int, float, list, tuple, dict)):
        raise InputError(name, given, "Give a name, or the path of a file.")
