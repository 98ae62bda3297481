"""Many strategies at once: what ``Strategy`` says of one, as arrays. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from galvatron_lite.arrays import BoolArray, Flag, IntArray, is_option, where
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Offload, Strategy


@dataclass(frozen=True, eq=False)
class Strategies:
    """n strategies: each field of ``Strategy`` as an array (n,), choices as places among their options."""

    data: IntArray
    zero: IntArray
    zero_stage: IntArray
    tensor: IntArray
    sequence_parallel: BoolArray
    recompute: IntArray
    context: IntArray
    expert: IntArray
    expert_tensor: IntArray
    ulysses: BoolArray
    offload: IntArray
    depth: IntArray
    height: IntArray
    width: IntArray
    filters: IntArray
    channels: IntArray
    known: dict[object, Any] = field(default_factory=dict, init=False, repr=False)  # what ``ranks`` worked out

    @staticmethod
    def of(strategies: Sequence[Strategy]) -> Strategies:
        """The same strategies as arrays."""
        names = [item.name for item in fields(Strategy)]
        columns = list(zip(*map(attrgetter(*names), strategies), strict=True)) or [()] * len(names)
        return Strategies(*(_column(name, values) for name, values in zip(names, columns, strict=True)))

    def at(self, rows: IntArray) -> Strategies:
        """Only some of them."""
        return Strategies(*(getattr(self, item.name)[rows] for item in fields(Strategy)))

    def __len__(self) -> int:
        """How many there are."""
        return len(self.data)

    @cached_property
    def devices(self) -> IntArray:
        """Devices of the stage that each takes."""
        return self.token_degree * self.tensor * self.slices

    @cached_property
    def spatial(self) -> IntArray:
        """How many ways the pixels of a sample are split."""
        return self.depth * self.height * self.width

    @cached_property
    def slices(self) -> IntArray:
        """How many ways the channels of convolutions are split."""
        return self.filters * self.channels

    @cached_property
    def batch_degree(self) -> IntArray:
        """How many ways the samples are split."""
        return self.data * self.zero

    @cached_property
    def token_degree(self) -> IntArray:
        """How many ways the tokens or pixels of a batch are split."""
        return self.batch_degree * self.context * self.spatial

    @cached_property
    def offloads_states(self) -> Flag:
        """Whether optimizer states are kept and updated in host memory."""
        return is_option(self.offload, Offload.STATES) | is_option(self.offload, Offload.ALL)

    @cached_property
    def offloads_activations(self) -> Flag:
        """Whether activations wait in host memory between forward and backward."""
        return is_option(self.offload, Offload.ACTIVATIONS) | is_option(self.offload, Offload.ALL)

    @cached_property
    def state_shards(self) -> IntArray:
        """How many ways the states are sharded."""
        shards: IntArray = where((self.zero_stage > 0) | (self.zero > 1), self.zero * self.context * self.spatial, 1)
        return shards


_PLACES: dict[str, dict[object, int]] = {
    name: {option: place for place, option in enumerate(options)}
    for name, options in (("recompute", Recompute), ("offload", Offload))
}


def _column(name: str, values: Sequence[object]) -> Any:
    if name in ("sequence_parallel", "ulysses"):
        return np.array(values, dtype=np.bool_)
    places = _PLACES.get(name)
    return np.array(values if places is None else [places[value] for value in values], dtype=np.int64)
