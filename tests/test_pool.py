"""The worker pool itself: worlds of every size, failures, hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests import pool as module
from tests.pool import JobError, WorkerPool


def add_ranks(offset: int) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total


def use_subgroups() -> float:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    value = torch.ones(1)
    dist.all_reduce(value, group=mesh["b"].get_group())
    return float(value)


def added_threads() -> int:
    """Threads that each of four groups adds."""
    before = len(os.listdir("/proc/self/task"))
    for _ in range(4):
        dist.all_reduce(torch.ones(1), group=dist.new_group())
    return (len(os.listdir("/proc/self/task")) - before) // 4


def fail_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError("broken on purpose")
    dist.barrier()


def hang_on_first() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


@pytest.mark.parametrize("world", [1, 2, 8, 4])
def test_job_sees_a_group_of_the_size_asked_for(pool: WorkerPool, world: int) -> None:
    results = pool.run(world, add_ranks, offset=1)
    assert [rank for rank, _, _ in results] == list(range(world))
    assert {size for _, size, _ in results} == {world}
    assert all(float(total) == world * (world + 1) / 2 for _, _, total in results)


def test_subgroups_work_again_and_again(pool: WorkerPool) -> None:
    for _ in range(3):
        assert pool.run(4, use_subgroups) == [2.0] * 4


def test_groups_share_the_thread_that_waits_for_messages(pool: WorkerPool) -> None:
    """Two threads of a group run its collectives; a third would wait by itself."""
    assert pool.run(2, added_threads) == [2, 2]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for one that failed, or hang, are ended soon."""
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)


@pytest.mark.usefixtures("impatient")
def test_failure_names_the_rank_and_the_pool_recovers() -> None:
    pool = WorkerPool()
    with pytest.raises(JobError, match=r"rank 1 raised:(.|\n)*broken on purpose"):
        pool.run(2, fail_on_last)
    assert len(pool.run(2, add_ranks, offset=0)) == 2
    pool.close()


@pytest.mark.usefixtures("impatient")
def test_hang_is_ended_and_says_where() -> None:
    """A machine that is busy may not even begin the job in the time that it has; then it gets more."""
    pool, told = WorkerPool(), ""
    for seconds in (2, 8, 32):
        with pytest.raises(JobError) as caught:
            pool.run(2, hang_on_first, timeout=seconds)
        told = str(caught.value)
        assert f"rank 0 did not finish in {seconds} s, at:" in told
        if "in hang_on_first" in told:
            break
    assert "in hang_on_first" in told
    pool.close()
