"""A link of known speed between processes: a backend that is gloo, but takes as long as the link would.

The link is busy with one transfer at a time; whoever waits for a transfer waits until the link is done with it. A
transfer begins when the last of its ranks is there: they say when by their own clocks (``KnownClock``).
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.known_time import KnownClock

NAME = "slowgloo"
_STAMP = 2**20
"""Added to the tag of a message: that of what the sender's clock showed."""


class Link:
    """Seconds of a message: ``latency + bytes * per_byte``; change them while it is in use."""

    latency = 0.0
    per_byte = 0.0
    busy_until = 0.0
    clock = KnownClock()

    @classmethod
    def take(cls, size: float, since: float = 0.0) -> float:
        """When the link is done with so many bytes more, which were all there at a moment."""
        cls.busy_until = max(cls.busy_until, cls.clock.now(), since) + cls.latency + size * cls.per_byte
        return cls.busy_until


class _Slow(dist.Work):
    """What ends when the link is done."""

    def __init__(self, inner: Any, until: float, held: Any) -> None:
        super().__init__()
        self._inner, self._until, self._held = inner, until, held

    def wait(self, *_: Any) -> bool:
        self._inner.wait()
        Link.clock.wait(self._until)
        return True

    def is_completed(self) -> bool:
        return False


class _Arriving(dist.Work):
    """What another rank sends: the link takes it up when it was sent, and it is waited for.

    Args:
        inner: brings it.
        size: its bytes.
        sent: brings what the sender's clock showed.
        stamp: into this.
    """

    def __init__(self, inner: Any, size: int, sent: Any, stamp: Tensor) -> None:
        super().__init__()
        self._inner, self._size, self._sent, self._stamp = inner, size, sent, stamp
        self._until: float | None = None

    def wait(self, *_: Any) -> bool:
        self._inner.wait()
        self._sent.wait()
        if self._until is None:
            self._until = Link.take(self._size, float(self._stamp))
        Link.clock.wait(self._until)
        return True

    def is_completed(self) -> bool:
        return False


class SlowGroup(dist.ProcessGroup):
    """Gloo over the link; a ring's share of every collective goes over it."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._inner, self._ranks = inner, size
        self._stamps: list[Any] = []

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _ring(self, work: Any, tensors: Any, passes: int = 1) -> _Slow:
        share = passes * (self._ranks - 1) / self._ranks
        since = self._latest()[1]
        work.wait()
        return _Slow(work, Link.take(share * sum(tensor.nbytes for tensor in _flat(tensors)), since), tensors)

    def _latest(self) -> tuple[Any, float]:
        """What brought what the last rank's clock shows, and that."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        now = torch.tensor([Link.clock.now()], dtype=torch.float64)
        work = self._inner.allreduce([now], options)
        work.wait()
        return work, float(now)

    def allreduce(self, tensors: Any, opts: Any = None) -> _Slow:
        return self._ring(self._inner.allreduce(tensors, opts or dist.AllreduceOptions()), tensors, 2)

    def broadcast(self, tensors: Any, opts: Any) -> _Slow:
        return self._ring(self._inner.broadcast(tensors, opts), tensors, 2)

    def allgather(self, out: Any, tensors: Any, opts: Any = None) -> _Slow:
        return self._ring(self._inner.allgather(out, tensors, opts or dist.AllgatherOptions()), out)

    def _allgather_base(self, out: Tensor, tensor: Tensor, opts: Any = None) -> _Slow:
        return self._ring(self._inner._allgather_base(out, tensor, opts or dist.AllgatherOptions()), out)

    def _reduce_scatter_base(self, out: Tensor, tensor: Tensor, opts: Any = None) -> _Slow:
        return self._ring(self._inner._reduce_scatter_base(out, tensor, opts or dist.ReduceScatterOptions()), tensor)

    def alltoall_base(self, out: Tensor, tensor: Tensor, outs: Any, ins: Any, opts: Any = None) -> _Slow:
        work = self._inner.alltoall_base(out, tensor, outs, ins, opts or dist.AllToAllOptions())
        return self._ring(work, tensor)

    all_gather_single = _allgather_base
    """The names that torch 2.13 has for these."""
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def gather(self, out: Any, tensors: Any, opts: Any) -> _Slow:
        return self._ring(self._inner.gather(out, tensors, opts), tensors)

    def scatter(self, out: Any, tensors: Any, opts: Any) -> _Slow:
        return self._ring(self._inner.scatter(out, tensors, opts), tensors)

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        stamp = torch.tensor([Link.clock.now()], dtype=torch.float64)
        self._stamps.append((self._inner.send([stamp], peer, tag + _STAMP), stamp))
        return self._inner.send(tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int) -> _Arriving:
        stamp = torch.zeros(1, dtype=torch.float64)
        sent = self._inner.recv([stamp], peer, tag + _STAMP)
        return _Arriving(self._inner.recv(tensors, peer, tag), sum(one.nbytes for one in tensors), sent, stamp)

    def barrier(self, opts: Any = None) -> Any:
        met, until = self._latest()
        return _Slow(met, until, None)


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [one for item in value for one in _flat(item)]


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> SlowGroup:
    return SlowGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


def join(folder: Path, bandwidth: float, clock: KnownClock) -> None:
    """Leave the world and join one of the same ranks over a link of so many bytes a second of a clock."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    Link.per_byte, Link.clock = 1 / bandwidth, clock
    dist.Backend.register_backend(NAME, _make, devices=["cpu"])
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(NAME, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
