"""Placement: which dimension's ranks lie far apart, over the slower links. ``parallelism.ranks`` has what it means.

Usually tensor ranks are the closest, then those of context, shards and replicas. Where replicas are near and shards far
apart, the all-reduce of gradients stays in a node and shards are gathered over nodes; where context ranks are far
apart, the ring's hops, which run beside attention, go over the network, and shards and replicas stay near.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.base import Chosen, DimensionContext, LayerWork, Room, shared, sliced
from galvatron_lite.parallelism.ranks import Either
from galvatron_lite.parallelism.strategy import Strided


@dataclass(frozen=True, slots=True)
class PlacementDimension:
    """The order of ranks in a stage."""

    name: str = "placement"
    degree: str = ""

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:  # noqa: ARG002
        """The usual order, shards far apart, context ranks far apart."""
        return [{"strided": order} for order in Strided]

    def allows(self, kind: LayerKind, chosen: Chosen, room: Room) -> bool:  # noqa: ARG002
        """An order other than the usual one must differ from it. Experts and Ulysses know only that one.

        Sensible: only on a stage of more than one node. Shards lie far apart only where their replicas fill a node;
        near, only where they fill one themselves or there are no replicas. Context ranks lie whole nodes apart, where
        all that is left is shards or replicas of the states.
        """
        order, data, zero, context = chosen["strided"], chosen["data"], chosen["zero"], chosen["context"]
        slices = sliced(chosen) * shared(chosen)
        hybrid = data > 1 and chosen["zero_stage"] > 0
        if order is Strided.NONE:
            return room.node is None or not hybrid or room.node == slices * zero
        if chosen["expert"] > 1 or chosen["ulysses"]:
            return False
        if order is Strided.ZERO:
            legal = zero > 1 and data > 1
            return legal and (room.node is None or (room.devices > room.node and room.node == slices * data))
        legal = context > 1 and data * zero > 1 and shared(chosen) == context
        apart = room.node is None or (room.devices > room.node and room.devices // context % room.node == 0)
        return legal and apart and (room.node is None or not hybrid)

    def reason(self, kind: LayerKind) -> str:  # noqa: ARG002
        """Never limited by a layer."""
        return ""

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:  # noqa: ARG002
        """Nothing: the groups of the other dimensions are what it changes (``parallelism.ranks``)."""
        return work
