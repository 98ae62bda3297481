"""Notes of where each rank is in its step, and the error messages that are derived from them.

Notes are exchanged through a store, never by collectives, so that they can be read while a collective hangs.
"""

from __future__ import annotations

import json
import linecache
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from time import sleep
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from galvatron_lite.plans.schema import Plan
from galvatron_lite.units import format_budget, format_bytes

HEARTBEAT = 0.5
"""Seconds after which a note is written again although nothing changed."""
LISTEN = 3 * HEARTBEAT
"""Seconds without a new note after which a process is considered gone."""
_PAUSE, _PAUSE_PER_RANK = 0.05, 0.0005
"""Least seconds between two notes of a rank, fixed and per rank of the world: one process stores the notes of all."""
_SLEEPS = 10
_STORE_TIMEOUT = timedelta(seconds=5)
_WAITING_CALLS = ("wait(", "synchronize(", ".item()", "isfinite()")
EXHAUSTED = (torch.OutOfMemoryError, MemoryError)
_HOST_EXHAUSTED = ("can't allocate memory", "cannot allocate memory", "not enough memory")
"""Messages of the plain RuntimeError that torch raises if host memory is exhausted."""
REMEDY = (
    "This process cannot go on: start all processes again (galvatron launch --max-restarts 3 does) and resume from the "
    "last checkpoint with load_latest(folder), which fewer processes can do too."
)


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


_PASSES = (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.WEIGHT)
_ORDER = tuple(StepPhase)
_OUTSIDE_STEPS = (StepPhase.SAVING, StepPhase.SWITCHING)


@dataclass(frozen=True, slots=True)
class Note:
    """Where a rank is."""

    step: int  # the current step, or the next one
    phase: StepPhase
    number: int = -1  # micro-batch; -1: none
    beat: int = 0  # counts the notes of a process
    seconds: float = 0.0  # since the phase began
    error: str = ""  # the error with which it left the step
    victim: bool = False  # whether another rank caused that error
    at: str = ""  # the current line of code, once the phase takes long
    waits: bool = False  # whether that line waits for other ranks
    process: str = ""  # host and process id
    memory: int = 0  # peak bytes that its allocator held; 0: not known


Notes = Sequence[Note | None]
"""The notes of all ranks; None: a rank has written none."""


class NoteStore:
    """A store of notes that all ranks can reach. All ranks create it together."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._opened = _open_store() if self.rank == 0 else None  # the store lives as long as this reference
        box: list[Any] = [None if self._opened is None else self._opened[:3]]
        dist.broadcast_object_list(box)
        self._address: tuple[str, int, str] = box[0]
        self._store = self._connect()

    @property
    def pause(self) -> float:
        """Seconds between two notes of a rank."""
        return max(_PAUSE, self.world * _PAUSE_PER_RANK)

    def write(self, note: Note) -> bool:
        """Replace this rank's note. Return False if the store is gone."""
        try:
            if self._store is not None:
                self._store.set(str(self.rank), json.dumps(asdict(note)))
        except RuntimeError:
            return False
        return self._store is not None

    def read(self) -> Notes | None:
        """Return the notes of all ranks, or None if the store is gone."""
        store = self._connect()  # a connection of its own, as any thread may read
        try:
            return None if store is None else [_read_note(store, str(rank)) for rank in range(self.world)]
        except RuntimeError:
            return None

    def listen(self) -> tuple[Notes, Notes] | None:
        """Return the notes of all ranks now, and after each live process had the time to write a new one."""
        before = self.read()
        if before is None:
            return None
        # several short sleeps: if the machine stalls, only one of them is lost to the stall
        for _ in range(_SLEEPS):
            sleep(max(LISTEN, 3 * self.pause) / _SLEEPS)
        after = self.read()
        return None if after is None else (before, after)

    def _connect(self) -> Store | None:
        host, port, name = self._address
        try:
            return PrefixStore(name, TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT))
        except RuntimeError:
            return None


def _open_store() -> tuple[str, int, str, Store]:
    """The launcher's store if it can be reached, as it outlives this process; else a store of this process."""
    host, port, name = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), f"watch-{uuid4().hex}"
    if host and port.isdigit():
        try:
            return host, int(port), name, TCPStore(host, int(port), is_master=False, timeout=_STORE_TIMEOUT)
        except RuntimeError:
            pass
    store = TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
    return socket.gethostname(), store.port, name, store


def _read_note(store: Store, key: str) -> Note | None:
    if not store.check([key]):
        return None
    data = json.loads(store.get(key))
    return Note(**{**data, "phase": StepPhase(data["phase"])})


