"""A thread that writes and shows what training notes, so that training waits for neither disk nor terminal."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import sleep
from typing import Protocol

from galvatron_lite.runs.schema import Record
from galvatron_lite.world import Finishing

PAUSE = 0.1
"""Seconds in which what comes is taken together."""
_PATIENCE = 10.0


class Sink(Protocol):
    """Where records go."""

    def take(self, records: Sequence[Record]) -> None:
        """Some more of them, in order."""

    def close(self) -> None:
        """There are no more."""


class RecordWriter(Finishing):
    """Hands records to sinks. One that fails is told once, and given no more: training goes on.

    Args:
        sinks: where records go.

    Attributes:
        closing: called when the run ends, before the last records are written.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        super().__init__(daemon=True, name="galvatron-live")
        self._sinks, self._queue = list(sinks), SimpleQueue[Record]()
        self._wake, self._ended = threading.Event(), threading.Event()
        self.closing: Callable[[], None] = lambda: None
        atexit.register(self.finish)
        self.start()

    def put(self, record: Record) -> None:
        """One more; returns at once."""
        self._queue.put(record)
        self._wake.set()

    def run(self) -> None:
        """What the thread does."""
        while not self._ended.is_set():
            self._wake.wait()
            self._wake.clear()
            self._hand_on()
            if not self._ended.is_set():
                sleep(PAUSE)
        self._hand_on()
        for sink in self._sinks:
            self._tried(sink, None)

    def finish(self) -> None:
        """Write what there is, and end."""
        atexit.unregister(self.finish)
        if not self._ended.is_set():
            self.closing()
        self._ended.set()
        self._wake.set()
        if threading.current_thread() is not self:
            self.join(_PATIENCE)

    def _hand_on(self) -> None:
        records: list[Record] = []
        try:
            while True:
                records.append(self._queue.get_nowait())
        except Empty:
            pass
        if records:
            self._sinks = [sink for sink in self._sinks if self._tried(sink, records)]

    def _tried(self, sink: Sink, records: Sequence[Record] | None) -> bool:
        """Whether a sink took records; or, where there are none, was closed."""
        try:
            if records is None:
                sink.close()
            else:
                sink.take(records)
        except Exception as error:
            warnings.warn(f"{type(sink).__name__} takes no more of the run's records: {error}", stacklevel=2)
            return False
        return True
