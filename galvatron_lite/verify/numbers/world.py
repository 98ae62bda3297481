"""Processes of our own that run a small plan for real: forks, each of which writes what it found to a file.

A process that has run a backward pass on a machine with a GPU, or whose threads have shared work, must not fork any
more. So ``Nursery`` forks once, early, and all others are forks of that one, which does nothing else.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from galvatron_lite.verify.numbers.shrink import Recipe, make_small
from galvatron_lite.verify.numbers.train import ReferenceTraining, train_alone, train_under_plan
from galvatron_lite.verify.source import ModelSource

PATIENCE = 60.0
"""Seconds that a rank waits for another one."""
GRACE = 3.0
"""Seconds that the others are given once one rank has failed."""
REFERENCE = "reference.pt"
HANGS = "hangs"
"""What a rank that did not finish is said to have done."""

Work = Callable[[], None]


class Nursery:
    """A fork of this process that starts others, made before anything that forbids forking has happened."""

    def __init__(self, source: ModelSource, patience: float = PATIENCE) -> None:
        self._ours, theirs = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _leave(lambda: _serve(theirs, source, patience, self._ours))
        theirs.close()

    def train(self, recipe: Recipe, folder: Path, timeout: float) -> dict[int, dict[str, Any]]:
        """Run the small plan of a recipe.

        Returns:
            By rank (-1: the one process that trains alone) what it wrote: ``wrong``, ``held``, or ``error``.
        """
        self._ours.send((recipe, str(folder), timeout))
        if not self._ours.poll(2 * timeout + 4 * GRACE):
            return {}
        self._ours.recv()
        found = {rank: _read(folder / _file(rank)) for rank in range(-1, recipe.plan.devices)}
        return {rank: result for rank, result in found.items() if result is not None}

    def close(self) -> None:
        """End the fork."""
        self._ours.close()
        os.waitpid(self._pid, 0)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _leave(work: Work) -> None:
    """Do something in a fork and end it; gloo's threads may abort a normal exit of the interpreter."""
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve(connection: Connection, source: ModelSource, patience: float, other: Connection) -> None:
    other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which closes the pipe
    while True:
        try:
            recipe, folder, timeout = connection.recv()
        except (EOFError, OSError):
            return
        _run(recipe, Path(folder), source, patience, timeout, connection)
        connection.send(True)


def _run(
    recipe: Recipe, folder: Path, source: ModelSource, patience: float, timeout: float, connection: Connection
) -> None:
    """The reference first, then the ranks, which read it."""
    _all([lambda: _alone(recipe, folder, source)], folder, timeout, connection, first=-1)
    if not (folder / REFERENCE).exists():
        return
    work = [_rank_of(rank, recipe, folder, source, patience) for rank in range(recipe.plan.devices)]
    _all(work, folder, timeout, connection, first=0)


def _rank_of(rank: int, recipe: Recipe, folder: Path, source: ModelSource, patience: float) -> Work:
    return lambda: _under_plan(rank, recipe, folder, source, patience)


def _all(works: Sequence[Work], folder: Path, timeout: float, connection: Connection, first: int) -> None:
    """Run each in a process; those that do not end in time, or long after another has failed, are ended."""
    running = {_fork(work, folder, first + number): first + number for number, work in enumerate(works)}
    deadline = time.monotonic() + timeout
    while running and time.monotonic() < deadline:
        for pid in list(running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                result = _read(folder / _file(running.pop(pid)))
                if result is None or result.get("error"):
                    deadline = min(deadline, time.monotonic() + GRACE)
        if connection.poll(0.02):  # nobody is left to tell
            break
    for pid in running:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.3 if running else 0.0)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(work: Work, folder: Path, number: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _leave(lambda: _guarded(work, folder, number))
    return pid


def _guarded(work: Work, folder: Path, number: int) -> None:
    """Do the work; an error goes to the file of results, and on SIGUSR1 where the process is to another."""
    stacks = (folder / f"stack{number}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    errors = os.open(folder / f"said{number}", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(errors, 2)
    try:
        work()
    except Exception as error:
        _write(folder, number, {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})


def _file(number: int) -> str:
    return "alone.json" if number < 0 else f"rank{number}.json"


def _write(folder: Path, number: int, result: dict[str, Any]) -> None:
    path = folder / _file(number)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as stream:
        json.dump(result, stream)
    os.replace(stream.name, path)


def _read(path: Path) -> dict[str, Any] | None:
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    number = path.stem.removeprefix("rank")
    stack = path.parent / f"stack{number}"
    text = stack.read_text(errors="replace") if stack.exists() else ""
    return {"error": HANGS, "trace": text} if text else None


def _alone(recipe: Recipe, folder: Path, source: ModelSource) -> None:
    torch.set_num_threads(1)
    begun = time.process_time()
    reference = train_alone(make_small(source, recipe), recipe.plan)
    items = {name: one.numel() for name, one in reference.parameters.items()}
    graded = {name: one.numel() for name, one in reference.first.items()}
    torch.save(asdict(reference), folder / f"{REFERENCE}.part")
    os.replace(folder / f"{REFERENCE}.part", folder / REFERENCE)
    seconds = time.process_time() - begun
    _write(folder, -1, {"draws": reference.draws, "items": items, "graded": graded, "seconds": seconds})


def _under_plan(rank: int, recipe: Recipe, folder: Path, source: ModelSource, patience: float) -> None:
    torch.set_num_threads(1)
    begun = time.process_time()
    world, waits = recipe.plan.devices, timedelta(seconds=patience)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=waits)
    reference = ReferenceTraining(**torch.load(folder / REFERENCE, weights_only=True))
    finding = train_under_plan(make_small(source, recipe), recipe.plan, reference)
    seconds = time.process_time() - begun
    _write(folder, rank, {"wrong": finding.wrong, "held": finding.held, "seconds": seconds})
    # no rank may close its connections while another still reads from them
    dist.barrier()
