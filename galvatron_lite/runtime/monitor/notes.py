"""Notes of where each rank is in its step. They go through a store, never a collective."""

from __future__ import annotations

import json
import linecache
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from time import sleep
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

HEARTBEAT = 0.5
"""Seconds after which a note is written again though nothing changed."""
LISTEN = 3 * HEARTBEAT
"""Seconds without a new note after which a process is taken to be gone."""
_PAUSE, _PAUSE_A_RANK = 0.05, 0.0005
"""Seconds between two notes: at least so many, and so many for each rank, as one process stores the notes of all."""
_SLEEPS = 10
_PATIENCE = timedelta(seconds=5)
_WAITS = ("wait(", "synchronize(", ".item()", "isfinite()")


class StepPhase(StrEnum):
    """What a rank does in its step, in the order of the step."""

    BETWEEN = "between steps"
    SAVING = "saving"
    SWITCHING = "going over to another plan"
    BATCH = "comparing batches"
    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    GRADIENTS = "sums of gradients"
    CHECK = "check of the loss and the gradient"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Note:
    """Where a rank is."""

    step: int  # the present one, or the next
    phase: StepPhase
    number: int = -1  # micro-batch; -1: none
    beat: int = 0  # counts the notes of a process
    seconds: float = 0.0  # in this phase
    error: str = ""  # why it left the step
    victim: bool = False  # whether that was because of another rank
    at: str = ""  # the line of code, after a while in one phase
    waits: bool = False  # whether that line waits for other ranks
    process: str = ""  # host and process id
    memory: int = 0  # peak bytes that its allocator held; 0: not known


class NoteStore:
    """A store of notes that all ranks reach; all ranks make it together."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        opened = _open_store() if self.rank == 0 else None
        box: list[Any] = [None if opened is None else opened[:3]]
        dist.broadcast_object_list(box)
        self._address: tuple[str, int, str] = tuple(box[0])
        self._opened = opened  # the store lives as long as this reference
        self._store = self._connect()

    @property
    def pause(self) -> float:
        """Seconds between two notes of a rank."""
        return max(_PAUSE, self.world * _PAUSE_A_RANK)

    def write(self, note: Note) -> bool:
        """Replace this rank's note; False if the store is gone."""
        try:
            if self._store is not None:
                self._store.set(str(self.rank), json.dumps(asdict(note)))
        except RuntimeError:
            return False
        return self._store is not None

    def read(self) -> list[Note | None] | None:
        """The notes of all ranks; None where the store is gone."""
        store = self._connect()
        try:
            return None if store is None else [_note(store, str(rank)) for rank in range(self.world)]
        except RuntimeError:
            return None

    def listen(self) -> tuple[list[Note | None], list[Note | None]] | None:
        """The notes of all ranks, and again once every live process has written a new one."""
        before = self.read()
        if before is None:
            return None
        # in several sleeps: where the machine stalls, one takes longer, and all processes go on during the others
        for _ in range(_SLEEPS):
            sleep(max(LISTEN, 3 * self.pause) / _SLEEPS)
        after = self.read()
        return None if after is None else (before, after)

    def _connect(self) -> Store | None:
        host, port, name = self._address
        try:
            return PrefixStore(name, TCPStore(host, port, is_master=False, timeout=_PATIENCE))
        except RuntimeError:
            return None


def _open_store() -> tuple[str, int, str, Store]:
    """The launcher's store, which outlives this process, where it is reached; else one of this process."""
    host, port, name = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), f"watch-{uuid4().hex}"
    if host and port.isdigit():
        try:
            return host, int(port), name, TCPStore(host, int(port), is_master=False, timeout=_PATIENCE)
        except RuntimeError:
            pass
    own = TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
    return socket.gethostname(), own.port, name, own


def _note(store: Store, key: str) -> Note | None:
    if not store.check([key]):
        return None
    data = json.loads(store.get(key))
    return Note(**{**data, "phase": StepPhase(data["phase"])})


def line_of(thread: int) -> tuple[str, bool]:
    """The line of code that a thread of this process is at, and whether it waits for other ranks there."""
    frame = sys._current_frames().get(thread)  # documented for finding deadlocks
    if frame is None:
        return "", False
    code, number = frame.f_code, frame.f_lineno or 0  # None between lines
    # a frame keeps its variables: a gradient held here is copied by autograd in the other thread, not moved
    del frame
    line = linecache.getline(code.co_filename, number)
    waits = "torch/distributed" in code.co_filename or any(word in line for word in _WAITS)
    return f"{Path(code.co_filename).name}:{number} in {code.co_name}", waits


def publish(
    board: NoteStore,
    owner: weakref.ref[Any],
    note: Callable[[Any, int], Note],
    wake: threading.Event,
    ended: threading.Event,
) -> None:
    """Write an owner's notes as long as it lives, when woken and at every heartbeat: the target of a thread."""
    beat, alive = 0, True
    while alive and not ended.is_set():
        wake.wait(HEARTBEAT)
        wake.clear()
        target = owner()
        if target is None:
            return
        beat += 1
        alive = board.write(note(target, beat))
        del target
        sleep(board.pause)
