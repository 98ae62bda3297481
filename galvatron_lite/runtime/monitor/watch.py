"""Watching the steps of a model: noting where this rank is, and naming the rank that the others wait for in vain.

A note costs the training thread two assignments; another thread writes it to the store. If a collective fails (gloo),
the rank raises ``PeerError``. NCCL instead ends the process from a thread of its own; before that happens, the thread
here logs which rank is behind.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from galvatron_lite.errors import ExhaustedError, GalvatronError, LaunchError, PeerError
from galvatron_lite.runtime.monitor.notes import (
    HEARTBEAT,
    Note,
    Notes,
    NoteStore,
    StepPhase,
    exhausted,
    line_of,
    message,
    operation_of,
    ran_out,
    suspects,
)
from galvatron_lite.runtime.peers import Peers
from galvatron_lite.world import rank

if TYPE_CHECKING:
    from galvatron_lite.plans.schema import Plan

LOG = logging.getLogger("galvatron_lite.watch")
DEFAULT_TIMEOUT = {"cuda": 600.0, "cpu": 1800.0}
"""Seconds until torch's process groups give up a collective (NCCL, gloo)."""
_REPORT_AFTER = 0.8
"""Share of the timeout after which the ranks that are behind are logged."""
_LOST = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "broken pipe")


