"""Training under plans on two processes equals one process: loss, every gradient, parameters after three steps."""

from __future__ import annotations

import pytest

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.base import Strategy
from tests.pool import WorkerPool
from tests.runtime.training import Case, assert_same, train, train_alone

DATA, TENSOR, SEQUENCE = Strategy(data=2), Strategy(tensor=2), Strategy(tensor=2, sequence_parallel=True)
ZERO2, ZERO3 = Strategy(zero=2, zero_stage=2), Strategy(zero=2, zero_stage=3)
FULL, SELECTIVE = Strategy(data=2, recompute=Recompute.FULL), Strategy(data=2, recompute=Recompute.SELECTIVE)
ZERO_FULL = Strategy(zero=2, zero_stage=3, recompute=Recompute.FULL)
UNIFORM = {
    "data": DATA, "zero2": ZERO2, "zero3": ZERO3, "tensor": TENSOR, "full": FULL, "selective": SELECTIVE,
    "zero3-full": ZERO_FULL,
}  # fmt: skip
MIXED = {
    "all": [DATA, DATA, TENSOR, ZERO3, DATA],
    "sequence": [TENSOR, SEQUENCE, SEQUENCE, SEQUENCE, TENSOR],
    "sequence-data": [DATA, SEQUENCE, DATA, SEQUENCE, DATA],
    "zero-tensor": [ZERO3, TENSOR, ZERO2, SEQUENCE, ZERO3],
    "edges-tensor": [TENSOR, ZERO3, FULL, DATA, TENSOR],
}


@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", list(UNIFORM))
def test_uniform_plans(pool: WorkerPool, name: str, microbatches: int, model: str) -> None:
    case = Case([UNIFORM[name]] * 5, model, microbatches)
    wanted = train_alone(case)
    for found in pool.run(2, train, case=case):
        assert_same(found, wanted)


@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", list(MIXED))
def test_a_strategy_for_each_layer(pool: WorkerPool, name: str, microbatches: int, model: str) -> None:
    case = Case(MIXED[name], model, microbatches)
    wanted = train_alone(case)
    for found in pool.run(2, train, case=case):
        assert_same(found, wanted)


def test_one_process(pool: WorkerPool) -> None:
    case = Case([Strategy()] * 5, microbatches=2)
    assert_same(pool.run(1, train, case=case)[0], train_alone(case))


@pytest.mark.parametrize(
    "strategies", [[DATA] * 5, [ZERO3] * 5, [SEQUENCE if i in (1, 2, 3) else TENSOR for i in range(5)]]
)
def test_clipping_over_the_true_norm(pool: WorkerPool, strategies: list[Strategy]) -> None:
    case = Case(strategies, max_grad_norm=0.05)
    wanted = train_alone(case)
    for found in pool.run(2, train, case=case):
        assert_same(found, wanted)


HYBRID = Strategy(data=2, zero=2, zero_stage=2)
FOUR = {
    "hybrid": [HYBRID] * 5,
    "zero3-tensor": [Strategy(zero=2, zero_stage=3, tensor=2)] * 5,
    "mixed": [
        HYBRID, Strategy(tensor=4, sequence_parallel=True), Strategy(data=2, tensor=2, sequence_parallel=True),
        Strategy(zero=2, zero_stage=3, tensor=2, sequence_parallel=True), HYBRID,
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", list(FOUR))
def test_four_processes(pool: WorkerPool, name: str) -> None:
    case = Case(FOUR[name], microbatches=2, max_grad_norm=0.05)
    wanted = train_alone(case)
    for found in pool.run(4, train, case=case):
        assert_same(found, wanted)


@pytest.mark.parametrize(
    "edges", [(DATA, TENSOR), (TENSOR, DATA), (ZERO3, TENSOR)], ids=["data-tensor", "tensor-data", "zero3-tensor"]
)
def test_edges_of_one_stage_may_lie_unlike(pool: WorkerPool, edges: tuple[Strategy, Strategy]) -> None:
    case = Case([edges[0], DATA, SEQUENCE, DATA, edges[1]], "llama-tiny", microbatches=2, max_grad_norm=0.05)
    wanted = train_alone(case)
    for found in pool.run(2, train, case=case):
        assert_same(found, wanted)


def test_pipeline_with_clipping_and_tied_embeddings(pool: WorkerPool) -> None:
    case = Case([DATA, ZERO3, SEQUENCE, DATA, DATA], microbatches=2, cuts=[2], max_grad_norm=0.05)
    wanted = train_alone(case)
    for found in pool.run(4, train, case=case):
        assert_same(found, wanted)
