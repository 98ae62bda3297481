"""Experts spread over ranks train like one process: every plan written by hand here has another way to spread them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import slice_batch
from galvatron_lite.model.graph import Recompute, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from tests.equivalence.compare import assert_equal_tensors
from tests.equivalence.families import build_model, make_batches
from tests.equivalence.plans import write_plan
from tests.equivalence.test_plans import case_of, reference_of
from tests.equivalence.training import SAMPLES, Case, Reference, train_families, train_under_plans, whole
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
            plan(case, Strategy(data=2, context=2)),
        ]
    if case.family == "mixtral-padded":
        return [
            plan(case, Strategy(data=4, expert=4)),
            plan(case, Strategy(data=2, tensor=2, sequence_parallel=True), edge=Strategy(data=4)),
            plan(case, Strategy(zero=2, zero_stage=3, tensor=2, expert=2), edge=Strategy(tensor=4)),
            plan(case, Strategy(data=2, tensor=2), edge=Strategy(data=4)),
            plan(case, Strategy(context=2, tensor=2, sequence_parallel=True)),
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
        plan(case, Strategy(data=2, tensor=2, sequence_parallel=True, expert=2, recompute=Recompute.SELECTIVE)),
        plan(case, Strategy(zero=2, zero_stage=3, tensor=2, sequence_parallel=True, expert=4, expert_tensor=1)),
    ]


def balanced_in_parts(case: Case, plans: Sequence[Plan], alone: Sequence[dict[str, Tensor]]) -> list[str]:
    """What is wrong with gradients that micro-batches add up, and what refuses stages; run on every rank."""
    found = []
    for one, expected in zip(plans, alone, strict=True):
        parallel = case.parallel(one)
        parallel.backward_step(make_batches(case.family, SAMPLES, 1)[0])
        own = whole(parallel, case.first_names, lambda owned: owned.gradient)
        try:
            assert_equal_tensors(own, {name: expected[name] for name in own}, case.relative)
        except AssertionError as error:
            found.append(f"{one.microbatches}: {error}")
    compiled = case.parallel(plans[0], compile="eager")
    refusals = (
        lambda: case.parallel(plan(case, Strategy(), cut=3)),
        lambda: compiled.backward_step(make_batches(case.family, SAMPLES, 1)[0]),
    )
    for refused in refusals:
        with pytest.raises(InputError, match="output_router_logits"):
            refused()
    return found


def test_a_loss_that_balances_experts_is_that_of_each_micro_batch(pool: WorkerPool) -> None:
    """As of one process that adds up the gradients of the same parts of the batch."""
    case = case_of("mixtral-padded")
    plans = [plan(case, Strategy(data=2, expert=2), microbatches=parts) for parts in (2, 4)]
    (batch,), alone = make_batches(case.family, SAMPLES, 1), []
    for one in plans:
        model = build_model(case.family)
        for start in range(0, SAMPLES, SAMPLES // one.microbatches):
            part = slice_batch(batch, start, start + SAMPLES // one.microbatches)
            (model(**part).loss / one.microbatches).backward()
        alone.append({name: parameter.grad for name, parameter in model.named_parameters()})
    work = {"case": case, "plans": plans, "alone": alone}
    assert pool.run(2, balanced_in_parts, timeout=300.0, **work) == [[], []]


def precisions(case: Case, plans: Sequence[Plan]) -> list[set[tuple[torch.dtype, torch.dtype]]]:
    """Of rows and weights that experts multiply under each of these plans; run on every rank."""
    found: list[set[tuple[torch.dtype, torch.dtype]]] = []
    original = functional.grouped_mm

    def grouped(rows: Tensor, weight: Tensor, **options: Any) -> Tensor:
        found[-1].add((rows.dtype, weight.dtype))
        return original(rows, weight, **options)

    with patch.object(functional, "grouped_mm", grouped):
        for one in plans:
            found.append(set())
            case.parallel(one).backward_step(make_batches(case.family, SAMPLES, 1)[0])
    return found


def test_experts_compute_in_bf16_however_they_are_split(pool: WorkerPool) -> None:
    case = case_of("mixtral")
    blocks = (
        Strategy(data=4),
        Strategy(data=4, expert=4),
        Strategy(data=2, zero=2, zero_stage=1, expert=2, recompute=Recompute.FULL),
        Strategy(zero=4, zero_stage=3, expert=2),
        Strategy(data=2, tensor=2, expert=2),
    )
    plans = [replace(plan(case, block, microbatches=2), precision="bf16") for block in blocks]
    for rank in pool.run(4, precisions, timeout=300.0, case=case, plans=plans):
        assert rank == [{(torch.bfloat16, torch.bfloat16)}] * len(plans)


@pytest.mark.parametrize("family", ["mixtral", "mixtral-balanced", "mixtral-padded", "qwen2-moe"])
def test_spread_experts_train_like_one_process(pool: WorkerPool, family: str) -> None:
    case = case_of(family)
    work = [(case, written(case), reference_of(family))]
    assert [wrong for rank in pool.run(4, train_families, timeout=300.0, work=work) for wrong in rank] == []


def test_few_experts_are_shared_by_more_ranks(pool: WorkerPool) -> None:
    """Where a rank has fewer experts than there are ranks that share them, each expert is shared."""
    case = case_of("mixtral")
    blocks = [Strategy(zero=8, zero_stage=stage, expert=ways) for stage, ways in ((1, 4), (2, 1))]
    blocks.append(Strategy(data=2, zero=4, zero_stage=3, expert=2))
    plans = [plan(case, block, edge=Strategy(data=8)) for block in blocks]
    shared = [one for one in plans if one.stages[0].runs[1].strategy.expert == 4]
    work: dict[str, Any] = {"case": case, "plans": plans, "reference": reference_of("mixtral"), "shared": shared}
    ranks = pool.run(8, trained_and_updated, timeout=300.0, **work)
    assert [wrong for found, _ in ranks for wrong in found] == []
    for figures in zip(*(updated for _, updated in ranks), strict=True):
        assert len(set(figures)) == 1, "every rank updates as many of the experts' items"


def trained_and_updated(
    case: Case, plans: Sequence[Plan], reference: Reference, shared: Sequence[Plan]
) -> tuple[list[str], list[int]]:
    return train_under_plans(case, plans, reference), updated_of_experts(case, shared)


def updated_of_experts(case: Case, plans: Sequence[Plan]) -> list[int]:
    """How many items of experts' parameters this rank updates under each plan; run on every rank."""
    found = []
    for one in plans:
        owned = [each for runtime in case.parallel(one).runtimes for each in runtime.owned]
        experts = [each for each in owned if ".experts." in each.names[0]]
        assert experts
        found.append(sum(local_of(each.updated).numel() for each in experts))
    return found


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
