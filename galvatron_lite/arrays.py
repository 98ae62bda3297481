"""Formulas that hold for one figure and for an array of them: what a strategy costs, and what each of thousands does.

Python numbers stay Python numbers (and cheap); arrays are worked on elementwise. Both give the same bits, because both
do the same operations in double precision; integers stay below 2**53.
"""

from __future__ import annotations

from enum import Enum
from functools import reduce
from math import ceil
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Whole: TypeAlias = Any
"""An ``int``, or an array of them: one for each strategy."""
Real: TypeAlias = Any
"""A ``float``, or an array of them."""
Flag: TypeAlias = Any
"""A ``bool``, or an array of them."""
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


def where(mask: Flag, yes: Real, no: Real) -> Real:
    """``yes`` where the mask is true, else ``no``; both are worked out."""
    if isinstance(mask, np.ndarray):
        return np.where(mask, yes, no)
    return yes if mask else no


def largest(*figures: Real) -> Real:
    """The largest of two or more figures."""
    if any(isinstance(figure, np.ndarray) for figure in figures):
        return reduce(np.maximum, figures)
    return max(figures)


def least(*figures: Real) -> Real:
    """The least of two or more figures."""
    if any(isinstance(figure, np.ndarray) for figure in figures):
        return reduce(np.minimum, figures)
    return min(figures)


def up(figure: Real) -> Whole:
    """Rounded up to whole numbers."""
    if isinstance(figure, np.ndarray):
        return np.ceil(figure).astype(np.int64)
    return ceil(figure)


def opposite(mask: Flag) -> Flag:
    """True where the mask is not."""
    return ~mask if isinstance(mask, np.ndarray) else not mask


def never(mask: Flag) -> bool:
    """Whether a mask is true (a figure other than 0) nowhere."""
    return not (mask.any() if isinstance(mask, np.ndarray) else mask)


def power(base: Real, exponent: int) -> Real:
    """``base ** exponent`` by multiplication: library powers of single numbers and of arrays differ in the last bit."""
    return reduce(lambda product, _: product * base, range(exponent), 1.0)


def is_option(choice: Any, option: Enum) -> Flag:
    """Whether a choice of an enum is this option; arrays hold the place of each choice in its enum."""
    if isinstance(choice, np.ndarray):
        return choice == list(type(option)).index(option)
    return choice is option
