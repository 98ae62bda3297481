"""Data parallelism: replicas share the samples and sum their gradients once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from galvatron_lite.cluster.cluster import RankGroup
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.base import Collective, Communication, DimensionContext, LayerWork, Moment, Strategy
from galvatron_lite.parallelism.divisors import divisors


@dataclass(frozen=True, slots=True)
class DataDimension:
    """Replicas that each take a share of the samples and hold all states of the layer."""

    name: str = "data"

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:  # noqa: ARG002
        """Every divisor of ``devices``; any kind of layer can be replicated."""
        return [{"data": degree} for degree in divisors(devices)]

    def reason(self, kind: LayerKind) -> str:  # noqa: ARG002
        """Never limited."""
        return ""

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Strategy, context: DimensionContext) -> LayerWork:  # noqa: ARG002
        """Fewer samples; one all-reduce a step of the gradients this device holds (shards under ZeRO)."""
        degree = strategy.data
        if degree == 1:
            return work
        reduce = Communication(
            Collective.ALL_REDUCE,
            work.gradient_items * context.reduce_item_bytes,
            RankGroup(degree, strategy.zero * strategy.tensor, context.devices // degree),
            Moment.STEP,
            overlaps=True,
            cause=self.name,
        )
        return replace(
            work,
            samples=work.samples / degree,
            communications=(*work.communications, reduce),
            step_overhead=work.step_overhead + context.host.get(self.name, 0.0),
        )
