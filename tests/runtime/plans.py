"""Plans written by hand, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage


def make_plan(
    names: Sequence[Sequence[str]],
    strategies: Sequence[Sequence[Strategy]],
    global_batch: int,
    microbatches: int = 1,
    precision: str = "fp32",
) -> Plan:
    """A plan with one run a layer: names and strategies by stage."""
    stages = tuple(
        Stage(tuple(LayerRun(name, name, 1, strategy) for name, strategy in zip(stage, chosen, strict=True)))
        for stage, chosen in zip(names, strategies, strict=True)
    )
    devices = len(stages) * strategies[0][0].devices
    return Plan(PLAN_VERSION, "test", devices, global_batch, microbatches, Schedule.ONE_F_ONE_B, precision, stages)
