"""Phases: batches that grow, micro-batches that change, another split; as one process trains them."""

from __future__ import annotations

import pytest

from tests.pool import WorkerPool
from tests.runtime.phases_jobs import BATCHES, train_alone, train_in_phases


def test_phases_train_as_one_process_does(pool: WorkerPool) -> None:
    losses, splits, refused = pool.run(2, train_in_phases)[0]
    assert losses == pytest.approx(train_alone(), rel=1e-5)
    assert splits == ["data2", "data2", "zero3x2", "unsplit"]
    assert f"give {BATCHES[0]}" in refused
