"""Which rank is why a step cannot be finished, from the notes of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galvatron_lite.runtime.watch.notes import Note, StepPhase

Notes = Sequence[Note | None]
_PASSES = (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.WEIGHT)
_ORDER = tuple(StepPhase)
_MEETINGS = (StepPhase.SAVING, StepPhase.SWITCHING)
REMEDY = (
    "This process cannot go on: start all processes again (galvatron launch --max-restarts 3 does) and resume from the "
    "last checkpoint with load_latest(folder), which fewer processes can do too."
)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that others wait for."""

    rank: int  # of it
    operation: str  # where it is in its step
    said: str  # what is known of it, for people


def operation_of(note: Note) -> str:
    """Where a rank is, in words."""
    if note.phase is StepPhase.BETWEEN:
        return f"between steps {note.step - 1} and {note.step}" if note.step else "before step 0"
    behind = f" of micro-batch {note.number}" if note.number >= 0 else ""
    return f"step {note.step}, {note.phase.value}{behind}"


def suspects(before: Notes, after: Notes, asking_rank: int) -> list[Suspect]:
    """Ranks that are gone or failed by themselves; where there are none, those that are behind all others.

    Args:
        before: notes of all ranks.
        after: the same, once all processes that run had the time to write a new one.
        asking_rank: rank that asks.
    """
    others = [rank for rank in range(len(after)) if rank != asking_rank]
    first = [one for rank in others if (one := _failed(rank, before[rank], after[rank])) is not None]
    if first:
        return first
    apart = {
        rank: note for rank in others if (note := after[rank]) is not None and _calls_another(note, after[asking_rank])
    }
    if apart:
        return [Suspect(rank, operation_of(note), _elsewhere(rank, note)) for rank, note in apart.items()]
    held = {rank: note for rank in others if (note := after[rank]) is not None and not note.victim}
    me = after[asking_rank]
    least = min((_progress(note) for note in (*held.values(), me) if note is not None), default=None)
    behind = {rank: note for rank, note in held.items() if _progress(note) == least}
    busy = {rank: note for rank, note in behind.items() if not note.waits}
    return [Suspect(rank, operation_of(note), _busy(rank, note)) for rank, note in (busy or behind).items()]


def _failed(rank: int, before: Note | None, after: Note | None) -> Suspect | None:
    """A rank that does not run any more, or left its step by an error of its own."""
    if after is None:
        return Suspect(rank, "start", f"Rank {rank} has not come to its first step.")
    where = operation_of(after)
    if after.error:
        said = f"Rank {rank} ({after.process}) failed in {where}: {after.error}."
        return None if after.victim else Suspect(rank, where, said)
    if before is not None and before.beat == after.beat:
        return Suspect(
            rank, where, f"Rank {rank} ({after.process}) is gone; it was last seen in {where}{_line(after)}."
        )
    return None


def _calls_another(note: Note, other: Note | None) -> bool:
    """Whether one of two ranks saves or changes the plan while the other trains, as when its data end early."""
    if other is None or note.phase in (other.phase, StepPhase.BETWEEN):
        return False
    return note.phase in _MEETINGS or other.phase in _MEETINGS


def _elsewhere(rank: int, note: Note) -> str:
    return (
        f"Rank {rank} ({note.process}) is in {operation_of(note)}: all ranks save, load and switch after the same "
        "step, so give them equally many batches."
    )


def _progress(note: Note) -> tuple[int, int]:
    """How far a rank is. Passes are alike: in a pipeline they come in another order on every rank."""
    return note.step, _ORDER.index(_PASSES[0] if note.phase in _PASSES else note.phase)


def _busy(rank: int, note: Note) -> str:
    where = f"{operation_of(note)} for {note.seconds:.3g} s{_line(note)}"
    return f"Rank {rank} ({note.process}) runs, but has been in {where}."


def _line(note: Note) -> str:
    return f", at {note.at}" if note.at else ""


def message(note: Note, reason: str, suspects: Sequence[Suspect], kept: bool, rank: int) -> str:
    """What a rank says that waited in vain.

    Args:
        note: where it waited.
        reason: what torch said.
        suspects: who is why.
        kept: whether the notes could be read.
        rank: which waited.
    """
    head = f"Rank {rank} waited in vain for other ranks in {operation_of(note)} ({reason})."
    if not kept:
        who = (
            "Nothing is known of the others: the process that keeps their notes (the launcher, or rank 0) is gone too."
        )
    elif not suspects:
        who = "No rank is behind: look at the network between them."
    else:
        who = " ".join(one.said for one in suspects)
    look = f" Look at the log of rank {', '.join(str(one.rank) for one in suspects)} for why." if suspects else ""
    return f"{head} {who}{look} {REMEDY}"
