"""Watches the steps of a model: notes where this rank is, and names the rank that others wait for in vain.

A note costs the training thread two assignments; a thread writes it. Processes whose collectives fail (gloo) raise
``PeerError``. NCCL ends a process where a collective takes too long, from a thread of its own; before that, the thread
here logs who is behind (``reports``).
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from galvatron_lite.errors import ExhaustedError, GalvatronError, LaunchError, PeerError
from galvatron_lite.runtime.peers import ProcessPeers
from galvatron_lite.runtime.watch.blame import message, operation_of, suspects
from galvatron_lite.runtime.watch.memory import exhausted, ran_out
from galvatron_lite.runtime.watch.notes import HEARTBEAT, Board, Note, StepPhase, line_of, process_name, publish

if TYPE_CHECKING:
    from galvatron_lite.plans.schema import Plan

LOG = logging.getLogger("galvatron_lite.watch")
DEFAULT_TIMEOUT = {"cuda": 600.0, "cpu": 1800.0}
"""Seconds: those of torch's process groups (NCCL, gloo)."""
_BEFORE = 0.8
"""Share of the time-out after which it is said who is behind."""
_LOST = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "broken pipe")


class Watch:
    """Of one model, on one rank.

    Attributes:
        group: all ranks, for what they sum behind every step; None: the default group.
        clock: is told of every phase that begins, and by None that the rank waits for another stage; None: nothing is.
        memory: peak bytes that this rank's allocator held, for the others; 0: not known.

    Args:
        device: of this rank.
        timeout: seconds after which a collective is given up; None: torch's own.
        reports: whether the thread logs who is behind before that; where NCCL trains, if not given.
    """

    def __init__(self, device: torch.device, timeout: float | None = None, reports: bool | None = None) -> None:
        self._device, self._timeout = device, timeout or DEFAULT_TIMEOUT.get(device.type, 600.0)
        self._reports = device.type == "cuda" if reports is None else reports
        self._note, self._since = Note(0, StepPhase.BETWEEN, process=process_name()), monotonic()
        self._board: Board | None = None
        self._arrivals: ProcessPeers | None = None
        self._limited = timeout is not None
        self.group: Any = None
        self.clock: Callable[[StepPhase | None], None] | None = None
        self.memory = 0
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread, self._reported = 0, False

    def at(self, phase: StepPhase, number: int = -1, step: int | None = None) -> None:
        """This rank comes to a phase.

        Args:
            phase: of the step.
            number: micro-batch; -1: none.
            step: which; that under way if not given.
        """
        self._note = replace(self._note, phase=phase, number=number, step=self._note.step if step is None else step)
        self._since = monotonic()
        self._wake.set()
        if self.clock is not None:
            self.clock(phase)

    def waits(self) -> None:
        """From here this rank waits for what another stage sends; ``goes_on`` once it is there."""
        if self.clock is not None:
            self.clock(None)

    def goes_on(self) -> None:
        """What was waited for is there."""
        if self.clock is not None:
            self.clock(self._note.phase)

    def notes(self) -> list[Note | None]:
        """Where all ranks are, as far as they can be heard; any thread may ask."""
        heard = None if self._board is None else self._board.read()
        return [self._note] if heard is None else heard

    @property
    def operation(self) -> str:
        """Where this rank is, in words."""
        return operation_of(self._note)

    @contextmanager
    def explained(self, step: int, plan: Plan, stage: int, phase: StepPhase = StepPhase.FORWARD) -> Iterator[None]:
        """Run a step, or another operation of all ranks, whose errors say which rank is why.

        Args:
            step: which.
            plan: of the model.
            stage: of this rank.
            phase: that it begins with.

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
        except GalvatronError as error:
            cause = error.__cause__
            if type(error) is LaunchError and isinstance(cause, Exception) and _is_lost(cause):
                raise self._lost(cause) from error
            self._leave(error)
            raise
        except Exception as error:
            if ran_out(error):
                short = ExhaustedError(exhausted(_rank(), self.operation, plan, stage, self._device))
                self._leave(short)
                raise short from error
            if not _is_lost(error):
                self._leave(error)
                raise
            raise self._lost(error) from error
        except BaseException as error:
            self._leave(error)
            raise
        self.at(StepPhase.BETWEEN, step=step + (phase is StepPhase.FORWARD))

    def _begin(self, step: int, phase: StepPhase) -> None:
        if self._board is None and dist.get_world_size() > 1:
            self._thread = threading.get_ident()
            self._board = Board()
            self._arrivals = ProcessPeers(self._timeout)
            if self._limited:
                self.group = dist.new_group(timeout=timedelta(seconds=self._timeout), group_desc="step")
            self._board.write(self._note)
            arguments = (self._board, weakref.ref(self), Watch.written, self._wake, self._ended)
            thread = threading.Thread(target=publish, args=arguments, daemon=True, name="galvatron-watch")
            thread.start()
            atexit.register(partial(_end, thread, self._ended, self._wake))
        self._note, self._reported = replace(self._note, error="", victim=False), False
        self.at(phase, step=step)

    def written(self, beat: int) -> Note:
        """The note as others read it; also reports, where that is due."""
        note, seconds = self._note, monotonic() - self._since
        at, waits = line_of(self._thread) if seconds > HEARTBEAT else ("", False)
        if self._reports and not self._reported and note.phase is not StepPhase.BETWEEN and not note.error:
            self._report(seconds)
        return replace(note, beat=beat, seconds=seconds, at=at, waits=waits, memory=self.memory)

    def _report(self, seconds: float) -> None:
        """Log who is behind, once for each place, shortly before the collective is given up."""
        if seconds < _BEFORE * self._timeout:
            return
        self._reported = True
        # the thread that writes notes must go on while it is listened to the others
        reason = f"for {seconds:.3g} s; the time-out is {self._timeout:g} s"
        threading.Thread(target=lambda: LOG.error("%s", self._explanation(reason)[0]), daemon=True).start()

    def _explanation(self, reason: str) -> tuple[str, tuple[int, ...], str]:
        """What is said, the ranks that are named, and their operation."""
        own, board = self._note, self._board
        heard = None if board is None else board.listen()
        found = [] if heard is None else suspects(*heard, _rank())
        operation = found[0].operation if found else operation_of(own)
        said = message(own, reason, found, heard is not None, _rank())
        return said, tuple(one.rank for one in found), operation

    def _lost(self, error: Exception) -> PeerError:
        self._leave(error, victim=True)
        return PeerError(*self._explanation(_reason(error)))

    def _leave(self, error: BaseException, victim: bool = False) -> None:
        """Tell the others at once: this process may end next."""
        victim = victim or isinstance(error, PeerError)
        self._note = replace(self._note, error=f"{type(error).__name__}: {_reason(error)}", victim=victim)
        if self._board is not None:
            self._board.write(replace(self._note, seconds=monotonic() - self._since))


def _end(thread: threading.Thread, ended: threading.Event, wake: threading.Event) -> None:
    """A thread that is within torch when the interpreter shuts down would abort the process."""
    ended.set()
    wake.set()
    thread.join(1.0)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _is_lost(error: BaseException) -> bool:
    """Whether a collective failed because of another rank: torch has no one type for that."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)


def _reason(error: BaseException) -> str:
    """The first sentence of an error, without the place in torch's own source."""
    line = (str(error).splitlines() or [""])[0]
    return line.split("] ", 1)[-1].split(". ")[0][:200].rstrip(".")
