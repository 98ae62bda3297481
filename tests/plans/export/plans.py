"""Plans of a small language model, by what they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage, TrainedBy

BLOCKS, BATCH, COUNT = 8, 64, 4


def plan(
    strategy: Strategy, sizes: Sequence[int] = (BLOCKS,), schedule: Schedule = Schedule.ONE_F_ONE_B, virtual: int = 1
) -> Plan:
    """One strategy for all layers, in stages of so many blocks; edges recompute nothing."""
    edge, stages, place = replace(strategy, recompute=Recompute.NONE), [], 0
    for number, size in enumerate(sizes):
        runs = [LayerRun("before", "before", 1, edge)] if number == 0 else []
        runs.append(LayerRun(f"layers.{place}", f"layers.{place + size - 1}", size, strategy))
        runs += [LayerRun("after", "after", 1, edge)] if number == len(sizes) - 1 else []
        stages.append(Stage(tuple(runs)))
        place += size
    devices = strategy.devices * len(sizes) // virtual
    return Plan(
        PLAN_VERSION, "llama-small", devices, BATCH, COUNT, schedule, "bf16", tuple(stages), virtual_stages=virtual
    )


def mixed() -> Plan:
    """Full recomputation and ZeRO-3 in some blocks, ZeRO-2 in others."""
    first = plan(Strategy(zero=4, zero_stage=3, recompute=Recompute.FULL))
    before, blocks, after = first.stages[0].runs
    some = replace(blocks, last="layers.4", count=5)
    rest = LayerRun("layers.5", "layers.7", 3, Strategy(zero=4, zero_stage=2))
    return replace(first, stages=(Stage((before, some, rest, after)),))


PLANS = {
    "data": plan(Strategy(data=4)),
    "zero1": plan(Strategy(zero=4, zero_stage=1)),
    "zero2": plan(Strategy(zero=4, zero_stage=2)),
    "zero3": plan(Strategy(zero=4, zero_stage=3, recompute=Recompute.FULL)),
    "hybrid": plan(Strategy(data=2, zero=2, zero_stage=3)),
    "offload": plan(Strategy(zero=4, zero_stage=2, offload=Offload.STATES)),
    "deepspeed": replace(plan(Strategy(zero=4, zero_stage=3)), backend=TrainedBy.DEEPSPEED),
    "tensor": plan(Strategy(zero=2, zero_stage=1, tensor=2, sequence_parallel=True)),
    "context": plan(Strategy(zero=2, zero_stage=3, context=2, tensor=2, sequence_parallel=True)),
    "ulysses": plan(Strategy(zero=2, zero_stage=2, context=2, ulysses=True)),
    "pipeline": plan(Strategy(zero=2, zero_stage=1, recompute=Recompute.SELECTIVE), (4, 4)),
    "uneven": plan(Strategy(data=2, tensor=2), (3, 5)),
    "odd": plan(Strategy(data=2), (2, 1, 3, 2)),
    "gpipe": plan(Strategy(data=2), (4, 4), Schedule.GPIPE),
    "interleaved": plan(Strategy(data=2), (2, 2, 2, 2), Schedule.INTERLEAVED, virtual=2),
    "zero-bubble": plan(Strategy(data=2), (4, 4), Schedule.ZERO_BUBBLE_1P),
    "spatial": plan(Strategy(data=2, height=2)),
    "expert": plan(Strategy(zero=4, zero_stage=1, expert=4)),
    "mixed": mixed(),
}
