"""Training networks over pictures whose pixels ranks share equals one process, to float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from tests.pool import WorkerPool
from tests.runtime.pictures import Pictures, make_net, make_parallel_net, make_pictures, train_net, train_net_alone
from tests.runtime.plans import losses_alone, split_model
from tests.runtime.training import assert_same
from tests.together import Together, together

TOLERANCE = 1e-10
WHOLE, DATA, ZERO3 = Strategy(filters=2), Strategy(data=2), Strategy(zero=2, zero_stage=3)
ROWS, COLUMNS = Strategy(height=2), Strategy(width=2)
SHARED = Strategy(height=2, zero_stage=3)
FULL, SELECTIVE = Strategy(height=2, recompute=Recompute.FULL), Strategy(width=2, recompute=Recompute.SELECTIVE)

TWO = {
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


FOUR_SHARED = Strategy(data=2, height=2, zero_stage=2)
FOUR = {
    "grid": [Strategy(height=2, width=2)] * 5,
    "channels": [
        Strategy(data=2, filters=2), Strategy(data=2, filters=2), Strategy(zero=2, zero_stage=3, channels=2),
        Strategy(channels=4), Strategy(data=2, height=2),
    ],
    "mixed": [
        Strategy(data=2, width=2), Strategy(height=4), FOUR_SHARED,
        Strategy(zero=4, zero_stage=3, recompute=Recompute.FULL), Strategy(data=4),
    ],
}  # fmt: skip


STAGES = {
    "rows": ([ROWS, FULL, COLUMNS, COLUMNS, COLUMNS], [3]),
    "a stage of edges": ([ROWS, ROWS, SHARED, DATA, COLUMNS], [1, 4]),
    "unlike wires": ([ROWS, DATA, COLUMNS, ROWS, DATA], [3]),
}


SKIPS = [ROWS, FILTERS, COLUMNS, DATA, SHARED]


def channelled(name: str, norm: str) -> Pictures:
    case = Pictures(CHANNELED[name], norm=norm, max_grad_norm=0.05)
    if norm == "batch":
        case = replace(case, strategies=[ROWS if one.data > 1 else one for one in case.strategies])
    return case


CASES = {
    **{f"{name}, {norm} norm": channelled(name, norm) for name in CHANNELED for norm in ("group", "batch")},
    **{
        f"{name}{', dense' * dense}": Pictures(strategies, dense=dense)
        for name, strategies in TWO.items()
        for dense in ((False, True) if name in ("columns in data", "recompute", "unlike edges") else (False,))
    },
    **{
        f"four: {name}": Pictures(strategies, dense=name == "grid", max_grad_norm=0.05)
        for name, strategies in FOUR.items()
    },
    **{
        f"stages: {name}": Pictures(strategies, chain=True, microbatches=2, cuts=cuts, max_grad_norm=0.05)
        for name, (strategies, cuts) in STAGES.items()
    },
    **{
        f"skips between stages{', dense' * dense}": Pictures(SKIPS, dense=dense, microbatches=2, cuts=[1, 3])
        for dense in (False, True)
    },
}


def world_of(case: Pictures) -> int:
    return case.strategies[0].devices * (len(case.cuts) + 1)


trained = together(train_net, CASES, world_of)


@pytest.mark.parametrize("name", list(CASES))
def test_shared_pictures_train_like_one_process(trained: Together, name: str) -> None:
    """Shared pixels and channels beside all else, stages of them, and skip connections that travel between stages."""
    wanted = train_net_alone(CASES[name])
    assert len(trained[name]) == world_of(CASES[name])
    for found in trained[name]:
        assert_same(found, wanted, TOLERANCE)


def by_hand(case: Pictures) -> tuple[list[float], list[float]]:
    """The user's own loop: forward, backward, clip, step."""
    parallel, batch = make_parallel_net(case), make_pictures(case)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    norms: list[float] = []
    clip = parallel.clip_grad_norm
    losses = losses_alone(parallel, optimizer, [batch] * 2, lambda _: norms.append(float(clip(0.05))))
    return losses, norms


def test_used_like_the_model(pool: WorkerPool) -> None:
    case = Pictures([Strategy(data=2, height=2)] * 5, max_grad_norm=0.05)
    wanted = train_net_alone(case)
    for losses, norms in pool.run(4, by_hand, case=case):
        assert losses == pytest.approx(wanted.losses, rel=1e-6)
        assert norms[0] == pytest.approx(float(torch.stack([g.norm() for g in wanted.gradients.values()]).norm()))


def half_precision(strategy: Strategy) -> list[float]:
    case = Pictures([strategy] * 5, norm="batch", dense=True)
    model, batch = make_net(case).float(), [one.float() if one.is_floating_point() else one for one in
                                            make_pictures(case)]  # fmt: skip
    blocks = [f"blocks.{number}" for number in range(3)]
    parallel = split_model(model, batch, [strategy] * 5, precision="bf16", blocks=blocks)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    return [float(parallel.train_step(batch, optimizer)) for _ in range(3)]


@pytest.mark.parametrize("strategy", [ROWS, SHARED, FILTERS], ids=str)
def test_half_precision(pool: WorkerPool, strategy: Strategy) -> None:
    (wanted,) = pool.run(1, half_precision, strategy=Strategy())
    for losses in pool.run(2, half_precision, strategy=strategy):
        assert losses == pytest.approx(wanted, rel=2e-3)
        assert losses[2] < losses[0]


def test_half_precision_of_norms_that_zero_would_cast(pool: WorkerPool) -> None:
    wanted, _ = pool.run(2, half_precision, strategy=DATA)
    for losses in pool.run(2, half_precision, strategy=Strategy(zero=2, zero_stage=3)):
        assert losses == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize(("strategy", "shares"), [(ROWS, 1), (DATA, 2), (Strategy(zero=2, zero_stage=3), 2)])
def test_batch_norm_takes_the_statistics_of_its_data_share(pool: WorkerPool, strategy: Strategy, shares: int) -> None:
    case = Pictures([strategy] * 5, norm="batch")
    wanted = train_net_alone(case, shares)
    for found in pool.run(2, train_net, case=case):
        assert_same(found, wanted, TOLERANCE)


def in_place_first(strategy: Strategy) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)).double()
    batch, cuts = make_pictures(Pictures([]))[0], [] if strategy.devices == dist.get_world_size() else [2]
    parallel = split_model(model, batch, strategy, cuts, loss_fn=lambda output, _: output.square().mean())
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    return [float(parallel.train_step(batch, optimizer)) for _ in range(3)]


@pytest.mark.parametrize("strategy", [Strategy(), ROWS], ids=str)
def test_a_stage_may_begin_in_place(pool: WorkerPool, strategy: Strategy) -> None:
    (wanted,) = pool.run(1, in_place_first, strategy=Strategy())
    for losses in pool.run(2 * strategy.devices, in_place_first, strategy=strategy):
        assert losses == pytest.approx(wanted, rel=1e-6)
