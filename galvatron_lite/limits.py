"""Limits on the size and depth of files, and ranges of fields in schemas. No torch here.

The ranges are far beyond any existing computer, and small enough that sums and products of a few values are exact or
finite: computations on values within them neither overflow nor run for hours.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Annotated, Any

from annotated_types import Interval, Len, Predicate

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.units import ITEM_BYTES

FILE_BYTES = 2**25  # of a JSON file
YAML_BYTES = 2**22  # of a YAML file, which takes a hundred times as long to read
DEPTH = 64  # of nested lists and mappings
VALUES = 1_000_000  # of a file, aliases expanded
ALIASED = 10_000  # values that all aliases of a file expand to
TEXT = 100_000  # characters of one text
LAYERS = 1024  # of a model: tables of the planner grow with the square
DEVICES = 2**20
SAMPLES = 2**24  # of a batch; also pixels or tokens along one side of a sample
LARGEST = 2**62  # integer
SMALLEST_FLOAT, LARGEST_FLOAT = 1e-100, 1e30


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that are refused: control characters except tab and line break, halves of surrogate pairs."""


def is_name(text: str) -> bool:
    """Return True if a text can be a name: printable, in one line, of at most 300 characters.

    Raises:
        ValueError: it cannot.
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
    """Return the data if it is plain (mappings, lists, texts, numbers) and within the limits.

    Args:
        data: the content of a file.
        field: name of the file in errors.
        finite: refuse NaN and infinity.

    Raises:
        FileFormatError: names the first value that is refused, and its place.
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
            waiting += [(item, f"{place}, {key}", depth + 1) for key, item in value.items()]
        elif kind is list:
            waiting += [(item, f"{place}.{number}", depth + 1) for number, item in enumerate(value)]
        elif (refusal := _refusal(value, finite)) is not None:
            raise FileFormatError(f"{field}{place}", value, refusal)
    return data


def _refusal(value: object, finite: bool) -> str | None:
    """The remedy for a single value that is refused; None if it is not."""
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
    """Return the number if it is from 1 to ``largest``.

    Raises:
        InputError: it is not.
    """
    if not 1 <= value <= largest:
        raise InputError(field, value, remedy or f"Give a number from 1 to {largest}.")
    return value
