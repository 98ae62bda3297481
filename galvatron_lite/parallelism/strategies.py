"""Many strategies at once. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np

from galvatron_lite.arrays import BoolArray, IntArray
from galvatron_lite.parallelism.strategy import ADDED, Degrees, Strategy

_FIELDS = {item.name: item.default for item in fields(Strategy) if item.name != "more"}


class Strategies(Degrees["IntArray", "BoolArray"]):
    """n strategies: each field of ``Strategy`` as an array (n,), choices as places among their options."""

    sequence_parallel: BoolArray
    recompute: IntArray
    ulysses: BoolArray

    def __init__(self, **columns: Any) -> None:
        self.__dict__.update(columns)
        self.known: dict[object, Any] = {}  # what ``ranks`` worked out

    @staticmethod
    def of(strategies: Sequence[Strategy]) -> Strategies:
        """The same strategies as arrays."""
        names = {**_FIELDS, **dict.fromkeys(ADDED, 1)}
        columns = list(zip(*map(attrgetter(*names), strategies), strict=True)) or [()] * len(names)
        pairs = zip(names.items(), columns, strict=True)
        return Strategies(**{name: _column(default, values) for (name, default), values in pairs})

    def at(self, rows: IntArray) -> Strategies:
        """Only some of them."""
        return Strategies(**{name: getattr(self, name)[rows] for name in (*_FIELDS, *ADDED)})

    @property
    def added(self) -> IntArray:
        """See ``Degrees.added``."""
        ways: IntArray = prod((getattr(self, name) for name in ADDED), start=np.ones_like(self.data))
        return ways

    def __len__(self) -> int:
        return len(self.data)


def _column(default: object, values: Sequence[Any]) -> Any:
    if isinstance(default, bool):
        return np.array(values, dtype=np.bool_)
    if isinstance(default, Enum):
        places = {option: place for place, option in enumerate(type(default))}
        values = [places[value] for value in values]
    return np.array(values, dtype=np.int64)
