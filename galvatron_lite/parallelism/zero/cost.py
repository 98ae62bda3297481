"""ZeRO: devices share the samples and hold one shard each of the layer's states (Rajbhandari et al. 2020).

Stage 1 (Megatron's distributed optimizer, DeepSpeed's ZeRO-1) shards the optimizer's states only: gradients are
reduce-scattered and updated parameters all-gathered once a step, as wide as they are at rest, together the volume of
one all-reduce of such items (section 7.2.1 of arXiv:1910.02054). Where compute is narrower than parameters, our runtime
keeps these in its precision, and the masters of a shard beside its states (unless those are in host memory). Stages 2
and 3 are FSDP2's ``fully_shard``: 2 gathers parameters in the forward of every micro-batch and lets go of them after
its backward; 3 lets go after each use and gathers again for backward (1.5 times the volume). Both reduce-scatter
gradients in the backward of every micro-batch.

Where gradients accumulate whole (``Profile.accumulates``, FSDP's ``no_sync``), all stages scatter them as they form in
the last micro-batch: with a single one they are never all there, with several they are, under any stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from galvatron_lite.arrays import Flag, Real, Whole, never, opposite, where
from galvatron_lite.cluster.cluster import Collective, RankGroup
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
    shared,
    sliced,
)
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.ranks import Either, sharded_items, shared_items
from galvatron_lite.parallelism.strategy import Strategy


@dataclass(frozen=True, slots=True)
class ZeroDimension(Dimension):
    """Devices that each take a share of the samples and share the states of the layer."""

    name: str = "zero"
    degree: str = "zero"

    axes = (MeshAxis("zero", Part.SAMPLES),)
    purposes = (Purpose.GRADIENTS, Purpose.STATES)
    sums = False
    fields = (
        StrategyField("zero_stage", "zero", ("zero_stage",), "ZeRO stage, 0 to 3", least=0, most=3,
                      remedy="ZeRO has stages 0 (off), 1, 2 and 3."),
        StrategyField("zero", "shards", ("fsdp", "zero_degree"), "devices that share states"),
    )  # fmt: skip
    forbids = MappingProxyType({"zero": ("zero",), "fsdp": ("zero",), "dp": ("data", "zero")})
    parts = MappingProxyType({"zero": ("zero", "zero_stage")})
    examples = "zero3x8 (stage 3 over 8), zero3 (over ranks of context or pixels alone)"

    def word(self, strategy: Strategy) -> str:
        """``zero3x8``."""
        used = strategy.zero > 1 or strategy.zero_stage
        return f"zero{strategy.zero_stage}" + f"x{strategy.zero}" * (strategy.zero > 1) if used else ""

    def in_words(self, strategy: Strategy) -> str:
        """See ``Dimension.in_words``."""
        states = {1: "optimizer states", 2: "optimizer states and gradients", 3: "all states"}
        words = f"{states.get(strategy.zero_stage, 'states')} shared by {strategy.state_shards}"
        return words if self.word(strategy) else ""

    def read(self, word: str) -> dict[str, object] | None:
        """See ``word``."""
        match = re.fullmatch(r"zero([123])(?:x([1-9]\d*))?", word, re.ASCII)
        return {"zero": int(match[2] or 1), "zero_stage": int(match[1])} if match else None

    def features(self, strategy: Strategy) -> set[str]:
        """See ``Dimension.features``."""
        if strategy.zero_stage:
            return {f"zero{strategy.zero_stage}"}
        return {"zero"} if strategy.zero > 1 else set()

    def shrunk(self, smaller: Strategy, strategy: Strategy) -> Sequence[dict[str, object]]:
        """See ``Dimension.shrunk``; ranks of context or pixels alone may share states or not."""
        stages = {strategy.zero_stage} if smaller.zero > 1 else {0}
        if smaller.context * smaller.spatial > 1:
            stages.add(strategy.zero_stage)
        return [{"zero_stage": stage} for stage in sorted(stages)]

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Off, or every divisor of ``devices`` in stages 1 to 3 (1: states go over the context or spatial
        ranks alone); nothing to shard in a layer without parameters."""
        degrees = divisors(devices) if kind.parameters.total else ()
        shards: list[dict[str, object]] = [{"zero": d, "zero_stage": stage} for d in degrees for stage in (1, 2, 3)]
        return [{"zero": 1, "zero_stage": 0}, *shards]

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:  # noqa: ARG002
        """A stage needs ranks to shard over: its own or those of context or pixels.

        Sensible: over all ranks that see other tokens, or hybrid (Zhang et al. 2022, MiCS, arXiv:2205.00119): shards
        that with the tensor slices fill exactly one node, replicated over nodes, so that gathers stay in a node and
        as much is saved as that allows.
        """
        if chosen["zero_stage"] == 0:
            return True
        shards = chosen["zero"] * shared(chosen)
        if shards == 1:
            return False
        if room.node is None or chosen["data"] == 1:
            return True
        return bool(room.node == sliced(chosen) * shards)

    def reason(self, kind: LayerKind) -> str:
        """Says so where there is nothing to shard."""
        return "" if kind.parameters.total else f"zero: {kind.name} has no parameters to shard"

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """Fewer samples, a shard of every state, gathers of parameters and reduce-scatters of gradients."""
        sharded = strategy.state_shards > 1
        if never(sharded):
            return work
        once = sharded & (strategy.zero_stage == 1)
        wrapped = sharded & (strategy.zero_stage != 1)
        passing = wrapped & (strategy.zero_stage == 3)
        parts, trained = shared_items(work, strategy), shared_items(work, strategy, trained=True)
        held, updated = (
            sum(items * shard_of(spread.shards.size, context.shard_share) for items, spread in one)
            for one in (parts, trained)
        )
        alone = sum(where(spread.shards.size > 1, 0.0, items) for items, spread in trained)
        spread_out, trains = sharded_items(work, strategy), sharded_items(work, strategy, trained=True)
        narrow = strategy.keeps_masters & context.masters
        masters = sum(
            where(spread.shards.size > 1, items * shard_of(spread.shards.size, context.shard_share), 0.0)
            for items, spread in trained
        )
        stages = (once, wrapped, passing * kind.returns)  # what has no backward is not gathered for it
        updated_bytes = where(narrow, context.gather_item_bytes, context.parameter_item_bytes)
        moved = (
            one
            for (items, spread), (mine, _) in zip(parts, trained, strict=True)
            for one in self._moved((items, mine), spread.shards, stages, updated_bytes, context)
        )
        host, scattered = context.host, sharded if context.accumulates else wrapped
        return replace(
            work.sending(*moved),
            samples=work.samples / strategy.zero,
            state_items=where(sharded, updated, work.state_items),
            parameter_items=where(wrapped, held, work.parameter_items),
            gradient_items=where(scattered, updated, work.gradient_items),
            gathered_items=where(wrapped & opposite(passing), spread_out, work.gathered_items),
            transient_items=where(passing, spread_out, work.transient_items),
            reduce_items=where(scattered, trains, work.reduce_items),
            narrow_items=where(narrow, trains, 0.0),
            master_items=where(narrow, masters, 0.0),
            gradients_persist=work.gradients_persist & opposite(scattered),
            lasting_gradient_items=where(wrapped, alone, 0.0),
            step_overhead=work.step_overhead + where(once, host.get("data", 0.0), 0.0),
            microbatch_overhead=work.microbatch_overhead + where(wrapped, host.get(self.name, 0.0), 0.0),
        )

    def _moved(
        self,
        items: tuple[Real, Real],
        group: RankGroup,
        stages: tuple[Flag, Flag, Flag],
        updated_bytes: Whole,
        context: DimensionContext,
    ) -> Iterator[Communication]:
        """Gathers of parameters and the reduce-scatter of gradients, for ZeRO-1, for ZeRO-2 or 3, for ZeRO-3.

        ``items``: all, and those that get a gradient; ``updated_bytes``: of one that ZeRO-1 gathers.
        """
        several, trains = group.size > 1, items[1] > 0
        updated, gathered = items[1] * updated_bytes, items[0] * context.gather_item_bytes
        reduced = items[1] * context.reduce_item_bytes
        once, wrapped, passing = ((several & stage) * 1 for stage in stages)
        once, scattered = once * trains, wrapped * trains
        uses = ((Moment.STEP, updated, once), (Moment.FORWARD, gathered, wrapped), (Moment.BACKWARD, gathered, passing))
        for moment, size, count in uses:
            yield Communication(Collective.ALL_GATHER, size, group, moment, True, count, self.name)
        last, each = (once + scattered, 0) if context.accumulates else (once, scattered)
        for moment, count in ((Moment.STEP, last), (Moment.BACKWARD, each)):
            yield Communication(Collective.REDUCE_SCATTER, reduced, group, moment, True, count, self.name)


def shard_of(ranks: Whole, more: float) -> Real:
    """Share of the states that each of so many ranks holds; ``more``: by which a shard is larger than an even one."""
    return where(ranks > 1, 1 / ranks + more, 1.0)


def sent_bucket(strategy: Either, size: Whole) -> Real:
    """Bytes of the copy of a bucket of gradients that stage 1 scatters beside backward, and of the shard received."""
    once = (strategy.zero_stage == 1) & (strategy.state_shards > 1)
    return where(once, size * (1 + 1 / strategy.state_shards), 0.0)


def cut_dim(shape: Sequence[int], ranks: int, zero_stage: int) -> int:
    """Along which dim ranks share a parameter: the first; where that has less than a row for each rank (few stacked
    experts), the next that divides evenly.

    Args:
        shape: of the parameter.
        ranks: that share it.
        zero_stage: 1: what a rank updates has to lie together in memory; FSDP2 (2 and 3) copies what does not.
    """
    if not shape or shape[0] >= ranks:
        return 0
    for dim in range(1, len(shape)):
        if zero_stage == 1 and prod(shape[:dim]) > 1:
            break
        if shape[dim] and shape[dim] % ranks == 0:
            return dim
    return 0
