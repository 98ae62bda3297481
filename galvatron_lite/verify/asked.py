"""What can be asked of a plan's verification. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from galvatron_lite.errors import InputError


class Checks(StrEnum):
    """Kinds of checks."""

    DRY = "dry"
    NUMBERS = "numbers"


def checks_named(names: str | Sequence[str]) -> tuple[Checks, ...]:
    """Checks by their names; in one text with commas between.

    Raises:
        InputError: there is no such check.
    """
    words = names.split(",") if isinstance(names, str) else names
    known = [one.value for one in Checks]
    for word in words:
        if word not in known:
            raise InputError("--checks", word, f"Give one or several of {', '.join(known)}, with commas between.")
    return tuple(one for one in Checks if one.value in words)
