"""Axes of the figures: round values to mark, and how figures are written. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from math import floor, log10

from galvatron_lite.units import format_bytes, format_seconds

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def marks(most: float, count: int = 5, base: float = 1.0) -> list[float]:
    """Round values from 0 to at most ``most``, about so many.

    Args:
        most: the end of the axis.
        count: about how many.
        base: what round is a multiple of: 2**30 for sizes.
    """
    if most <= 0.0:
        return [0.0]
    rough = most / base / count
    unit = 10.0 ** floor(log10(rough))
    step = next(step for step in _STEPS if step * unit >= rough * (1 - 1e-9)) * unit * base
    return [step * number for number in range(int(most / step * (1 + 1e-9)) + 1)]


def byte_marks(most: float, count: int = 4) -> list[float]:
    """``marks`` of a size, round in the unit it is written in."""
    base = next(base for base in (2.0**40, 2.0**30, 2.0**20, 2.0**10, 1.0) if most >= base or base == 1.0)
    return marks(most, count, base)


def same_unit(values: list[float], write: Callable[[float], str]) -> list[str]:
    """Values as they are written, with 0 in the unit of the others."""
    words = [write(value) for value in values]
    return ["0" if value == 0.0 else word for value, word in zip(values, words, strict=True)]


def second_words(values: list[float]) -> list[str]:
    """Seconds at an axis."""
    return same_unit(values, lambda value: format_seconds(float(f"{value:.6g}")))


def byte_words(values: list[float]) -> list[str]:
    """Sizes at an axis, without ``.0``."""
    return same_unit(values, lambda value: format_bytes(value).replace(".0 ", " "))


def percent(share: float) -> str:
    """A share: ``4.2 %``, ``37 %``."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 9.95 or value == 0 else f"{value:.1f} %"


def signed(write: Callable[[float], str]) -> Callable[[float], str]:
    """Differences with their sign, written as other figures are; less than a billionth is none."""

    def written(value: float) -> str:
        return "0" if abs(value) < 1e-9 else ("+" if value > 0 else "−") + write(abs(value))

    return written


def change(share: float) -> str:
    """A share by which something differs, with its sign: ``+4.2 %``."""
    return ("+" if share > 0 else "−" if share < 0 else "±") + percent(abs(share))
