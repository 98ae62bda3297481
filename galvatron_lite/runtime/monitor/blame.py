"""Why a step cannot be finished: the rank that the others wait for, from the notes of all; or memory that ran out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.monitor.notes import Note, StepPhase
from galvatron_lite.units import format_budget, format_bytes

Notes = Sequence[Note | None]
_PASSES = (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.WEIGHT)
_ORDER = tuple(StepPhase)
_MEETINGS = (StepPhase.SAVING, StepPhase.SWITCHING)
REMEDY = (
    "This process cannot go on: start all processes again (galvatron launch --max-restarts 3 does) and resume from the "
    "last checkpoint with load_latest(folder), which fewer processes can do too."
)
EXHAUSTED = (torch.OutOfMemoryError, MemoryError)
_ON_HOST = ("can't allocate memory", "cannot allocate memory", "not enough memory")
"""What torch says in a plain RuntimeError where the host is out of memory."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that others wait for."""

    rank: int
    operation: str  # where it is in its step
    message: str  # for people


def operation_of(note: Note) -> str:
    """Where a rank is, in words."""
    if note.phase is StepPhase.BETWEEN:
        return f"between steps {note.step - 1} and {note.step}" if note.step else "before step 0"
    suffix = f" of micro-batch {note.number}" if note.number >= 0 else ""
    return f"step {note.step}, {note.phase.value}{suffix}"


def suspects(before: Notes, after: Notes, asking_rank: int) -> list[Suspect]:
    """Ranks that are gone or failed by themselves; where there are none, those that are behind all others.

    Args:
        before: notes of all ranks.
        after: the same, once every live process had the time to write a new one.
        asking_rank: is no suspect.
    """
    others = [rank for rank in range(len(after)) if rank != asking_rank]
    failed = [suspect for rank in others if (suspect := _failed(rank, before[rank], after[rank])) is not None]
    if failed:
        return failed
    me, notes = after[asking_rank], {rank: note for rank in others if (note := after[rank]) is not None}
    elsewhere = {rank: note for rank, note in notes.items() if _calls_another(note, me)}
    if elsewhere:
        return [
            Suspect(
                rank,
                operation_of(note),
                f"Rank {rank} ({note.process}) is in {operation_of(note)}: all ranks save, load and switch after the "
                "same step, so give them equally many batches.",
            )
            for rank, note in elsewhere.items()
        ]
    notes = {rank: note for rank, note in notes.items() if not note.victim}
    least = min((_progress(note) for note in (*notes.values(), me) if note is not None), default=None)
    behind = {rank: note for rank, note in notes.items() if _progress(note) == least}
    busy = {rank: note for rank, note in behind.items() if not note.waits}
    return [
        Suspect(
            rank,
            operation_of(note),
            f"Rank {rank} ({note.process}) runs, but has been in {operation_of(note)} for {note.seconds:.3g} s"
            f"{_line(note)}.",
        )
        for rank, note in (busy or behind).items()
    ]


def _failed(rank: int, before: Note | None, after: Note | None) -> Suspect | None:
    """A rank whose process has ended, or that left its step by an error of its own."""
    if after is None:
        return Suspect(rank, "start", f"Rank {rank} has not come to its first step.")
    where = operation_of(after)
    if after.error:
        message = f"Rank {rank} ({after.process}) failed in {where}: {after.error}."
        return None if after.victim else Suspect(rank, where, message)
    if before is not None and before.beat == after.beat:
        message = f"Rank {rank} ({after.process}) is gone; it was last seen in {where}{_line(after)}."
        return Suspect(rank, where, message)
    return None


def _calls_another(note: Note, other: Note | None) -> bool:
    """Whether one of two ranks saves or changes the plan while the other trains, as when its data end early."""
    if other is None or note.phase in (other.phase, StepPhase.BETWEEN):
        return False
    return note.phase in _MEETINGS or other.phase in _MEETINGS


def _progress(note: Note) -> tuple[int, int]:
    """How far a rank is. Passes count alike: in a pipeline every rank has another order."""
    return note.step, _ORDER.index(_PASSES[0] if note.phase in _PASSES else note.phase)


def _line(note: Note) -> str:
    return f", at {note.at}" if note.at else ""


def message(note: Note, reason: str, suspects: Sequence[Suspect], kept: bool, rank: int) -> str:
    """The message of a rank that waited in vain.

    Args:
        note: where it waited.
        reason: torch's message.
        suspects: the ranks that it waited for.
        kept: whether the notes could be read.
        rank: which waited.
    """
    head = f"Rank {rank} waited in vain for other ranks in {operation_of(note)} ({reason})."
    if not kept:
        who = "The notes of the others are lost: the process that stores them (the launcher, or rank 0) is gone too."
    elif not suspects:
        who = "No rank is behind: look at the network between them."
    else:
        ranks = ", ".join(str(suspect.rank) for suspect in suspects)
        who = f"{' '.join(suspect.message for suspect in suspects)} Look at the log of rank {ranks} for why."
    return f"{head} {who} {REMEDY}"


def ran_out(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on a device or in the host."""
    if isinstance(error, EXHAUSTED):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _ON_HOST)


def exhausted(rank: int, operation: str, plan: Plan, stage: int, device: torch.device) -> str:
    """The message of a rank whose memory ran out in an operation."""
    predicted = plan.stages[min(stage, len(plan.stages) - 1)].memory.total
    prediction = (
        f"The plan predicts {format_bytes(predicted)}" if predicted else "The plan (written by hand) predicts nothing"
    )
    less = format_budget(predicted * 9 // 10) if predicted else "80%"
    return (
        f"Memory of {device} ran out on rank {rank} in {operation}. {prediction} for this device; {_taken(device)}. "
        f"End what else uses this memory; or plan anew with less (galvatron plan --mem {less}, a smaller "
        "--batch, more devices), or train with adapt=True, which does so by itself. Then start all processes again and "
        "resume with load_latest(folder)."
    )


def _taken(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        own = f"this process holds {format_bytes(held)} ({format_bytes(used)} in tensors)"
        return f"{own}, {format_bytes(free)} of {format_bytes(total)} are free"
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return "how much this process holds is not known"
    return f"this process holds {format_bytes(pages * os.sysconf('SC_PAGE_SIZE'))}"
