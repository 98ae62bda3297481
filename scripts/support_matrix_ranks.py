"""Work in processes that are forked, so that nothing is imported again and a crash or a hang ends none but its own."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from galvatron_lite.errors import GalvatronError


@dataclass(frozen=True)
class Failure:
    """How a process ended that did not end well."""

    ours: bool  # whether it is an error that the package raises on purpose
    text: str  # what it says; of other errors the kind and the place too
    late: bool = False  # whether it did not end at all in the time that it had: it hangs, or the machine was busy


@dataclass(frozen=True)
class Child:
    """A forked process, our end of its pipe, and whether it leads a group of processes."""

    pid: int
    connection: Connection
    leads: bool


def fork(work: Callable[[], Any], leads: bool = False) -> Child:
    """A process that does this and sends the result, or a ``Failure``; where it leads, its own forks end with it."""
    ours, theirs = Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        if leads:
            os.setpgid(0, 0)
        _serve(theirs, work)
    theirs.close()
    return Child(pid, ours, leads)


def gather(children: Sequence[Child], seconds: float) -> list[Any] | Failure:
    """The results of all; the first failure, also one to end in time. The processes are gone when this returns."""
    results: dict[int, Any] = {}
    pending = {child.connection: place for place, child in enumerate(children)}
    deadline = time.monotonic() + seconds
    try:
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                return Failure(False, f"it did not end in {seconds:g} s", late=True)
            for connection in ready:
                place = pending.pop(connection)  # type: ignore[arg-type]
                results[place] = _received(connection)  # type: ignore[arg-type]
                if isinstance(results[place], Failure):
                    return results[place]  # type: ignore[no-any-return]
    finally:
        for child in children:
            _end(child)
    return [results[place] for place in range(len(children))]


def on_ranks(world: int, work: Callable[[], Any], seconds: float) -> list[Any] | Failure:
    """What ``work`` gives on each rank of a world of forks of this process (gloo)."""
    with tempfile.TemporaryDirectory(prefix="galvatron-support-") as folder:
        store = Path(folder) / "store"
        return gather([fork(_joined(rank, world, store, work, seconds)) for rank in range(world)], seconds)


def _joined(rank: int, world: int, store: Path, work: Callable[[], Any], seconds: float) -> Callable[[], Any]:
    def run() -> Any:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.manual_seed(0)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        files = dist.FileStore(str(store), world)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=world, timeout=timedelta(seconds=seconds))
        result = work()
        dist.barrier()  # no rank closes its connections while another reads from them
        return result

    return run


def _serve(connection: Connection, work: Callable[[], Any]) -> None:
    """Leaves by ``os._exit``: gloo's threads may abort a normal exit, and the parent's clean-up is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        answer = pickle.dumps(work())
    except GalvatronError as error:
        answer = pickle.dumps(Failure(True, str(error)))
    except BaseException as error:
        answer = pickle.dumps(Failure(False, _told(error)))
    try:
        connection.send_bytes(answer)
    finally:
        os._exit(0)


def _told(error: BaseException) -> str:
    """Kind, first line and place of an error; all of it on standard error where SUPPORT_TRACES is set."""
    if os.environ.get("SUPPORT_TRACES"):
        traceback.print_exception(error)
    first = (str(error).strip().splitlines() or [""])[0][:240]
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "galvatron_lite" in frame.filename]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {first}{place}"


def _received(connection: Connection) -> Any:
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        return Failure(False, "the process died")


def _end(child: Child) -> None:
    """Kill what still runs: it waits for another that failed, or has nothing more to say."""
    child.connection.close()
    for _ in _moments(1.0):
        if os.waitpid(child.pid, os.WNOHANG)[0]:
            return
    (os.killpg if child.leads else os.kill)(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)


def _moments(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.02)
