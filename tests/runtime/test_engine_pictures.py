"""Training networks over pictures whose pixels ranks share equals one process, to float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.base import Strategy
from tests.pool import WorkerPool
from tests.runtime.pictures import Pictures, make_parallel_net, make_pictures, train_net, train_net_alone
from tests.runtime.training import assert_same

TOLERANCE = 1e-10
WHOLE, DATA, ZERO3 = Strategy(filters=2), Strategy(data=2), Strategy(zero=2, zero_stage=3)
ROWS, COLUMNS = Strategy(height=2), Strategy(width=2)
SHARED = Strategy(height=2, zero_stage=3)
FULL, SELECTIVE = Strategy(height=2, recompute=Recompute.FULL), Strategy(width=2, recompute=Recompute.SELECTIVE)

TWO = {
    "rows": [ROWS] * 5,
    "columns": [COLUMNS] * 5,
    "data": [DATA] * 5,
    "rows, states shared": [SHARED] * 5,
    "recompute": [ROWS, FULL, SELECTIVE, FULL, ROWS],
    "columns in data": [DATA, COLUMNS, DATA, ROWS, DATA],
    "data in rows": [ROWS, DATA, COLUMNS, ZERO3, ROWS],
    "unlike edges": [ROWS, COLUMNS, SHARED, DATA, DATA],
    "unlike edges, data first": [ZERO3, COLUMNS, SHARED, DATA, ROWS],
}


FILTERS, CHANNELS = Strategy(filters=2), Strategy(channels=2)
CHANNELED = {
    "filters": [FILTERS] * 5,
    "channels": [DATA, CHANNELS, CHANNELS, CHANNELS, DATA],
    "filters and rows": [ROWS, FILTERS, replace(FILTERS, recompute=Recompute.FULL), DATA, ROWS],
    "channels and rows": [ROWS, CHANNELS, COLUMNS, replace(CHANNELS, recompute=Recompute.FULL), ROWS],
}


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("name", list(CHANNELED))
def test_shared_channels(pool: WorkerPool, name: str, norm: str) -> None:
    case = Pictures(CHANNELED[name], norm=norm, max_grad_norm=0.05)
    if norm == "batch":
        case = replace(case, strategies=[ROWS if one.data > 1 else one for one in case.strategies])
    wanted = train_net_alone(case)
    for found in pool.run(2, train_net, case=case):
        assert_same(found, wanted, TOLERANCE)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", list(TWO))
def test_two_processes(pool: WorkerPool, name: str, dense: bool) -> None:
    case = Pictures(TWO[name], dense=dense)
    wanted = train_net_alone(case)
    for found in pool.run(2, train_net, case=case):
        assert_same(found, wanted, TOLERANCE)


FOUR_SHARED = Strategy(data=2, height=2, zero_stage=2)
FOUR = {
    "grid": [Strategy(height=2, width=2)] * 5,
    "data and rows": [Strategy(data=2, height=2)] * 5,
    "states shared": [Strategy(zero=2, zero_stage=3, width=2)] * 5,
    "channels": [
        Strategy(data=2, filters=2), Strategy(data=2, filters=2), Strategy(zero=2, zero_stage=3, channels=2),
        Strategy(channels=4), Strategy(data=2, height=2),
    ],
    "mixed": [
        Strategy(data=2, width=2), Strategy(height=4), FOUR_SHARED,
        Strategy(zero=4, zero_stage=3, recompute=Recompute.FULL), Strategy(data=4),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", list(FOUR))
def test_four_processes(pool: WorkerPool, name: str) -> None:
    case = Pictures(FOUR[name], dense=name == "grid", max_grad_norm=0.05)
    wanted = train_net_alone(case)
    for found in pool.run(4, train_net, case=case):
        assert_same(found, wanted, TOLERANCE)


STAGES = {
    "rows": ([ROWS, FULL, COLUMNS, COLUMNS, COLUMNS], [3]),
    "a stage of edges": ([ROWS, ROWS, SHARED, DATA, COLUMNS], [1, 4]),
    "unlike wires": ([ROWS, DATA, COLUMNS, ROWS, DATA], [3]),
}


@pytest.mark.parametrize("name", list(STAGES))
def test_stages_of_shared_pictures(pool: WorkerPool, name: str) -> None:
    strategies, cuts = STAGES[name]
    case = Pictures(strategies, chain=True, microbatches=2, cuts=cuts, max_grad_norm=0.05)
    wanted = train_net_alone(case)
    for found in pool.run(2 * len(cuts) + 2, train_net, case=case):
        assert_same(found, wanted, TOLERANCE)


@pytest.mark.parametrize("dense", [False, True])
def test_skip_connections_travel_between_stages(pool: WorkerPool, dense: bool) -> None:
    case = Pictures([ROWS, FILTERS, COLUMNS, DATA, SHARED], dense=dense, microbatches=2, cuts=[1, 3])
    wanted = train_net_alone(case)
    for found in pool.run(6, train_net, case=case):
        assert_same(found, wanted, TOLERANCE)


def by_hand(case: Pictures) -> tuple[list[float], list[float]]:
    """The user's own loop: forward, backward, clip, step."""
    parallel, batch = make_parallel_net(case), make_pictures(case)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    losses, norms = [], []
    for _ in range(3):
        loss = parallel(*batch)
        loss.backward()
        norms.append(float(parallel.clip_grad_norm(0.05)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def test_used_like_the_model(pool: WorkerPool) -> None:
    case = Pictures([Strategy(data=2, height=2)] * 5, max_grad_norm=0.05)
    wanted = train_net_alone(case)
    for losses, norms in pool.run(4, by_hand, case=case):
        assert losses == pytest.approx(wanted.losses, rel=1e-6)
        assert norms[0] == pytest.approx(float(torch.stack([g.norm() for g in wanted.gradients.values()]).norm()))


@pytest.mark.parametrize(("strategy", "shares"), [(ROWS, 1), (DATA, 2), (Strategy(zero=2, zero_stage=3), 2)])
def test_batch_norm_takes_the_statistics_of_its_data_share(pool: WorkerPool, strategy: Strategy, shares: int) -> None:
    case = Pictures([strategy] * 5, norm="batch")
    wanted = train_net_alone(case, shares)
    for found in pool.run(2, train_net, case=case):
        assert_same(found, wanted, TOLERANCE)
