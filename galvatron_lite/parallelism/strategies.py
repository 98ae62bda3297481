"""Many strategies at once. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from galvatron_lite.arrays import BoolArray, IntArray
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Degrees, Offload, Strategy

_FIELDS = tuple(item.name for item in fields(Strategy))
_OPTIONS = {
    name: {option: place for place, option in enumerate(options)}
    for name, options in (("recompute", Recompute), ("offload", Offload))
}


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
        return Strategies(**{name: _column(name, values) for name, values in zip(_FIELDS, columns, strict=True)})

    def at(self, rows: IntArray) -> Strategies:
        """Only some of them."""
        return Strategies(**{name: getattr(self, name)[rows] for name in _FIELDS})

    def __len__(self) -> int:
        return len(self.data)


def _column(name: str, values: Sequence[Any]) -> Any:
    if name in ("sequence_parallel", "ulysses"):
        return np.array(values, dtype=np.bool_)
    options: Any = _OPTIONS.get(name)
    return np.array(values if options is None else [options[value] for value in values], dtype=np.int64)
