"""A tensor-parallel group of threads of one process, in lockstep: tests need no process group."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
TIMEOUT = 60.0


class Meeting:
    """Where threads swap tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.slots: list[Tensor] = [torch.empty(0)] * size

    def swap(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.slots[rank] = tensor.detach()
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


@dataclass
class ThreadGroup:
    size: int
    rank: int
    meeting: Meeting
    calls: Counter[str] = field(default_factory=Counter)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.calls["all_reduce"] += 1
        return torch.stack(self.meeting.swap(self.rank, tensor)).sum(0)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self.calls["all_gather"] += 1
        return torch.cat(self.meeting.swap(self.rank, tensor), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        self.calls["reduce_scatter"] += 1
        total = torch.stack(self.meeting.swap(self.rank, tensor)).sum(0)
        return total.chunk(self.size, dim)[self.rank]


def run_threads(size: int, work: Callable[[ThreadGroup], Result]) -> list[Result]:
    """What ``work`` returns on each rank."""
    meeting = Meeting(size)

    def one(rank: int) -> Result:
        try:
            return work(ThreadGroup(size, rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(one, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]
