"""ZeRO: devices share the samples, and each holds a shard of the layer's states (Rajbhandari et al. 2020).

Stage 1 (Megatron's distributed optimizer, DeepSpeed's ZeRO-1) shards only the optimizer's states. Once a step it
reduce-scatters gradients and all-gathers updated parameters, in their precision at rest: together the volume of an
all-reduce of them (section 7.2.1 of arXiv:1910.02054). If compute is in 16 bits, our runtime keeps parameters in 16
bits too, and float32 masters of a shard beside its states (unless these are in host memory).

Stages 2 and 3 are FSDP2's ``fully_shard`` and reduce-scatter gradients in the backward of each micro-batch. Stage 2
gathers parameters in the forward of each micro-batch and frees them after its backward. Stage 3 frees them after each
use and gathers them again for backward (1.5 times the volume).

If full gradients accumulate (``Profile.accumulates``, FSDP's ``no_sync``), all stages scatter them in the backward of
the last micro-batch. A step of several micro-batches then holds all full gradients, a step of one micro-batch does not.
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
    sample_degree,
    slice_degree,
)
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.ranks import Either, sharded_items, shared_items
from galvatron_lite.parallelism.strategy import Strategy


@dataclass(frozen=True, slots=True)
class ZeroDimension(Dimension):
    """Devices that each process part of the samples and shard the states of the layer."""

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
        """See ``Dimension.shrunk``; if only context or spatial ranks can shard, both with and without shards."""
        stages = {strategy.zero_stage} if smaller.zero > 1 else {0}
        if smaller.context * smaller.spatial > 1:
            stages.add(strategy.zero_stage)
        return [{"zero_stage": stage} for stage in sorted(stages)]

    def simplified(self, strategy: Strategy) -> Sequence[Strategy]:
        """Those of lower stages; without one, the ranks are replicas."""
        replicas = replace(strategy, data=strategy.data * strategy.zero, zero=1, zero_stage=0)
        return [replace(strategy, zero_stage=stage) if stage else replicas for stage in range(strategy.zero_stage)]

    def fault(self, strategy: Strategy) -> tuple[str, str] | None:
        """A degree without a stage."""
        legal = strategy.zero == 1 or strategy.zero_stage in (1, 2, 3)
        return None if legal else ("zero_stage", "It is 1, 2 or 3 where zero is above 1.")

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Off, or each divisor of ``devices`` in stages 1 to 3 (a degree of 1 shards over context or spatial ranks)."""
        degrees = divisors(devices) if kind.parameters.total or kind.shares else ()
        shards: list[dict[str, object]] = [{"zero": d, "zero_stage": stage} for d in degrees for stage in (1, 2, 3)]
        return [{"zero": 1, "zero_stage": 0}, *shards]

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:  # noqa: ARG002
        """A stage needs several ranks to shard over: zero, context or spatial ranks.

        Sensible: all ranks with other samples, tokens or pixels; or hybrid sharding (Zhang et al. 2022, MiCS,
        arXiv:2205.00119), whose shards and slices fill exactly one node and are replicated over nodes. This is the
        most memory that sharding saves with gathers inside a node.
        """
        if chosen["zero_stage"] == 0:
            return True
        shards = chosen["zero"] * sample_degree(chosen)
        if shards == 1:
            return False
        if room.node is None or chosen["data"] == 1:
            return True
        return bool(room.node == slice_degree(chosen) * shards)

    def reason(self, kind: LayerKind) -> str:
        """A layer without parameters."""
        return "" if kind.parameters.total or kind.shares else f"zero: {kind.name} has no parameters to shard"

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """Fewer samples, a shard of every state, gathers of parameters and reduce-scatters of gradients."""
        sharded = strategy.state_shards > 1
        if never(sharded):
            return work
        stage_1 = sharded & (strategy.zero_stage == 1)
        fsdp = sharded & (strategy.zero_stage != 1)
        stage_3 = fsdp & (strategy.zero_stage == 3)
        parts, trained = shared_items(work, strategy), shared_items(work, strategy, trained=True)
        held, updated = (
            sum(items * shard_of(spread.shards.size, context.shard_share) for items, spread in items_and_spreads)
            for items_and_spreads in (parts, trained)
        )
        unsharded = sum(where(spread.shards.size > 1, 0.0, items) for items, spread in trained)
        gathered, reduced = sharded_items(work, strategy), sharded_items(work, strategy, trained=True)
        narrow = strategy.keeps_masters & context.masters
        masters = sum(
            where(spread.shards.size > 1, items * shard_of(spread.shards.size, context.shard_share), 0.0)
            for items, spread in trained
        )
        gathers = (stage_1, fsdp, stage_3 * kind.returns)  # a layer without backward is not gathered for it
        updated_bytes = where(narrow, context.gather_item_bytes, context.parameter_item_bytes)
        communications = (
            communication
            for (items, spread), (trained_items, _) in zip(parts, trained, strict=True)
            for communication in self._communications(
                (items, trained_items), spread.shards, gathers, updated_bytes, context
            )
        )
        host, scattered = context.host, sharded if context.accumulates else fsdp
        return replace(
            work.with_communications(*communications),
            samples=work.samples / strategy.zero,
            state_items=where(sharded, updated, work.state_items),
            parameter_items=where(fsdp, held, work.parameter_items),
            gradient_items=where(scattered, updated, work.gradient_items),
            gathered_items=where(fsdp & opposite(stage_3), gathered, work.gathered_items),
            transient_items=where(stage_3, gathered, work.transient_items),
            reduce_items=where(scattered, reduced, work.reduce_items),
            narrow_items=where(narrow, reduced, 0.0),
            master_items=where(narrow, masters, 0.0),
            gradients_persist=work.gradients_persist & opposite(scattered),
            lasting_gradient_items=where(fsdp, unsharded, 0.0),
            step_overhead=work.step_overhead + where(stage_1, host.get("data", 0.0), 0.0),
            microbatch_overhead=work.microbatch_overhead + where(fsdp, host.get(self.name, 0.0), 0.0),
        )

    def _communications(
        self,
        items: tuple[Real, Real],
        group: RankGroup,
        gathers: tuple[Flag, Flag, Flag],
        updated_bytes: Whole,
        context: DimensionContext,
    ) -> Iterator[Communication]:
        """All-gathers of parameters and reduce-scatters of gradients.

        Args:
            items: of all parameters, and of those with a gradient.
            group: the ranks that shard them.
            gathers: whether parameters are gathered after the update, for forward, and for backward.
            updated_bytes: of an item that is gathered after the update.
            context: see ``Dimension.apply``.
        """
        several, trains = group.size > 1, items[1] > 0
        updated, gathered = items[1] * updated_bytes, items[0] * context.gather_item_bytes
        reduced = items[1] * context.reduce_item_bytes
        stage_1, fsdp, backward = ((several & gather) * 1 for gather in gathers)
        stage_1, scattered = stage_1 * trains, fsdp * trains
        uses = (
            (Moment.STEP, updated, stage_1),
            (Moment.FORWARD, gathered, fsdp),
            (Moment.BACKWARD, gathered, backward),
        )
        for moment, size, count in uses:
            yield Communication(Collective.ALL_GATHER, size, group, moment, True, count, self.name)
        step, backward = (stage_1 + scattered, 0) if context.accumulates else (stage_1, scattered)
        for moment, count in ((Moment.STEP, step), (Moment.BACKWARD, backward)):
            yield Communication(Collective.REDUCE_SCATTER, reduced, group, moment, True, count, self.name)


def shard_of(ranks: Whole, more: float) -> Real:
    """Return the share of the states that each of ``ranks`` holds; ``more``: excess of a shard over an even one."""
    return where(ranks > 1, 1 / ranks + more, 1.0)


def sent_bucket(strategy: Either, size: Whole) -> Real:
    """Return the bytes that stage 1 holds to scatter a bucket of gradients during backward: a copy and the shard."""
    once = (strategy.zero_stage == 1) & (strategy.state_shards > 1)
    return where(once, size * (1 + 1 / strategy.state_shards), 0.0)


def cut_dim(shape: Sequence[int], ranks: int, zero_stage: int) -> int:
    """Return the dim along which ranks shard a parameter: the first, if it has a row for each rank.

    If not (few stacked experts), it is the next dim that divides evenly.

    Args:
        shape: of the parameter.
        ranks: that shard it.
        zero_stage: under 1 shards must be contiguous in memory; FSDP2 (2 and 3) copies them.
    """
    if not shape or shape[0] >= ranks:
        return 0
    for dim in range(1, len(shape)):
        if zero_stage == 1 and prod(shape[:dim]) > 1:
            break
        if shape[dim] and shape[dim] % ranks == 0:
            return dim
    return 0
