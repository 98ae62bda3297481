"""Schedules with several stages a rank, or backward in two passes, train like one process, pass by pass as their table
says; outputs come through a pipeline as from the model itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import call_model, tensors_of
from galvatron_lite.model.graph import Recompute, Role
from galvatron_lite.parallelism.pipeline.runner import PipelineRunner
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass
from galvatron_lite.parallelism.pipeline.table import actions_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import check_runs, pipeline_of
from galvatron_lite.plans.schema import Plan, Schedule
from tests.equivalence.families import build_model, make_batches
from tests.equivalence.plans import write_plan
from tests.equivalence.training import SAMPLES, Case, Reference, make_case, train_alone, train_under_plans
from tests.pool import WorkerPool
from tests.schedules import ZERO_BUBBLE

PLAIN, RECOMPUTE, SELECTIVE = Strategy(), Strategy(recompute=Recompute.FULL), Strategy(recompute=Recompute.SELECTIVE)
Row = tuple[Schedule, int, Sequence[int], int, Strategy]
"""Schedule, stages of each group, their layers (the last has what is left), micro-batches, strategy of the blocks."""
TWO: tuple[Row, ...] = (
    (Schedule.INTERLEAVED, 2, (2, 1, 1), 4, PLAIN),
    (Schedule.INTERLEAVED, 3, (1, 1, 1, 1, 1), 8, SELECTIVE),
    (Schedule.ZERO_BUBBLE_1P, 1, (3,), 8, PLAIN),
    (Schedule.ZERO_BUBBLE_2P, 1, (2,), 8, RECOMPUTE),
    (Schedule.ZERO_BUBBLE_V, 2, (1, 2, 1), 4, SELECTIVE),
)
FOUR: tuple[Row, ...] = (
    (Schedule.INTERLEAVED, 2, (2, 1, 1), 4, Strategy(zero=2, zero_stage=3)),
    (Schedule.ZERO_BUBBLE_V, 2, (1, 2, 1), 4, Strategy(tensor=2)),
    (Schedule.ZERO_BUBBLE_2P, 1, (3,), 4, Strategy(data=2)),
)
TIED: tuple[Row, ...] = ((Schedule.ZERO_BUBBLE_V, 2, (1, 2, 2), 2, Strategy(context=2)),)
"""The embedding's weight is the head's, on the same ranks."""


def plan_of(case: Case, row: Row, world: int) -> Plan:
    schedule, virtual, sizes, count, block = row
    names, start, stages = [layer.name for layer in case.layers], 0, []
    for size in (*sizes, len(case.layers) - sum(sizes)):
        stages.append(names[start : start + size])
        start += size
    edge = replace(block, recompute=Recompute.NONE)
    chosen = {layer.name: block if layer.role is Role.BLOCK else edge for layer in case.layers}
    made = {"devices": world, "batch": SAMPLES, "microbatches": count, "virtual": virtual}
    return write_plan(stages, chosen, schedule=schedule, **made)


def trained(work: Sequence[tuple[Case, Sequence[Plan], Reference]]) -> list[str]:
    """What goes wrong: in training, in the order of passes, in what is held meanwhile, in outputs."""
    wrong = []
    for case, plans, reference in work:
        wrong += train_under_plans(case, plans, reference)
        for plan in plans:
            found = (*observed(case, plan), *outputs_differ(case, plan))
            wrong += [f"{case.family} {plan.schedule}: {one}" for one in found]
    return wrong


def observed(case: Case, plan: Plan) -> list[str]:
    """One step's passes, and the most micro-batches between them, against the table; whether backward leaves products
    of weights to passes of their own."""
    seen: list[Action] = []
    most, left = [0, 0], 0

    def noting(name: str) -> Any:
        run = getattr(PipelineRunner, name)

        def noted(self: PipelineRunner, action: Action, following: Action | None) -> None:
            nonlocal left
            run(self, action, following)
            seen.append(action)
            left += len(self._later.get((action.chunk, action.microbatch), ()))
            most[:] = max(most[0], len(self._in_flight)), max(most[1], len(self._later))

        return patch.object(PipelineRunner, name, noted)

    parallel = case.parallel(plan)
    (batch,) = make_batches(case.family, SAMPLES, 1)
    with noting("_forward"), noting("_backward"), noting("_weight"):
        parallel.backward_step(batch)
    group = dist.get_rank() // plan.stage_devices
    table = actions_of(pipeline_of(plan).course(plan.microbatches), plan.order)[group]
    counts = dict.fromkeys(Pass, 0)
    held = [0, 0]
    for action in table:
        counts[action.what] += 1
        splits = plan.schedule in ZERO_BUBBLE
        pending = counts[Pass.BACKWARD] - counts[Pass.WEIGHT] if splits else 0
        held = [max(held[0], counts[Pass.FORWARD] - counts[Pass.BACKWARD]), max(held[1], pending)]
    wrong = [] if tuple(seen) == table else [f"passes {seen} instead of {table}"]
    wrong += ["no product waits for a pass of weights"] if plan.schedule in ZERO_BUBBLE and not left else []
    return wrong if most == held else [*wrong, f"holds {most} micro-batches, not {held}"]


def outputs_differ(case: Case, plan: Plan) -> list[str]:
    (batch,) = make_batches(case.family, SAMPLES, 1)
    alone = build_model(case.family).eval()
    parallel = case.parallel(plan).eval()
    with torch.no_grad():
        expected = list(tensors_of(call_model(alone, batch)))
    found = list(tensors_of(parallel.outputs(batch)))
    pairs = zip(found, expected, strict=False)
    return [
        f"output {number} differs"
        for number, (one, other) in enumerate(pairs)
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    ] + (["no outputs"] if not found else [])


@pytest.mark.parametrize(
    ("world", "family", "rows"),
    [(2, "gpt2", TWO), (4, "plain", FOUR), (4, "zoo-gpt", TIED)],
)
def test_schedules_train_like_one_process(pool: WorkerPool, world: int, family: str, rows: Sequence[Row]) -> None:
    case = make_case(family)
    work = [(case, [plan_of(case, row, world) for row in rows], train_alone(family))]
    assert [wrong for rank in pool.run(world, trained, timeout=250.0, work=work) for wrong in rank] == []


def test_zero_bubble_plans_with_sharded_states_are_refused() -> None:
    case = make_case("plain")
    for row in ((Schedule.ZERO_BUBBLE_1P, 1, (3,), 4, Strategy(zero=2, zero_stage=2)),):
        with pytest.raises(InputError, match="Under zb-1p galvatron needs zero 1"):
            check_runs(plan_of(case, row, 4))
    check_runs(plan_of(case, TWO[0], 2))
