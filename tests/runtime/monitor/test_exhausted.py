"""Memory that runs out: training goes on under a plan that takes less, or says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from galvatron_lite.runtime.monitor.attach import earlier_corrections
from galvatron_lite.runtime.monitor.log import read_log, replay
from galvatron_lite.runtime.monitor.schema import Adapt, Exhausted
from tests.pool import WorkerPool
from tests.runtime.monitor.jobs import run_out_of_memory, slow_profile, train_alone


def test_where_all_ranks_run_out_alike_training_goes_on_from_memory(pool: WorkerPool, tmp_path: Path) -> None:
    losses, taken, said = pool.run(2, run_out_of_memory, folder=str(tmp_path), everywhere=True)[0]
    assert said == ""
    assert losses == pytest.approx(train_alone(5), rel=1e-5)
    assert taken[0] == taken[1] > taken[2] == taken[4]
    records = read_log(tmp_path / "log.jsonl")
    assert [record.ranks for record in records if isinstance(record, Exhausted)] == [(0, 1)]
    assert all(one.same for one in replay(records))


def test_where_one_rank_runs_out_the_next_run_has_learnt_of_it(pool: WorkerPool, tmp_path: Path) -> None:
    # ranks wait 10 s for one another: a constant of the package, which no user sets
    _, (losses, _, said) = pool.run(2, run_out_of_memory, folder=str(tmp_path), everywhere=False)
    assert len(losses) == 2
    assert "--max-restarts" in said
    assert earlier_corrections(Adapt(log=str(tmp_path / "log.jsonl")), slow_profile()).memory > 1.0
