"""Experts spread over ranks train like one process: every plan written by hand here has another way to spread them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from galvatron_lite.model.graph import Recompute, Role
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.plans.schema import Plan
from tests.equivalence.plans import write_plan
from tests.equivalence.test_plans import case_of, reference_of
from tests.equivalence.training import SAMPLES, Case, train_families
from tests.pool import WorkerPool


def plan(
    case: Case, block: Strategy, cut: int | None = None, microbatches: int = 1, edge: Strategy | None = None
) -> Plan:
    """All blocks alike, the layers around them with samples and matmuls shared alike; two stages where it is cut."""
    edge = edge or Strategy(data=block.batch_degree, tensor=block.tensor, context=block.context)
    strategies = {layer.name: block if layer.role is Role.BLOCK else edge for layer in case.layers}
    names = list(strategies)
    stages = [names] if cut is None else [names[:cut], names[cut:]]
    devices = block.devices * len(stages)
    return write_plan(stages, strategies, devices=devices, batch=SAMPLES, microbatches=microbatches)


def written(case: Case) -> Sequence[Plan]:
    if case.family == "mixtral-balanced":
        return [
            plan(case, Strategy(data=4, expert=4)),
            plan(case, Strategy(data=2, tensor=2, sequence_parallel=True), edge=Strategy(data=4)),
            plan(case, Strategy(data=4, expert=2), edge=Strategy(data=2, tensor=2)),
        ]
    if case.family != "mixtral":
        return [plan(case, Strategy(zero=4, zero_stage=3, expert=4)), plan(case, Strategy(data=2, tensor=2, expert=2))]
    return [
        plan(case, Strategy(data=4, expert=4, recompute=Recompute.SELECTIVE)),
        plan(case, Strategy(zero=4, zero_stage=3, expert=2), microbatches=2),
        plan(case, Strategy(data=2, zero=2, zero_stage=1, expert=2)),
        plan(case, Strategy(data=2, context=2, expert=4)),
        plan(case, Strategy(data=2, zero=2, zero_stage=2, expert=2, recompute=Recompute.FULL)),
        plan(case, Strategy(data=2, expert=2), cut=3, microbatches=2),
        plan(case, Strategy(data=2, tensor=2, expert=2)),
        plan(case, Strategy(data=2, tensor=2, sequence_parallel=True, expert=2)),
        plan(case, Strategy(zero=2, zero_stage=3, tensor=2, sequence_parallel=True, expert=4, expert_tensor=1)),
    ]


@pytest.mark.parametrize("family", ["mixtral", "mixtral-balanced", "qwen2-moe"])
def test_spread_experts_train_like_one_process(pool: WorkerPool, family: str) -> None:
    case = case_of(family)
    work = [(case, written(case), reference_of(family))]
    assert [wrong for rank in pool.run(4, train_families, timeout=300.0, work=work) for wrong in rank] == []
