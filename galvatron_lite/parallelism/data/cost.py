"""Data parallelism: replicas share the samples and sum their gradients once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from types import MappingProxyType

from galvatron_lite.arrays import where
from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.axes import MeshAxis, Part, Purpose
from galvatron_lite.parallelism.base import (
    AvailableDevices,
    Chosen,
    Communication,
    Dimension,
    DimensionContext,
    LayerWork,
    Moment,
    StrategyField,
    sample_degree,
    slice_degree,
)
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.ranks import Either, shared_items
from galvatron_lite.parallelism.strategy import Strategy

SMALLEST_BUCKET, LARGEST_BUCKET = 2**20, 25 * 2**20
"""Bytes. Larger buckets use links better (25 MB as in DDP), smaller buckets start earlier."""
BUCKETS = 8
"""Buckets of a model if its size allows, so that backward hides most of the communication."""


def bucket_of(gradients: int) -> int:
    """Return the bytes at which a bucket is full, for a model with so many bytes of gradients."""
    return min(max(gradients // BUCKETS, SMALLEST_BUCKET), LARGEST_BUCKET)


@dataclass(frozen=True, slots=True)
class DataDimension(Dimension):
    """Replicas that each take a share of the samples and hold all states of the layer."""

    name: str = "data"
    degree: str = "data"

    axes = (MeshAxis("data", Part.SAMPLES, replicates=True),)
    purposes = (Purpose.GRADIENTS, Purpose.STATES)
    sums = True
    fields = (
        StrategyField("batch_degree", "dp", ("batch_degree",), "replicas times shards", splits=True),
        StrategyField("data", "data", ("ddp", "replicas"), "replicas that hold all states"),
    )
    forbids = MappingProxyType({"data": ("data",), "ddp": ("data",)})
    examples = "data4"

    def in_words(self, strategy: Strategy) -> str:
        """See ``Dimension.in_words``."""
        return f"{strategy.data} replicas" if strategy.data > 1 else ""

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:  # noqa: ARG002
        """Every divisor of ``devices``; any kind of layer can be replicated."""
        return [{"data": degree} for degree in divisors(devices)]

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:  # noqa: ARG002
        """Excludes degrees for which ``ZeroDimension.allows`` accepts no number of shards."""
        if room.node is None or chosen["data"] == 1:
            return True
        slices = slice_degree(chosen) * sample_degree(chosen)
        shards = room.devices // (slices * chosen["data"])
        return shards == 1 or room.node in (slices * shards, slices * chosen["data"])

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:  # noqa: ARG002
        """Fewer samples; one all-reduce a step of the gradients that this device holds (shards under ZeRO).

        Context ranks use the same parameters on other tokens, so they are replicas too unless they shard states.
        """
        parts = shared_items(work, strategy, trained=True)
        several = [(spread.replicas.size > 1) & (items > 0) for items, spread in parts]
        sums = [
            Communication(
                Collective.ALL_REDUCE,
                items / spread.shards.size * context.reduce_item_bytes,
                spread.replicas,
                Moment.STEP,
                overlaps=True,
                count=mask * 1,
                cause=self.name,
            )
            for (items, spread), mask in zip(parts, several, strict=True)
        ]
        overhead = work.step_overhead + where(reduce(or_, several), context.host.get(self.name, 0.0), 0.0)
        samples = work.samples / strategy.data
        return replace(work.with_communications(*sums), samples=samples, step_overhead=overhead)
