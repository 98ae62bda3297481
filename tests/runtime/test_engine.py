"""Training under plans on two processes equals one process: loss, every gradient, parameters after three steps."""

from __future__ import annotations

import pytest

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from tests.pool import WorkerPool
from tests.runtime.training import Case, assert_same, train, train_alone
from tests.together import Together

DATA, TENSOR, SEQUENCE = Strategy(data=2), Strategy(tensor=2), Strategy(tensor=2, sequence_parallel=True)
ZERO2, ZERO3 = Strategy(zero=2, zero_stage=2), Strategy(zero=2, zero_stage=3)
FULL, SELECTIVE = Strategy(data=2, recompute=Recompute.FULL), Strategy(data=2, recompute=Recompute.SELECTIVE)
MIXED = {
    "all": [DATA, DATA, TENSOR, ZERO3, DATA],
    "sequence": [TENSOR, SEQUENCE, SEQUENCE, SEQUENCE, TENSOR],
    "sequence-data": [DATA, SEQUENCE, DATA, SEQUENCE, DATA],
    "zero-tensor": [ZERO3, TENSOR, ZERO2, SEQUENCE, ZERO3],
    "edges-tensor": [TENSOR, ZERO3, FULL, DATA, TENSOR],
}


HYBRID = Strategy(data=2, zero=2, zero_stage=2)
FOUR = [
    HYBRID, Strategy(tensor=4, sequence_parallel=True), Strategy(data=2, tensor=2, sequence_parallel=True),
    Strategy(zero=2, zero_stage=3, tensor=2, sequence_parallel=True), HYBRID,
]  # fmt: skip
EDGES = {"data-tensor": (DATA, TENSOR), "tensor-data": (TENSOR, DATA), "zero3-tensor": (ZERO3, TENSOR)}
CASES = {
    **{name: Case(strategies) for name, strategies in MIXED.items()},
    "four": Case(FOUR, microbatches=2, max_grad_norm=0.05),
    **{
        f"edges-{name}": Case([a, DATA, SEQUENCE, DATA, b], "llama-tiny", microbatches=2, max_grad_norm=0.05)
        for name, (a, b) in EDGES.items()
    },
    "one process": Case([Strategy()] * 5, microbatches=2),
    "pipeline, clipped": Case([DATA, ZERO3, SEQUENCE, DATA, DATA], microbatches=2, cuts=[2], max_grad_norm=0.05),
}


@pytest.fixture(scope="module")
def trained(pool: WorkerPool) -> Together:
    """What every rank found under each plan."""
    return Together(pool, train, CASES, lambda case: case.world)


@pytest.mark.parametrize("name", list(CASES))
def test_plans_train_like_one_process(trained: Together, name: str) -> None:
    """A strategy for each layer; clipping over the true norm; edges of one stage that lie unlike (which sampled plans
    never do); a pipeline with tied embeddings.
    """
    wanted = train_alone(CASES[name])
    assert len(trained[name]) == CASES[name].world
    for found in trained[name]:
        assert_same(found, wanted)
