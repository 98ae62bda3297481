"""Models with frozen parameters and adapters train as in one process however they are split."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from galvatron_lite.model.graph import Layer, Recompute, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from tests.equivalence.plans import write_plan
from tests.equivalence.training import SAMPLES, make_case, train_alone, train_under_plans
from tests.pool import WorkerPool

BLOCKS = {
    2: (
        Strategy(zero=2, zero_stage=3), Strategy(zero=2, zero_stage=1, recompute=Recompute.FULL),
        Strategy(tensor=2), Strategy(tensor=2, recompute=Recompute.SELECTIVE),
    ),
    4: (Strategy(data=2, zero=2, zero_stage=2), Strategy(zero=2, zero_stage=3, tensor=2)),
}  # fmt: skip


def plans(layers: tuple[Layer, ...], world: int) -> Iterator[Plan]:
    """One stage under every strategy, and two stages, of devices under ZeRO 3 where there are four."""
    names = [layer.name for layer in layers]
    for block in BLOCKS[world]:
        edge = Strategy(block.data, block.zero, block.zero_stage, block.tensor)
        strategies = {layer.name: block if layer.role is Role.BLOCK else edge for layer in layers}
        yield write_plan([names], strategies, devices=world, batch=SAMPLES, microbatches=2)
    half = Strategy(zero=world // 2, zero_stage=3) if world > 2 else Strategy()
    for schedule in (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE_1P):
        yield write_plan(
            [names[:3], names[3:]], dict.fromkeys(names, half), devices=world, batch=SAMPLES, microbatches=4,
            schedule=schedule,
        )  # fmt: skip


@pytest.mark.parametrize(("family", "world"), [("llama-adapters", 2), ("llama-adapters", 4), ("mixtral-adapters", 2)])
def test_adapters_train_as_in_one_process(pool: WorkerPool, family: str, world: int) -> None:
    case, reference = make_case(family), train_alone(family)
    frozen = reference.parameters.keys() - reference.gradients.keys()
    assert len(frozen) > len(reference.gradients) > 0
    wrong = pool.run(world, train_under_plans, case=case, plans=list(plans(case.layers, world)), reference=reference)
    assert wrong == [[]] * world
