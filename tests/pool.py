"""Worker processes that run test jobs under torch.distributed (gloo), shared by the whole test session.

A job is a top-level function of an importable module. ``pool.run(4, job, x=1)`` calls ``job(x=1)`` on four ranks of a
fresh default process group and returns the four results, by rank. An exception on any rank, or a hang, raises
``JobError`` with the rank and where it was.

One server process imports what jobs need once, and keeps it out of garbage collection; the ranks of every job are
forks of it, which takes milliseconds. Ranks are not used again: DTensor keeps device meshes in caches, and a mesh of an
earlier world, equal but with process groups that are gone, would be taken for one of the present world.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch.distributed import Store, TCPStore

HOST = "127.0.0.1"
MAX_WORLD = 8
GRACE_SECONDS = 2.0
GARBAGE = 20_000, 20, 20
"""When garbage is collected: a fifteenth as often as usual."""
PRELOADED = [
    "hypothesis",
    "numpy",
    "pytest",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("gpt2", "llama", "qwen2", "bert", "vit", "mixtral", "qwen2_moe", "t5")
    ),
    "tests.auto_jobs",
    "tests.equivalence.training",
    "tests.runtime.losses",
    "tests.runtime.training",
    "tests.frozen",
]


class JobError(AssertionError):
    """A job failed or hung on some ranks; the message holds their tracebacks."""


@dataclass(frozen=True)
class Job:
    """What a worker is sent: what to call, and the world to call it in."""

    module: str
    function: str
    kwargs: dict[str, Any]
    rank: int
    world: int
    port: int
    prefix: str
    timeout: float


@dataclass(frozen=True)
class Rank:
    """One process and the parent's end of its pipe."""

    process: BaseProcess
    connection: Connection
    stack_file: Path


