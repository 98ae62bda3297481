"""Functions of numbers or of arrays of numbers: the same formulas cost one strategy, or thousands at once.

Python numbers stay Python numbers, which are cheap; functions of arrays are elementwise. Both give the same bits, as
they do the same operations in double precision, and integers stay below 2**53. numpy is only imported by callers that
make arrays, so that a process that only reads a model starts sooner.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from functools import reduce
from math import ceil
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Whole: TypeAlias = Any
"""An ``int``, or an array with one for each strategy."""
Real: TypeAlias = Any
"""A ``float``, or an array of floats."""
Flag: TypeAlias = Any
"""A ``bool``, or an array of bools."""
IntArray: TypeAlias = "NDArray[np.int64]"
FloatArray: TypeAlias = "NDArray[np.float64]"
BoolArray: TypeAlias = "NDArray[np.bool_]"


_PLAIN = frozenset((bool, int, float))
"""Types of Python numbers, which most figures are; they are checked first."""


def _is_array(figure: Any) -> TypeGuard[NDArray[Any]]:
    """Whether a figure is an array; there are none if numpy was not imported."""
    if type(figure) in _PLAIN:
        return False
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(figure, numpy.ndarray)


def where(mask: Flag, yes: Real, no: Real) -> Real:
    """``yes`` where the mask is true, else ``no``; both are evaluated."""
    if type(mask) is bool:
        return yes if mask else no
    if _is_array(mask):
        import numpy as np

        return np.where(mask, yes, no)
    return yes if mask else no


def largest(*figures: Real) -> Real:
    """The maximum of two or more figures."""
    if not _PLAIN.issuperset(map(type, figures)) and any(_is_array(figure) for figure in figures):
        import numpy as np

        return reduce(np.maximum, figures)
    return max(figures)


def least(*figures: Real) -> Real:
    """The minimum of two or more figures."""
    if not _PLAIN.issuperset(map(type, figures)) and any(_is_array(figure) for figure in figures):
        import numpy as np

        return reduce(np.minimum, figures)
    return min(figures)


def up(figure: Real) -> Whole:
    """Round up to whole numbers."""
    if _is_array(figure):
        import numpy as np

        return np.ceil(figure).astype(np.int64)
    return ceil(figure)


def opposite(mask: Flag) -> Flag:
    """The negation of a mask."""
    return ~mask if _is_array(mask) else not mask


def never(mask: Flag) -> bool:
    """Whether a mask is true, or a figure other than 0, nowhere."""
    return not (mask.any() if _is_array(mask) else mask)


def each(function: Callable[[int], float], figure: Whole) -> Real:
    """Apply a function of whole numbers, once to each distinct value of an array."""
    if not _is_array(figure):
        return function(int(figure))
    import numpy as np

    values, places = np.unique(figure, return_inverse=True)
    return np.array([function(int(value)) for value in values])[places]


def is_option(choice: Any, option: Enum) -> Flag:
    """Whether an enum value is ``option``; arrays hold the index of each value in its enum."""
    if type(choice) is type(option):
        return choice is option
    return choice == list(type(option)).index(option)
