"""Watches the steps of a model: notes where this rank is, and names the rank that others wait for in vain.

A note costs the training thread two assignments; a thread writes it. Processes whose collectives fail (gloo) raise
``PeerError``. NCCL ends a process where a collective takes too long, from a thread of its own; before that, the thread
here logs who is behind (``reports``).
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
"""Seconds: those of torch's process groups (NCCL, gloo)."""
_REPORT_AFTER = 0.8
"""Share of the time-out after which it is logged who is behind."""
_LOST = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "broken pipe")


class Watch:
    """Of one model, on one rank.

    Args:
        device: of this rank.
        timeout: seconds after which a collective is given up; None: torch's own.
        reports: whether the thread logs who is behind before that; where NCCL trains, if not given.

    Attributes:
        group: all ranks, for sums after every step; None: the default group.
        clock: called with every phase that begins, and with None where the rank waits for another stage.
        memory: peak bytes that this rank's allocator held, for the others; 0: not known.
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
        """This rank begins a phase of a micro-batch (-1: of none) of a step (None: of the present one)."""
        self._note = replace(self._note, phase=phase, number=number, step=self._note.step if step is None else step)
        self._since = monotonic()
        self._wake.set()
        if self.clock is not None:
            self.clock(phase)

    def waits(self) -> None:
        """From here this rank waits for another stage; ``goes_on`` ends it."""
        if self.clock is not None:
            self.clock(None)

    def goes_on(self) -> None:
        """The other stage's message has arrived."""
        if self.clock is not None:
            self.clock(self._note.phase)

    def notes(self) -> Notes:
        """The notes of all ranks, as far as they can be read; any thread may call it."""
        notes = None if self._board is None else self._board.read()
        return [self._note] if notes is None else notes

    @property
    def operation(self) -> str:
        """Where this rank is, in words."""
        return operation_of(self._note)

    @contextmanager
    def explained(self, step: int, plan: Plan, stage: int, phase: StepPhase = StepPhase.FORWARD) -> Iterator[None]:
        """Run a step, or another operation of all ranks that begins with a phase, whose errors name the rank at fault.

        Raises:
            PeerError: another rank is gone, failed or hangs.
            ExhaustedError: memory ran out on this rank.
        """
        self._begin(step, phase)
        try:
            if self._arrivals is not None and phase not in (StepPhase.BATCH, StepPhase.FORWARD):
                # others may be in a step, in groups of another time-out
                self._arrivals.everyone(None)
            yield
        except BaseException as error:
            named: BaseException = error
            ours = isinstance(error, GalvatronError)
            cause = error.__cause__ if type(error) is LaunchError else None if ours else error
            if ran_out(error) and not ours:
                named = ExhaustedError(exhausted(rank(), self.operation, plan, stage, self._device))
            elif cause is not None and _is_lost(cause):
                self._leave(cause, victim=True)
                raise PeerError(*self._explanation(_reason(cause))) from error
            self._leave(named)
            if named is error:
                raise
            raise named from error
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
            thread = threading.Thread(target=_publish, args=arguments, daemon=True, name="galvatron-watch")
            thread.start()
            atexit.register(_end, thread, self._ended, self._wake)
        self._note, self._reported = replace(self._note, error="", victim=False), False
        self.at(phase, step=step)

    def _written(self, beat: int) -> Note:
        """The note as others read it; also logs who is behind, where that is due."""
        note, seconds = self._note, monotonic() - self._since
        at, waits = line_of(self._thread) if seconds > HEARTBEAT else ("", False)
        silent = note.phase is StepPhase.BETWEEN or note.error or not self._reports or self._reported
        if not silent and seconds >= _REPORT_AFTER * self._timeout:
            self._reported = True
            reason = f"for {seconds:.3g} s; the time-out is {self._timeout:g} s"
            # this thread must go on writing notes while the others are listened to
            threading.Thread(target=lambda: LOG.error("%s", self._explanation(reason)[0]), daemon=True).start()
        return replace(note, beat=beat, seconds=seconds, at=at, waits=waits, memory=self.memory)

    def _explanation(self, reason: str) -> tuple[str, tuple[int, ...], str]:
        """The message, the ranks that it names, and their operation."""
        note, board = self._note, self._board
        notes = None if board is None else board.listen()
        suspected = [] if notes is None else suspects(*notes, rank())
        operation = suspected[0].operation if suspected else operation_of(note)
        text = message(note, reason, suspected, notes is not None, rank())
        return text, tuple(suspect.rank for suspect in suspected), operation

    def _leave(self, error: BaseException, victim: bool = False) -> None:
        """Tell the others at once: this process may end next."""
        victim = victim or isinstance(error, PeerError)
        self._note = replace(self._note, error=f"{type(error).__name__}: {_reason(error)}", victim=victim)
        if self._board is not None:
            self._board.write(replace(self._note, seconds=monotonic() - self._since))


def _publish(owner: weakref.ref[Watch], board: NoteStore, wake: threading.Event, ended: threading.Event) -> None:
    """Write a watch's notes as long as it lives, when woken and at every heartbeat: the target of a thread."""
    beat, alive = 0, True
    while alive and not ended.is_set():
        wake.wait(HEARTBEAT)
        wake.clear()
        watch = owner()
        if watch is None:
            return
        beat += 1
        alive = board.write(watch._written(beat))
        del watch
        sleep(board.pause)


def _end(thread: threading.Thread, ended: threading.Event, wake: threading.Event) -> None:
    """Join the thread: within torch, when the interpreter shuts down, it would abort the process."""
    ended.set()
    wake.set()
    thread.join(1.0)


def _is_lost(error: BaseException) -> bool:
    """Whether a collective failed because of another rank: torch has no single type for that."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)


def _reason(error: BaseException) -> str:
    """The first sentence of an error, without the place in torch's own source."""
    line = (str(error).splitlines() or [""])[0]
    return line.split("] ", 1)[-1].split(". ")[0][:200].rstrip(".")
