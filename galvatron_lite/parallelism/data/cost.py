"""Data parallelism: replicas share the samples and sum their gradients once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.base import Collective, Communication, DimensionContext, LayerWork, Moment, Strategy
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.ranks import shared_items


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
        """Fewer samples; one all-reduce a step of the gradients this device holds (shards under ZeRO).

        Context ranks see other tokens with the same parameters, so where they share no states they are replicas too.
        """
        sums = tuple(
            Communication(
                Collective.ALL_REDUCE,
                items / spread.shards.size * context.reduce_item_bytes,
                spread.replicas,
                Moment.STEP,
                overlaps=True,
                cause=self.name,
            )
            for items, spread in shared_items(work, strategy)
            if spread.replicas.size > 1
        )
        if not sums:
            return replace(work, samples=work.samples / strategy.data)
        return replace(
            work,
            samples=work.samples / strategy.data,
            communications=(*work.communications, *sums),
            step_overhead=work.step_overhead + context.host.get(self.name, 0.0),
        )
