"""Collectives of tensor groups in real processes (gloo)."""

from __future__ import annotations

from typing import Any

import torch

from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup
from tests.pool import WorkerPool


def collectives() -> list[Any]:
    group = ProcessTensorGroup()
    mine = torch.arange(8.0).reshape(2, 4) + 10 * group.rank
    results = [group.all_reduce(mine)]
    results += [group.all_gather(mine, dim) for dim in (0, 1, -1)]
    results += [group.reduce_scatter(mine, dim) for dim in (0, 1)]
    # strided tensors, too
    return [*results, group.all_reduce(mine.t()), group.all_gather(mine.t(), 1), group.reduce_scatter(mine.t(), 1)]


def test_collectives(pool: WorkerPool) -> None:
    first = torch.arange(8.0).reshape(2, 4)
    second, total = first + 10, 2 * first + 10
    for rank, results in enumerate(pool.run(2, collectives)):
        expected = [total, torch.cat([first, second], 0), *[torch.cat([first, second], 1)] * 2]
        expected += [total.chunk(2, 0)[rank], total.chunk(2, 1)[rank]]
        expected += [total.t(), torch.cat([first.t(), second.t()], 1), total.t().chunk(2, 1)[rank]]
        torch.testing.assert_close(results, expected)
