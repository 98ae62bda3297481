"""Parse and format quantities for people. Inside the package everything is in bytes, seconds, FLOPs and items."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from galvatron_lite.errors import UnitError

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*$", re.IGNORECASE)
_COUNT = re.compile(r"^\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMBGT]?)\s*$", re.IGNORECASE)
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(us|ms|s|min|h|d|w)\s*$", re.IGNORECASE)
_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SHARE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*%\s*$")
_SMALLEST_BUDGET = 2**20

ITEM_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of one tensor element, by precision."""


def activation_bytes(precision: str) -> int:
    """Bytes of one activation element: under fp8, which is for matmuls only, activations are bf16."""
    return ITEM_BYTES["bf16" if precision == "fp8" else precision]


def parse_bytes(text: str, field: str = "size") -> int:
    """Parse a size such as ``40GB`` (decimal), ``40GiB`` (binary) or ``512MB``, in bytes.

    Raises:
        UnitError: no unit, an unknown unit, or not a number.
    """
    match = _SIZE.match(text)
    if match is None or (match[3] and not match[2]):
        raise UnitError(field, text, "Give a number and a unit: 40GB (decimal), 40GiB (binary), 512MB.")
    return round(float(match[1]) * (_BINARY if match[3] else _DECIMAL)[match[2].upper()])


def parse_budget(text: str, capacity: int, field: str = "--mem") -> int:
    """Parse a memory budget a device, in bytes: a size (``40GB``, ``40GiB``, bytes) or a share of it (``80%``).

    Args:
        text: the budget.
        capacity: bytes of the device.
        field: name of the budget in errors.

    Raises:
        UnitError: an unreadable size, a share outside (0, 100], or a budget below 1 MiB.
    """
    share = _SHARE.match(text)
    if share is not None:
        if not 0 < float(share[1]) <= 100:
            raise UnitError(field, text, "A share of the device's memory lies above 0% and at most at 100%.")
        budget = round(float(share[1]) / 100 * capacity)
    else:
        plain = int(text) if text.strip().isdecimal() else 0
        budget = plain if plain >= _SMALLEST_BUDGET else parse_bytes(text, field)  # small numbers need a unit
    if budget < _SMALLEST_BUDGET:
        raise UnitError(field, text, "A budget below 1 MiB holds no model; did you mean GB?")
    return budget


def parse_count(text: str, field: str) -> float:
    """Parse a number above 0 such as ``1000``, ``1.5M``, ``2B`` (or ``2G``) or ``1T``.

    Raises:
        UnitError: an unknown unit, not a number, or 0.
    """
    match = _COUNT.match(text)
    if match is None or float(match[1]) == 0:
        raise UnitError(field, text, "Give a number above 0, with K, M, B or T if you like: 1000, 1.5M, 300B.")
    return float(match[1]) * _COUNTS[match[2].upper()]


def parse_seconds(text: str, field: str) -> float:
    """Parse a duration such as ``300ms``, ``2s``, ``10min``, ``12h`` or ``30d``, in seconds.

    Raises:
        UnitError: no unit, an unknown unit, not a number, or 0.
    """
    match = _DURATION.match(text)
    if match is None or float(match[1]) == 0:
        raise UnitError(field, text, "Give a number above 0 and a unit: 300ms, 2s, 10min, 12h, 30d.")
    return float(match[1]) * _DURATIONS[match[2].lower()]


def format_bytes(size: float) -> str:
    """Format a size in binary units: ``37.3 GiB``."""
    value, sign = abs(float(size)), "-" if size < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{sign}{value:.0f} B" if unit == "B" else f"{sign}{value:.1f} {unit}"
        value /= 1024
    return f"{sign}{value:.1f} TiB"


def format_budget(size: int, *, up: bool = False) -> str:
    """Format a size so that ``parse_bytes`` can read it, in binary units with two decimals: ``16.54GiB``.

    Args:
        size: bytes, 0 or more.
        up: round up, for a size that is enough; else round down, for a size that is available.
    """
    unit = next((prefix for prefix in "TGMK" if size >= _BINARY[prefix]), "")
    value = (Decimal(size) / _BINARY.get(unit, 1)).quantize(Decimal("0.01"), ROUND_CEILING if up else ROUND_FLOOR)
    return f"{value:f}".rstrip("0").rstrip(".") + (f"{unit}iB" if unit else "B")


def format_seconds(seconds: float) -> str:
    """Format a duration: ``1.42 s``, ``318 ms``, ``5.1 us``."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor:
            value = seconds / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{seconds * 1e6:.2g} us"


def format_duration(seconds: float) -> str:
    """Format a long duration: ``3.2 days``, ``12 hours``, ``5.1 minutes``, else as ``format_seconds``."""
    for factor, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.3g} {unit}" if seconds < 1000 * factor else f"{seconds / factor:,.0f} {unit}"
    return format_seconds(seconds)


def format_count(number: float) -> str:
    """Format a large count: ``6.7B``, ``124M``."""
    value = float(number)
    for unit in ("", "K", "M", "B"):
        if abs(value) < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"