class Watch:
    """Watches the steps of a model on one rank.

    Args:
        device: of this rank.
        timeout: seconds after which a collective fails; None: torch's default.
        reports: whether to log which ranks are behind before that; None: only on GPUs.

    Attributes:
        group: all ranks, for the sums at the end of every step; None: the default group.
        clock: called with every phase that begins, and with None when this rank waits for another stage.
        memory: peak bytes that this rank's allocator held, shown to the other ranks; 0: not known.
    """

    def __init__(self, device: torch.device, timeout: float | None = None, reports: bool | None = None) -> None:
        self._device, self._timeout = device, timeout or DEFAULT_TIMEOUT.get(device.type, 600.0)
        self._reports = device.type == "cuda" if reports is None else reports
        process = f"{socket.gethostname()}, process {os.getpid()}"
        self._note, self._since = Note(0, StepPhase.BETWEEN, process=process), monotonic()
        self._board: NoteStore | None = None
        self._arrivals: Peers | None = None
        self._limited = timeout is not None
        self.group: Any = None
        self.clock: Callable[[StepPhase | None], None] | None = None
        self.memory = 0
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread, self._reported = 0, False

    def at(self, phase: StepPhase, number: int = -1, step: int | None = None) -> None:
        """Note that this rank begins a phase of a micro-batch (-1: none) in a step (None: the current one)."""
        self._note = replace(self._note, phase=phase, number=number, step=self._note.step if step is None else step)
        self._since = monotonic()
        self._wake.set()
        if self.clock is not None:
            self.clock(phase)

    def waits(self) -> None:
        """Note that this rank begins to wait for another stage, until ``goes_on``."""
        if self.clock is not None:
            self.clock(None)

    def goes_on(self) -> None:
        """Note that the message of the other stage has arrived."""
        if self.clock is not None:
            self.clock(self._note.phase)

    def notes(self) -> Notes:
        """The notes of all ranks, or this rank's alone if the others cannot be read. Any thread may call it."""
        notes = None if self._board is None else self._board.read()
        return [self._note] if notes is None else notes

    @property
    def operation(self) -> str:
        """A description of where this rank is."""
        return operation_of(self._note)

    @contextmanager
    def explained(self, step: int, plan: Plan, stage: int, phase: StepPhase = StepPhase.FORWARD) -> Iterator[None]:
        """Return a context for a step, or another operation that begins with ``phase``, whose errors name who failed.

        Raises:
            PeerError: another rank is gone, failed or hangs.
            ExhaustedError: memory is exhausted on this rank.
        """
        self._begin(step, phase)
        try:
            if self._arrivals is not None and phase not in (StepPhase.BATCH, StepPhase.FORWARD):
                # the others may be in a step, in groups with another timeout
                self._arrivals.everyone(None)
            yield
        except GalvatronError as error:
            cause = error.__cause__ if type(error) is LaunchError else None
            if cause is not None and _is_lost(cause):
                raise self._peer_error(cause) from error
            self._leave(error)
            raise
        except BaseException as error:
            if ran_out(error):
                exhaustion = ExhaustedError(exhausted(rank(), self.operation, plan, stage, self._device))
                self._leave(exhaustion)
                raise exhaustion from error
            if _is_lost(error):
                raise self._peer_error(error) from error
            self._leave(error)
            raise
        self.at(StepPhase.BETWEEN, step=step + (phase is StepPhase.FORWARD))

    def _begin(self, step: int, phase: StepPhase) -> None:
        if self._board is None and dist.get_world_size() > 1:
            self._thread = threading.get_ident()
            self._board = NoteStore()
            self._arrivals = Peers(self._timeout)
            if self._limited:
                self.group = dist.new_group(timeout=timedelta(seconds=self._timeout), group_desc="step")
            self._board.write(self._note)
            arguments = weakref.ref(self), self._board, self._wake, self._ended
            thread = threading.Thread(target=_write_notes, args=arguments, daemon=True, name="galvatron-watch")
            thread.start()
            atexit.register(_join, thread, self._ended, self._wake)
        self._note, self._reported = replace(self._note, error="", victim=False), False
        self.at(phase, step=step)

    def _complete_note(self, beat: int) -> Note:
        """The note as it is written; also starts the report of the ranks that are behind when it is due."""
        note, seconds = self._note, monotonic() - self._since
        at, waits = line_of(self._thread) if seconds > HEARTBEAT else ("", False)
        silent = note.phase is StepPhase.BETWEEN or note.error or not self._reports or self._reported
        if not silent and seconds >= _REPORT_AFTER * self._timeout:
            self._reported = True
            reason = f"for {seconds:.3g} s; the time-out is {self._timeout:g} s"
            # in another thread, as this one must continue to write notes meanwhile
            threading.Thread(target=lambda: LOG.error("%s", self._explanation(reason)[0]), daemon=True).start()
        return replace(note, beat=beat, seconds=seconds, at=at, waits=waits, memory=self.memory)

    def _peer_error(self, cause: BaseException) -> PeerError:
        """The error for a collective that failed because of another rank."""
        self._leave(cause, victim=True)
        return PeerError(*self._explanation(_reason(cause)))

    def _explanation(self, reason: str) -> tuple[str, tuple[int, ...], str]:
        """The message of ``PeerError``, the ranks that it names, and their operation."""
        note, board = self._note, self._board
        notes = None if board is None else board.listen()
        suspected = [] if notes is None else suspects(*notes, rank())
        operation = suspected[0].operation if suspected else operation_of(note)
        text = message(note, reason, suspected, notes is not None, rank())
        return text, tuple(suspect.rank for suspect in suspected), operation

    def _leave(self, error: BaseException, victim: bool = False) -> None:
        """Write the error for the others at once, as this process may end next."""
        victim = victim or isinstance(error, PeerError)
        self._note = replace(self._note, error=f"{type(error).__name__}: {_reason(error)}", victim=victim)
        if self._board is not None:
            self._board.write(replace(self._note, seconds=monotonic() - self._since))


def _write_notes(owner: weakref.ref[Watch], board: NoteStore, wake: threading.Event, ended: threading.Event) -> None:
    """Write the notes of a watch as long as it exists, when woken and at every heartbeat. The target of a thread."""
    beat, alive = 0, True
    while alive and not ended.is_set():
        wake.wait(HEARTBEAT)
        wake.clear()
        watch = owner()
        if watch is None:
            return
        beat += 1
        alive = board.write(watch._complete_note(beat))
        del watch
        sleep(board.pause)


def _join(thread: threading.Thread, ended: threading.Event, wake: threading.Event) -> None:
    """End the thread: if it were in torch when the interpreter shuts down, it would abort the process."""
    ended.set()
    wake.set()
    thread.join(1.0)


def _is_lost(error: BaseException) -> bool:
    """Whether a collective failed because of another rank; torch has no single error type for that."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)


def _reason(error: BaseException) -> str:
    """The first sentence of an error, without the position in torch's source."""
    line = (str(error).splitlines() or [""])[0]
    return line.split("] ", 1)[-1].split(". ")[0][:200].rstrip(".")
