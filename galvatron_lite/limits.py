"""How large and how deep what is read may be, and the ranges of fields in schemas. No torch here.

The ranges are far beyond any computer there is, and small enough that products and sums of a few of them are exact or
finite: what is computed from figures within them neither overflows nor runs for hours.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Annotated, Any

from annotated_types import Interval, Len, Predicate

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.units import ITEM_BYTES

FILE_BYTES = 2**25
"""Of a JSON file."""
YAML_BYTES = 2**22
"""Of a YAML file, which takes a hundred times as long to read as JSON of its size."""
DEPTH = 64
"""Lists and mappings inside one another."""
VALUES = 1_000_000
"""Values of a file, each alias with all that it stands for."""
ALIASED = 10_000
"""Values that all aliases of a file stand for."""
TEXT = 100_000
"""Characters of one text."""
LAYERS = 1024
"""Layers of a model: tables of the planner grow with their square."""
DEVICES = 2**20
SAMPLES = 2**24
"""Samples of a batch, pixels or tokens along one side of a sample."""
LARGEST = 2**62
"""The largest integer."""
SMALLEST_FLOAT, LARGEST_FLOAT = 1e-100, 1e30


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What no text holds: control characters but tab and line break, halves of surrogate pairs."""


def is_name(text: str) -> bool:
    """True if a text may name something: printable, in one line, of at most 300 characters.

    Raises:
        ValueError: it may not.
    """
    if len(text) > 300 or not text.isprintable():
        raise ValueError("A name is printable, in one line, of at most 300 characters")
    return True


def _is_precision(text: str) -> bool:
    if text not in ITEM_BYTES:
        raise ValueError(f"Choose one of {', '.join(ITEM_BYTES)}")
    return True


Name = Annotated[str, Predicate(is_name)]
Devices = Annotated[int, Interval(ge=1, le=DEVICES)]
Samples = Annotated[int, Interval(ge=1, le=SAMPLES)]
Steps = Annotated[int, Interval(ge=1, le=10**12)]
Size = Annotated[int, Interval(ge=0, le=2**53)]
"""Bytes or items."""
Count = Annotated[int, Interval(ge=0, le=2**20)]
"""Calls in a step, or bytes for each item."""
PARAMETERS = 2**48
"""Items of all parameters of a model."""
Extent = Annotated[int, Interval(ge=-SAMPLES, le=2**53)]
"""Of an operator's shape, where paddings may be negative."""
Flops = Annotated[int, Interval(ge=0, le=LARGEST)]
BudgetBytes = Annotated[int, Interval(ge=1, le=2**53)]
"""Bytes a device may take."""
Seconds = Annotated[float, Interval(ge=0, le=1e12)]
CallSeconds = Annotated[float, Interval(ge=0, le=1e4)]
"""Of one call, beside what it computes or sends."""
StepSeconds = Annotated[float, Interval(gt=0, le=1e12)]
Rate = Annotated[float, Interval(ge=1, le=1e24)]
"""Bytes or FLOPs per second."""
RateOrNone = Annotated[float, Interval(ge=0, le=1e24)]
Factor = Annotated[float, Interval(ge=1, le=1e6)]
Share = Annotated[float, Interval(ge=0, le=1)]
Amount = Annotated[float, Interval(ge=0, le=1e15)]
Precision = Annotated[str, Predicate(_is_precision)]
"""A key of ``units.ITEM_BYTES``."""
Layers = Len(1, LAYERS)
"""Of a tuple: as many entries as a model may have layers."""


def check_plain(data: Any, field: str, *, finite: bool = True) -> Any:
    """The data itself, if it is plain (mappings, lists, texts, numbers) and within the limits.

    Args:
        data: what a file held.
        field: names the file in errors.
        finite: whether NaN and infinity are refused.

    Raises:
        FileFormatError: names the place of the first value that is not.
    """
    count, waiting = 0, [(data, "", 0)]
    while waiting:
        value, place, depth = waiting.pop()
        count += 1
        if count > VALUES or depth > DEPTH:
            reason = f"more than {VALUES} values" if count > VALUES else f"more than {DEPTH} levels"
            raise FileFormatError(field, reason, "No such file is that large or deep. Make it anew.")
        kind = type(value)
        if kind is dict:
            for key in value:
                if type(key) not in (str, int) or (type(key) is str and (len(key) > 300 or not key.isprintable())):
                    remedy = "A key is a printable text of at most 300 characters, or an integer. Put it in quotes."
                    raise FileFormatError(f"{field}{place}", key, remedy)
            waiting += [(one, f"{place}, {key}", depth + 1) for key, one in value.items()]
        elif kind is list:
            waiting += [(one, f"{place}.{number}", depth + 1) for number, one in enumerate(value)]
        elif (wrong := _refused(value, finite)) is not None:
            raise FileFormatError(f"{field}{place}", value, wrong)
    return data


def _refused(value: object, finite: bool) -> str | None:
    """What to do with a single value that cannot be taken; None where it can."""
    match value:
        case None | bool():
            return None
        case int():
            return None if abs(value) <= LARGEST else f"Integers lie within {LARGEST} of 0."
        case float():
            usual = SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT or value == 0
            return None if usual or not (finite or isfinite(value)) else f"Give a finite number up to {LARGEST_FLOAT}."
        case str():
            usual = len(value) <= TEXT and not _CONTROL.search(value)
            return None if usual else f"A text has at most {TEXT} characters, and no control characters."
    return "Put it in quotes: only texts, numbers, lists and mappings can be used."


def check_range(field: str, value: int, largest: int, remedy: str = "") -> int:
    """The number itself, if it lies between 1 and ``largest``.

    Raises:
        InputError: it does not.
    """
    if not 1 <= value <= largest:
        raise InputError(field, value, remedy or f"Give a number from 1 to {largest}.")
    return value
