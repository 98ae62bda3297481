"""A link of known speed between processes: a backend that is gloo, but takes as long as the link would.

The link is busy with one transfer at a time; whoever waits for a transfer waits until the link is done with it.
Sleeping takes no processor, so that a loaded machine changes little.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

NAME = "slowgloo"


class Link:
    """Seconds of a message: ``latency + bytes * per_byte``; change them while it is in use."""

    latency = 0.0
    per_byte = 0.0
    busy_until = 0.0

    @classmethod
    def take(cls, size: float) -> float:
        """When the link is done with so many bytes more."""
        cls.busy_until = max(cls.busy_until, time.perf_counter()) + cls.latency + size * cls.per_byte
        return cls.busy_until


class _Slow(dist.Work):
    def __init__(self, inner: Any, until: float, held: Any, arriving: int = 0) -> None:
        super().__init__()
        self._inner, self._until, self._held, self._arriving = inner, until, held, arriving

    def wait(self, *_: Any) -> bool:
        self._inner.wait()
        until = Link.take(self._arriving) if self._arriving else self._until
        self._arriving, self._until = 0, until
        time.sleep(max(until - time.perf_counter(), 0.0))
        return True

    def is_completed(self) -> bool:
        return False


class SlowGroup(dist.ProcessGroup):
    """Gloo over the link; a ring's share of every collective goes over it."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._inner, self._ranks = inner, size

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _ring(self, work: Any, tensors: Any, passes: int = 1) -> _Slow:
        share = passes * (self._ranks - 1) / self._ranks
        return _Slow(work, Link.take(share * sum(tensor.nbytes for tensor in _flat(tensors))), tensors)

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
        return self._inner.send(tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int) -> _Slow:
        return _Slow(self._inner.recv(tensors, peer, tag), 0.0, tensors, sum(one.nbytes for one in tensors))

    def barrier(self, opts: Any = None) -> Any:
        return self._inner.barrier(opts or dist.BarrierOptions())


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [one for item in value for one in _flat(item)]


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> SlowGroup:
    return SlowGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


def join(folder: Path, bandwidth: float) -> None:
    """Leave the world and join one of the same ranks over a link of so many bytes a second."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.Backend.register_backend(NAME, _make, devices=["cpu"])
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(NAME, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    Link.per_byte = 1 / bandwidth
