"""Groups, and lines, of ranks that are threads of one process, in lockstep: tests need no process group."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Item = TypeVar("Item")
TIMEOUT = 60.0


class Meeting:
    """Where threads swap tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.slots: list[Any] = [None] * size

    def swap(self, rank: int, tensor: Tensor) -> list[Tensor]:
        # a copy: others may still read while this rank goes on and writes to its tensor
        return self.show(rank, tensor.detach().clone())

    def show(self, rank: int, item: Item) -> list[Item]:
        """What every rank shows, in order."""
        self.slots[rank] = item
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
    sent_bytes: int = 0

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

    def exchange(self, sent: Sequence[tuple[int, Tensor]], wanted: Sequence[tuple[int, Tensor]]) -> Done:
        self.calls["exchange"] += 1
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sent)
        everyone = self.meeting.show(self.rank, {peer: tensor.detach() for peer, tensor in sent})
        with torch.no_grad():
            for peer, buffer in wanted:
                assert everyone[peer][self.rank].shape == buffer.shape
                buffer.copy_(everyone[peer][self.rank])
        self.meeting.barrier.wait()
        return Done()


class Done:
    def wait(self) -> None:
        pass


def grid_groups(group: ThreadGroup, rows: int, columns: int) -> tuple[ThreadGroup, ThreadGroup]:
    """The lines along rows (down a column of the grid) and along columns of a grid of all threads, row-major."""
    row, column = divmod(group.rank, columns)
    down = group.meeting.show(group.rank, Meeting(rows))[column]
    along = group.meeting.show(group.rank, Meeting(columns))[row * columns]
    return ThreadGroup(rows, row, down), ThreadGroup(columns, column, along)


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
