"""ZeRO: devices share the samples and hold one shard each of the layer's states (FSDP2 ``fully_shard``).

Stage 2 gathers parameters in the forward of every micro-batch and lets go of them after its backward; stage 3 lets go
after each use and gathers again for backward. Both reduce-scatter gradients in the backward of every micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from galvatron_lite.cluster.cluster import RankGroup
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.base import Collective, Communication, DimensionContext, LayerWork, Moment, Strategy
from galvatron_lite.parallelism.divisors import divisors


@dataclass(frozen=True, slots=True)
class ZeroDimension:
    """Devices that each take a share of the samples and share the states of the layer."""

    name: str = "zero"

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Off, or every divisor of ``devices`` in stages 2 and 3; nothing to shard in a layer without parameters."""
        degrees = divisors(devices)[1:] if kind.parameters.total else ()
        shards: list[dict[str, object]] = [{"zero": d, "zero_stage": stage} for d in degrees for stage in (2, 3)]
        return [{"zero": 1, "zero_stage": 0}, *shards]

    def reason(self, kind: LayerKind) -> str:
        """Says so where there is nothing to shard."""
        return "" if kind.parameters.total else f"zero: {kind.name} has no parameters to shard"

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Strategy, context: DimensionContext) -> LayerWork:  # noqa: ARG002
        """Fewer samples, a shard of every state, gathers of parameters and reduce-scatters of gradients."""
        degree = strategy.zero
        if degree == 1:
            return work
        stage3 = strategy.zero_stage == 3
        group = RankGroup(degree, strategy.tensor, context.devices // degree)
        gather_bytes = work.parameters * context.gather_item_bytes
        moments = (Moment.FORWARD, Moment.BACKWARD) if stage3 else (Moment.FORWARD,)
        gathers = [Communication(Collective.ALL_GATHER, gather_bytes, group, at, True, 1, self.name) for at in moments]
        scatter = Communication(
            Collective.REDUCE_SCATTER,
            work.parameters * context.reduce_item_bytes,
            group,
            Moment.BACKWARD,
            overlaps=True,
            cause=self.name,
        )
        return replace(
            work,
            samples=work.samples / degree,
            state_items=work.state_items / degree,
            parameter_items=work.parameter_items / degree,
            gradient_items=work.gradient_items / degree,
            gathered_items=0.0 if stage3 else work.parameters,
            transient_items=work.parameters if stage3 else 0.0,
            reduce_items=work.parameters,
            gradients_persist=False,
            communications=(*work.communications, *gathers, scatter),
            microbatch_overhead=work.microbatch_overhead + context.host.get(self.name, 0.0),
        )
