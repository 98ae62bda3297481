"""Many strategies at once. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from operator import attrgetter
from typing import Any

import numpy as np

from galvatron_lite.arrays import BoolArray, IntArray
from galvatron_lite.parallelism.strategy import Degrees, Strategy

_FIELDS = {item.name: item.default for item in fields(Strategy)}


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
        columns = list(zip(*map(attrgetter(*_FIELDS), strategies), strict=True)) or [()] * len(_FIELDS)
        pairs = zip(_FIELDS.items(), columns, strict=True)
        return Strategies(**{name: _column(default, values) for (name, default), values in pairs})

    def at(self, rows: IntArray) -> Strategies:
        """Only some of them."""
        return Strategies(**{name: getattr(self, name)[rows] for name in _FIELDS})

    def __len__(self) -> int:
        return len(self.data)


def _column(default: object, values: Sequence[Any]) -> Any:
    if isinstance(default, bool):
        return np.array(values, dtype=np.bool_)
    if isinstance(default, Enum):
        places = {option: place for place, option in enumerate(type(default))}
        values = [places[value] for value in values]
    return np.array(values, dtype=np.int64)
