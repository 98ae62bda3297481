"""ZeRO: devices share the samples and hold one shard each of the layer's states (Rajbhandari et al. 2020).

Stage 1 (Megatron's distributed optimizer, DeepSpeed's ZeRO-1) shards the optimizer's states only: gradients are
reduce-scattered and updated parameters all-gathered once a step, together the volume of one all-reduce (section 7.2.1
of arXiv:1910.02054). Stages 2 and 3 are FSDP2's ``fully_shard``: 2 gathers parameters in the forward of every
micro-batch and lets go of them after its backward; 3 lets go after each use and gathers again for backward (1.5 times
the volume). Both reduce-scatter gradients in the backward of every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from galvatron_lite.cluster.cluster import RankGroup
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.base import Collective, Communication, DimensionContext, LayerWork, Moment, Strategy
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.ranks import shared_items


@dataclass(frozen=True, slots=True)
class ZeroDimension:
    """Devices that each take a share of the samples and share the states of the layer."""

    name: str = "zero"

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Off, or every divisor of ``devices`` in stages 2 and 3; nothing to shard in a layer without parameters.

        Stage 1 is priced, not offered: the runtime has no such optimizer.
        """
        degrees = divisors(devices)[1:] if kind.parameters.total else ()
        shards: list[dict[str, object]] = [{"zero": d, "zero_stage": stage} for d in degrees for stage in (2, 3)]
        return [{"zero": 1, "zero_stage": 0}, *shards]

    def reason(self, kind: LayerKind) -> str:
        """Says so where there is nothing to shard."""
        return "" if kind.parameters.total else f"zero: {kind.name} has no parameters to shard"

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Strategy, context: DimensionContext) -> LayerWork:  # noqa: ARG002
        """Fewer samples, a shard of every state, gathers of parameters and reduce-scatters of gradients."""
        if strategy.state_shards == 1:
            return work
        parts = shared_items(work, strategy)
        at_rest = sum(items / spread.shards.size for items, spread in parts)
        moved = tuple(one for items, spread in parts for one in self._moved(items, spread.shards, strategy, context))
        work = replace(
            work,
            samples=work.samples / strategy.zero,
            state_items=at_rest,
            communications=(*work.communications, *moved),
        )
        if strategy.zero_stage == 1:
            return replace(work, step_overhead=work.step_overhead + context.host.get("data", 0.0))
        stage3 = strategy.zero_stage == 3
        return replace(
            work,
            parameter_items=at_rest,
            gradient_items=at_rest,
            gathered_items=0.0 if stage3 else work.parameters,
            transient_items=work.parameters if stage3 else 0.0,
            reduce_items=work.parameters,
            gradients_persist=False,
            microbatch_overhead=work.microbatch_overhead + context.host.get(self.name, 0.0),
        )

    def _moved(
        self, items: float, group: RankGroup, strategy: Strategy, context: DimensionContext
    ) -> Iterator[Communication]:
        """Gathers of so many parameter items, then the reduce-scatter of their gradients."""
        if group.size == 1:
            return
        gathered, reduced = items * context.gather_item_bytes, items * context.reduce_item_bytes
        for moment in GATHERS.get(strategy.zero_stage, (Moment.FORWARD,)):
            yield Communication(Collective.ALL_GATHER, gathered, group, moment, True, 1, self.name)
        once = strategy.zero_stage == 1
        moment = Moment.STEP if once else Moment.BACKWARD
        yield Communication(Collective.REDUCE_SCATTER, reduced, group, moment, True, 1, self.name)


GATHERS = {1: (Moment.STEP,), 2: (Moment.FORWARD,), 3: (Moment.FORWARD, Moment.BACKWARD)}
"""When each stage gathers parameters."""