class WorkerPool:
    """Runs jobs on 1 to 8 ranks; see the module's text."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="galvatron-pool-")
        self._store: TCPStore | None = None
        self._jobs = 0

    def run(self, world: int, function: Callable[..., Any], *, timeout: float = 280.0, **kwargs: Any) -> list[Any]:
        """Call ``function(**kwargs)`` on every rank of a world of this size; the results, by rank."""
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"world must be 1..{MAX_WORLD}, not {world}")
        self._jobs += 1
        ranks = [self._start(self._job(rank, world, function, kwargs, timeout)) for rank in range(world)]
        try:
            replies = _collect(ranks, timeout)
            failures = {rank: text for rank, (good, text) in replies.items() if not good}
            missing = [rank for rank in range(world) if rank not in replies]
            if failures or missing:
                raise JobError(_report(function, ranks, failures, missing, timeout))
        finally:
            _end(ranks)
        return [replies[rank][1] for rank in range(world)]

    def close(self) -> None:
        """Remove what the pool left on disk."""
        self._folder.cleanup()

    def _start(self, job: Job) -> Rank:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        ours, theirs = context.Pipe()
        stack_file = Path(self._folder.name) / f"stack{self._jobs}-{job.rank}"
        process = context.Process(target=_serve, args=(theirs, str(stack_file), list(sys.path)), daemon=True)
        process.start()
        theirs.close()
        ours.send_bytes(_dumps(job))
        return Rank(process, ours, stack_file)

    def _job(self, rank: int, world: int, function: Callable[..., Any], kwargs: dict[str, Any], timeout: float) -> Job:
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        return Job(
            function.__module__, function.__qualname__, kwargs, rank, world,
            self._store.port, f"job{os.getpid()}-{self._jobs}", timeout,
        )  # fmt: skip


def _collect(ranks: Sequence[Rank], timeout: float) -> dict[int, tuple[bool, Any]]:
    """Replies by rank. After the first failure the other ranks, which may wait for it, get a short grace."""
    replies: dict[int, tuple[bool, Any]] = {}
    pending = {one.connection: rank for rank, one in enumerate(ranks)}
    deadline = time.monotonic() + timeout
    while pending and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(pending), left):
            assert isinstance(ready, Connection)
            rank = pending.pop(ready)
            replies[rank] = _receive(ranks[rank])
            if not replies[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return replies


def _end(ranks: Sequence[Rank]) -> None:
    """Ranks leave when their pipe closes; those that hang are killed."""
    for one in ranks:
        one.connection.close()
    deadline = time.monotonic() + GRACE_SECONDS
    for one in ranks:
        one.process.join(max(0.0, deadline - time.monotonic()))
        if one.process.is_alive():
            one.process.kill()
            one.process.join()


def _report(
    function: Callable[..., Any], ranks: Sequence[Rank], failures: dict[int, str], missing: list[int], timeout: float
) -> str:
    parts = [f"{function.__module__}.{function.__qualname__} failed"]
    parts += [f"--- rank {rank} raised:\n{text}" for rank, text in sorted(failures.items())]
    stacks = _stacks([ranks[rank] for rank in missing])
    why = "was still running" if failures else f"did not finish in {timeout:g} s"
    parts += [f"--- rank {rank} {why}, at:\n{stack}" for rank, stack in zip(missing, stacks, strict=True)]
    return "\n".join(parts)


def _stacks(ranks: Sequence[Rank]) -> list[str]:
    """Where these processes are now: each writes its stack on SIGUSR1."""
    for one in ranks:
        if one.process.pid is not None and one.process.is_alive():
            os.kill(one.process.pid, signal.SIGUSR1)
    time.sleep(0.5 if ranks else 0.0)
    return [one.stack_file.read_text(errors="replace") if one.stack_file.exists() else "start" for one in ranks]


def _receive(one: Rank) -> tuple[bool, Any]:
    try:
        good, value = pickle.loads(one.connection.recv_bytes())
    except (EOFError, OSError):  # a process that ends with what it was sent unread resets its pipe
        one.process.join(1.0)
        stack = one.stack_file.read_text(errors="replace") if one.stack_file.exists() else ""
        return False, f"the process died (exit code {one.process.exitcode})\n{stack}"
    return good, value


def _serve(connection: Connection, stack_file: str, path: list[str]) -> None:
    """Run one job. Leaves by ``os._exit``: gloo's threads may abort a normal exit of the interpreter."""
    sys.path[:] = path
    # the parent's Ctrl-C is the parent's to handle: it closes the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Path(stack_file).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        faulthandler.enable(file=stacks)
        try:
            connection.send_bytes(_answer(pickle.loads(connection.recv_bytes())))
            # a rank that leaves early would close connections that others still read from
            connection.recv_bytes()
        except (EOFError, OSError):
            pass
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer(job: Job) -> bytes:
    try:
        return _dumps((True, _call(job)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


class _Pickler(pickle.Pickler):
    """Copies tensors as arrays: torch would write an archive for each, and multiprocessing share their memory."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.dtype not in (torch.float32, torch.float64, torch.int64, torch.bool) or value.is_conj():
            return NotImplemented
        return _tensor_of, (value.detach().numpy(), value.requires_grad)


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _tensor_of(array: Any, requires_grad: bool) -> Any:
    import torch

    return torch.from_numpy(array).requires_grad_(requires_grad)


def _call(job: Job) -> Any:
    import numpy
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.world))
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(job.port), LOCAL_WORLD_SIZE=str(job.world))
    timeout = timedelta(seconds=job.timeout)
    share_device()
    store = dist.PrefixStore(job.prefix, dist.TCPStore(HOST, job.port, is_master=False, timeout=timeout))
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=timeout)
    with groups_made_once(), optimizers_tried_once():
        result = _resolve(job)(**job.kwargs)
    if dist.is_initialized():
        # no rank may close its connections while another still reads from them
        dist.barrier()
        dist.destroy_process_group()
    return result


def share_device() -> None:
    """All of gloo's groups of this process wait for messages in one thread, not each in its own.

    Such a thread wakes a hundred times a second: those of ten groups on each of four ranks took a fifth of the time.
    torch has no public way to say so.
    """
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    device = ProcessGroupGloo.create_default_device()

    class OneDevice(ProcessGroupGloo):
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
            options = ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneDevice  # type: ignore[misc]


@contextmanager
def groups_made_once() -> Iterator[None]:
    """Plans that a job sets up one after another share process groups of equal ranks and purpose.

    Groups take long to connect, and torch keeps what it works out by group: for fifty plans as for one. What a plan's
    groups are is as before; those that somebody destroys are made anew.
    """
    from torch.distributed import ProcessGroup

    from galvatron_lite.parallelism.process_groups import ProcessGroups

    new, destroy = ProcessGroups._new, ProcessGroups.destroy
    known: dict[tuple[float | None, str, tuple[int, ...]], ProcessGroup] = {}

    def shared(self: ProcessGroups, ranks: Sequence[int], purpose: str) -> ProcessGroup:
        key = self.timeout, purpose, tuple(ranks)
        if key not in known:
            known[key] = new(self, ranks, purpose)
        return known[key]

    def destroyed(self: ProcessGroups, kept: ProcessGroups) -> None:
        known.clear()
        destroy(self, kept)

    with patch.object(ProcessGroups, "_new", shared), patch.object(ProcessGroups, "destroy", destroyed):
        yield


@contextmanager
def optimizers_tried_once() -> Iterator[None]:
    """What an optimizer's updates depend on is tried on small tensors: once for plans with alike options and cuts."""
    from galvatron_lite.runtime import optimizer as module

    check, alright = module.check_optimizer, set[Any]()

    def checked(optimizer: Any, owned: Sequence[Any], devices: int, everywhere: bool, build: Any) -> Any:
        cut = {one.updated for one in owned if one.copies < devices and one.updated.requires_grad}
        made = None if build is None else tuple(repr(cell.cell_contents) for cell in build.__closure__ or ())
        keys = set[Any]()
        for group in optimizer.param_groups:
            how = type(optimizer), made, everywhere, repr({**group, "params": ()})
            keys.update((*how, min(one.dim(), 2), one in cut, placed(one)) for one in group["params"])
        found = None if keys <= alright else check(optimizer, owned, devices, everywhere, build)
        alright.update(keys if found is None else ())
        return found

    def placed(one: Any) -> str:
        return repr((type(one), getattr(one, "placements", None)))

    with patch.object(module, "check_optimizer", checked):
        yield


def _resolve(job: Job) -> Callable[..., Any]:
    target: Any = importlib.import_module(job.module)
    for name in job.function.split("."):
        target = getattr(target, name)
    function: Callable[..., Any] = target
    return function