def line_of(thread: int) -> tuple[str, bool]:
    """The line of code that a thread of this process runs, and whether it waits for other ranks there."""
    frame = sys._current_frames().get(thread)  # documented for finding deadlocks
    if frame is None:
        return "", False
    code, number = frame.f_code, frame.f_lineno or 0  # None between lines
    # a frame keeps its variables: a gradient held here is copied by autograd in the other thread, not moved
    del frame
    line = linecache.getline(code.co_filename, number)
    waits = "torch/distributed" in code.co_filename or any(call in line for call in _WAITING_CALLS)
    return f"{Path(code.co_filename).name}:{number} in {code.co_name}", waits


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that the others may be waiting for."""

    rank: int
    operation: str  # where it is in its step
    message: str  # for people


def operation_of(note: Note) -> str:
    """Describe where a rank is."""
    if note.phase is StepPhase.BETWEEN:
        return f"between steps {note.step - 1} and {note.step}" if note.step else "before step 0"
    suffix = f" of micro-batch {note.number}" if note.number >= 0 else ""
    return f"step {note.step}, {note.phase.value}{suffix}"


def suspects(before: Notes, after: Notes, asking_rank: int) -> list[Suspect]:
    """Return the ranks that are gone or failed by themselves; if there are none, those behind all others.

    Args:
        before: notes of all ranks.
        after: the same, after each live process had the time to write a new one.
        asking_rank: is no suspect.
    """
    others = [rank for rank in range(len(after)) if rank != asking_rank]
    failed = [suspect for rank in others if (suspect := _failure(rank, before[rank], after[rank])) is not None]
    if failed:
        return failed
    asking, notes = after[asking_rank], {rank: note for rank in others if (note := after[rank]) is not None}
    elsewhere = {rank: note for rank, note in notes.items() if _calls_another(note, asking)}
    if elsewhere:
        remedy = "all ranks must save, load and switch after the same step, so give each the same number of batches."
        return [_suspect(rank, note, f"is in {operation_of(note)}: {remedy}") for rank, note in elsewhere.items()]
    notes = {rank: note for rank, note in notes.items() if not note.victim}
    least = min((_progress(note) for note in (*notes.values(), asking) if note is not None), default=None)
    behind = {rank: note for rank, note in notes.items() if _progress(note) == least}
    busy = {rank: note for rank, note in behind.items() if not note.waits}
    return [
        _suspect(rank, note, f"runs, but has been in {operation_of(note)} for {note.seconds:.3g} s{_line(note)}.")
        for rank, note in (busy or behind).items()
    ]


def _suspect(rank: int, note: Note, words: str) -> Suspect:
    return Suspect(rank, operation_of(note), f"Rank {rank} ({note.process}) {words}")


def _failure(rank: int, before: Note | None, after: Note | None) -> Suspect | None:
    """A rank whose process has ended, or that left its step with an error that no other rank caused."""
    if after is None:
        return Suspect(rank, "start", f"Rank {rank} has not come to its first step.")
    operation = operation_of(after)
    if after.error:
        return None if after.victim else _suspect(rank, after, f"failed in {operation}: {after.error}.")
    if before is not None and before.beat == after.beat:
        return _suspect(rank, after, f"is gone; it was last seen in {operation}{_line(after)}.")
    return None


def _calls_another(note: Note, other: Note | None) -> bool:
    """Whether one of two ranks saves or changes the plan while the other trains, as if its data had ended early."""
    if other is None or note.phase in (other.phase, StepPhase.BETWEEN):
        return False
    return note.phase in _OUTSIDE_STEPS or other.phase in _OUTSIDE_STEPS


def _progress(note: Note) -> tuple[int, int]:
    """How far a rank is. All passes are equal, as each rank of a pipeline has another order of passes."""
    return note.step, _ORDER.index(_PASSES[0] if note.phase in _PASSES else note.phase)


def _line(note: Note) -> str:
    return f", at {note.at}" if note.at else ""


def message(note: Note, reason: str, suspects: Sequence[Suspect], has_notes: bool, rank: int) -> str:
    """The error message of a rank that waited in vain; ``has_notes``: whether the notes of the others could be read."""
    head = f"Rank {rank} waited in vain for other ranks in {operation_of(note)} ({reason})."
    if not has_notes:
        who = "The notes of the others are lost: the process that stores them (the launcher, or rank 0) is gone too."
    elif not suspects:
        who = "No rank is behind: look at the network between them."
    else:
        ranks = ", ".join(str(suspect.rank) for suspect in suspects)
        who = f"{' '.join(suspect.message for suspect in suspects)} Look at the log of rank {ranks} for why."
    return f"{head} {who} {REMEDY}"


def ran_out(error: BaseException) -> bool:
    """Whether an error means that memory is exhausted, on a device or on the host."""
    if isinstance(error, EXHAUSTED):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _HOST_EXHAUSTED)


def exhausted(rank: int, operation: str, plan: Plan, stage: int, device: torch.device) -> str:
    """The error message of a rank whose memory was exhausted in an operation."""
    predicted = plan.stages[min(stage, len(plan.stages) - 1)].memory.total
    prediction = (
        f"The plan predicts {format_bytes(predicted)}" if predicted else "The plan (written by hand) predicts nothing"
    )
    less = format_budget(predicted * 9 // 10) if predicted else "80%"
    return (
        f"Memory of {device} ran out on rank {rank} in {operation}. {prediction} for this device; "
        f"{_memory_use(device)}. End what else uses this memory; or plan anew with less (galvatron plan --mem {less}, "
        "a smaller --batch, more devices), or train with adapt=True, which does so by itself. Then start all processes "
        "again and resume with load_latest(folder)."
    )


def _memory_use(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        text = f"this process holds {format_bytes(reserved)} ({format_bytes(allocated)} in tensors)"
        return f"{text}, {format_bytes(free)} of {format_bytes(total)} are free"
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return "how much this process holds is not known"
    return f"this process holds {format_bytes(pages * os.sysconf('SC_PAGE_SIZE'))}"
