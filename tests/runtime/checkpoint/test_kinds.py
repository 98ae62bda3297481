"""Checkpoints of all strategies: resumed exactly under the same plan, and loaded under other plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.runtime.engine import ParallelModel
from tests.equivalence.families import make_batches
from tests.equivalence.test_experts import plan
from tests.equivalence.training import SAMPLES, make_case
from tests.pool import WorkerPool
from tests.runtime.branches.jobs import make_batch as branch_batch
from tests.runtime.branches.jobs import make_branched
from tests.runtime.branches.test_branches import TWO_PROCESSES
from tests.runtime.checkpoint.jobs import moments, same
from tests.runtime.examined import examined_once
from tests.runtime.pictures import Pictures, make_parallel_net, make_pictures
from tests.runtime.training import Case, make_batch, make_parallel

HYBRID, MIXED = Strategy(data=2, zero=2, zero_stage=2), Strategy(zero=2, zero_stage=3, tensor=2)
TENSOR, DATA = Strategy(tensor=4, sequence_parallel=True), Strategy(data=4)
ROWS = Strategy(zero=4, zero_stage=1)
HOST = Strategy(zero=4, zero_stage=1, offload=Offload.STATES)
HEADS = Strategy(zero=2, zero_stage=3, context=2, ulysses=True, offload=Offload.ACTIVATIONS)
FILTERS, CHANNELS = Strategy(filters=4), Strategy(channels=4)
Make = Callable[[], ParallelModel]


@examined_once()
def there(makes: list[Make], batch: Any, folder: str) -> None:
    """Train and save under the first plan; load under all plans, and compare the state and the next step."""
    first = makes[0]()
    optimizer = first.optimizer(torch.optim.Adam, lr=0.01, amsgrad=True, eps=1e-4)
    for _ in range(2):
        first.train_step(batch, optimizer)
    first.save(folder, optimizer, asynchronous=True)
    state, states = first.full_state_dict(), moments(optimizer, first)
    scale = None if first.scaler is None else first.scaler.state_dict()
    loss = float(first.train_step(batch, optimizer))
    first.finish_saving()
    for number, make in enumerate(makes):
        other = make()
        theirs = other.optimizer(torch.optim.Adam, lr=0.5, amsgrad=True)
        other.train_step(batch, theirs)
        resumed = other.load(folder, theirs)
        assert (resumed.exact, resumed.step) == (number == 0, 2)
        same(other.full_state_dict(), state)
        same(moments(theirs, other), states)
        assert scale == (None if other.scaler is None else other.scaler.state_dict())
        found = float(other.train_step(batch, theirs))
        assert found == loss if number == 0 else abs(found - loss) < 1e-3 * abs(loss)


def text(strategies: list[Strategy], **options: Any) -> Make:
    return lambda: make_parallel(Case(strategies), **options)


def pictures(strategies: list[Strategy]) -> Make:
    return lambda: make_parallel_net(Pictures(strategies))


def all_kinds(folder: str) -> None:
    half = {"precision": "fp16"}
    edge = Strategy(tensor=4)
    texts = [text([HOST] * 5, **half), text([HYBRID, TENSOR, MIXED, DATA, HYBRID], **half)]
    there(texts, make_batch(), f"{folder}/host")
    there([text([edge, TENSOR, HEADS, ROWS, edge]), text([DATA] * 5)], make_batch(), f"{folder}/tensor")
    channels = [FILTERS, CHANNELS, FILTERS, CHANNELS, FILTERS]
    there([pictures(channels), pictures([DATA] * 5)], make_pictures(Pictures([])), f"{folder}/pictures")


def test_layers_split_in_every_way(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(4, all_kinds, folder=str(tmp_path))


def experts(folder: str) -> None:
    """Expert parallelism with ZeRO, context and tensor parallelism, and in a zero-bubble pipeline."""
    case = make_case("mixtral")
    ways = [
        Strategy(zero=4, zero_stage=3, expert=2),
        Strategy(zero=2, zero_stage=1, context=2, expert=4, offload=Offload.ALL),
        Strategy(data=2, tensor=2, expert=2),
    ]
    piped = plan(case, Strategy(data=2), cut=3, microbatches=2)
    plans = [*(plan(case, way) for way in ways), replace(piped, schedule=Schedule.ZERO_BUBBLE_1P)]
    makes: list[Make] = [partial(case.parallel, one) for one in plans]
    (batch,) = make_batches("mixtral", SAMPLES, 1)
    there(makes, batch, folder)


def test_experts(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(4, experts, folder=str(tmp_path / "one"))


def branches(folder: str) -> None:
    case = TWO_PROCESSES["coders-shared-trunk"]
    there([lambda: make_branched(case)], branch_batch(case), folder)


def test_branches_on_ranks_of_their_own(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, branches, folder=str(tmp_path / "one"))
