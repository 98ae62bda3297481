"""Sinks for the records of a run: files, TensorBoard and the terminal; and the thread that writes to them."""

from __future__ import annotations

import atexit
import json
import re
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep
from typing import IO, Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from galvatron_lite.files import to_data
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runs.schema import (
    RECENT,
    PlanRecord,
    RankHeader,
    Record,
    RunHeader,
    StepFigures,
    StepRecord,
    measured,
    predicted,
)
from galvatron_lite.units import format_bytes, format_count, format_seconds
from galvatron_lite.world import Finishing

PAUSE = 0.1
"""Seconds of records that are written together."""
_JOIN_TIMEOUT = 10.0
"""Seconds to wait for the thread to write the last records."""
TENSORBOARD_FOLDER = "tensorboard"
_SCALARS_INTERVAL = 1.0
"""Seconds between two steps that are written to TensorBoard, whose writer takes time from training."""
LARGEST = 4 * 2**20
"""Bytes after which a new file is started."""
KEPT = 16
"""Files of one name that are kept: the first and the newest."""
_REFRESH_INTERVAL = 0.25
"""Seconds between two refreshes of a terminal."""
_FIRST_INTERVAL, _LONGEST_INTERVAL = 1.0, 10.0
"""Seconds between two plain lines; the interval doubles from the first to the longest."""
_FIGURES: tuple[tuple[str, str, str, str, Callable[[Any], str]], ...] = (
    ("seconds", "seconds", "step time", "{} a step", format_seconds),
    ("samples", "samples_per_second", "samples/s", "{} samples/s", format_count),
    ("tokens", "tokens_per_second", "tokens/s", "{} tokens/s", format_count),
    ("mfu", "mfu", "MFU", "MFU {}", "{:.1%}".format),
    ("memory", "memory_bytes", "memory", "memory {}", format_bytes),
)
"""The attributes of ``StepFigures`` that are shown: name in TensorBoard, column, words in a line, and format."""


class Sink(Protocol):
    """A consumer of records."""

    def take(self, records: Sequence[Record]) -> None:
        """Consume some records, in order."""

    def close(self) -> None:
        """End: there are no more records."""


class RecordWriter(Finishing):
    """A thread that passes records to sinks, so that training waits for neither disk nor terminal.

    A sink that fails is reported once and gets no more records; training continues.

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
        """Add a record without waiting."""
        self._queue.put(record)
        self._wake.set()

    def run(self) -> None:
        """Run the thread's loop."""
        while not self._ended.is_set():
            self._wake.wait()
            self._wake.clear()
            self._write()
            if not self._ended.is_set():
                sleep(PAUSE)
        self._write()
        for sink in self._sinks:
            self._succeeds(sink, sink.close)

    def finish(self) -> None:
        """Write all records, and end the thread."""
        atexit.unregister(self.finish)
        if not self._ended.is_set():
            self.closing()
        self._ended.set()
        self._wake.set()
        if threading.current_thread() is not self:
            self.join(_JOIN_TIMEOUT)

    def _write(self) -> None:
        records = [self._queue.get() for _ in range(self._queue.qsize())]  # only this thread removes records
        if records:
            self._sinks = [sink for sink in self._sinks if self._succeeds(sink, partial(sink.take, records))]

    def _succeeds(self, sink: Sink, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as error:
            warnings.warn(f"{type(sink).__name__} takes no more of the run's records: {error}", stacklevel=2)
            return False
        return True


class LineFiles:
    """A sink that writes files ``NAME-00001.jsonl`` into a folder. Numbers continue after the files that exist.

    Args:
        folder: of the files; created if it does not exist.
        name: of the files.
        head: the first record of each file; a later header replaces it, a later plan follows it.
        kinds: the records that are written.
        largest, kept: see ``LARGEST`` and ``KEPT``.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        head: Record,
        kinds: tuple[type[Record], ...],
        largest: int = LARGEST,
        kept: int = KEPT,
    ) -> None:
        self._folder, self._name, self._kinds, self._largest, self._kept = folder, name, kinds, largest, kept
        self._head, self._size = [head], 0
        folder.mkdir(parents=True, exist_ok=True)
        self._stream: IO[str]
        self._open()

    def take(self, records: Sequence[Record]) -> None:
        """Write a line for each record, and flush them to the system."""
        records = [record for record in records if isinstance(record, self._kinds)]
        if records and self._size > self._largest:
            self._stream.close()
            self._open()
        if records:
            self._put(records)
        for record in records:
            if isinstance(record, RankHeader):
                self._head = [record]
            elif isinstance(record, PlanRecord):
                self._head = [self._head[0], record]

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _put(self, records: Sequence[Record]) -> None:
        text = "".join(_json_line(record) for record in records)
        self._stream.write(text)
        self._stream.flush()
        self._size += len(text)

    def _open(self) -> None:
        pattern = re.compile(rf"{re.escape(self._name)}-(\d+)\.jsonl")
        files = sorted(path for path in self._folder.iterdir() if pattern.fullmatch(path.name))
        for old in files[1 : max(len(files) - self._kept + 2, 1)]:
            old.unlink(missing_ok=True)
        last = pattern.fullmatch(files[-1].name) if files else None
        number = 1 if last is None else int(last[1]) + 1
        self._stream, self._size = (self._folder / f"{self._name}-{number:05d}.jsonl").open("x", encoding="utf-8"), 0
        self._put(self._head)


def _json_line(record: Record) -> str:
    if isinstance(record, (RunHeader, PlanRecord)):
        data = to_data(record)
    else:  # flat records: this takes a few microseconds, while training continues
        items = ((item, getattr(record, item.name)) for item in fields(record))
        data = {item.name: value for item, value in items if value != item.default}
    return json.dumps({"kind": record.kind, **data}, allow_nan=False) + "\n"


def scalar_writer(folder: Path) -> Any:
    """Return a ``SummaryWriter``, or None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(log_dir=str(folder))


class Scalars:
    """A sink that writes the measured and predicted figures of steps to TensorBoard."""

    def __init__(self, writer: Any, plan: Plan) -> None:
        self._writer, self._plan, self._written = writer, plan, -_SCALARS_INTERVAL

    def take(self, records: Sequence[Record]) -> None:
        """Write steps, at most one a second."""
        for record in records:
            if isinstance(record, PlanRecord):
                self._plan = record.plan
            elif isinstance(record, StepRecord) and monotonic() - self._written >= _SCALARS_INTERVAL:
                self._written = monotonic()
                self._write(record)

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()

    def _write(self, step: StepRecord) -> None:
        scalars = {} if step.loss is None else {"loss": step.loss}
        for kind, figures in (("measured", measured([step], self._plan)), ("predicted", predicted(self._plan))):
            values = ((name, getattr(figures, figure)) for figure, name, *_ in _FIGURES)
            scalars |= {f"{name}/{kind}": value for name, value in values if value}
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, global_step=step.step, walltime=step.time)


class Display:
    """A sink that shows the current step on standard error: a live table on a terminal, else plain lines."""

    def __init__(self, plan: Plan, console: Console | None = None) -> None:
        self._console = Console(stderr=True, soft_wrap=True) if console is None else console
        self._plan, self._recent = plan, deque[StepRecord](maxlen=RECENT)
        self._terminal = self._console.is_terminal and not self._console.is_jupyter
        self._live: Live | None = None
        self._shown_at, self._interval = 0.0, _REFRESH_INTERVAL if self._terminal else _FIRST_INTERVAL
        self._shown: StepRecord | None = None

    def take(self, records: Sequence[Record]) -> None:
        """Show the last step, if the last refresh is long enough ago."""
        for record in records:
            if isinstance(record, PlanRecord):
                self._plan = record.plan
                self._recent.clear()
            elif isinstance(record, StepRecord):
                self._recent.append(record)
        if self._recent and monotonic() - self._shown_at >= self._interval:
            self._show()

    def close(self) -> None:
        """Show the last step and leave it on the screen."""
        if self._recent and self._recent[-1] is not self._shown:
            self._show()
        if self._live is not None:
            self._live.stop()

    def _show(self) -> None:
        self._shown_at = monotonic()
        steps = list(self._recent)
        self._shown = steps[-1]
        if not self._terminal:
            self._interval = min(2 * self._interval, _LONGEST_INTERVAL)
            self._console.print(_step_line(steps, self._plan), highlight=False, markup=False)
            return
        if self._live is None:
            # redirect prints above the table if they go to the same terminal
            redirect = sys.stdout.isatty()
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=redirect, redirect_stderr=True)
            self._live.start()
        self._live.update(_step_table(steps, self._plan), refresh=True)


def _step_line(steps: Sequence[StepRecord], plan: Plan) -> str:
    """The figures of the last steps, each with its prediction, in one line."""
    texts = [f"step {steps[-1].step}", f"loss {_loss_text(steps[-1])}"]
    cells, predictions = _cells(measured(steps, plan)), _cells(predicted(plan))
    for (*_, words, _), value, prediction in zip(_FIGURES, cells, predictions, strict=True):
        if value:
            texts.append(words.format(value) + (f" (predicted {prediction})" if prediction else ""))
    return ", ".join(texts)


def _step_table(steps: Sequence[StepRecord], plan: Plan) -> Table:
    """The figures of the last steps in a row, their predictions and the deviation in the rows below."""
    now, prediction = measured(steps, plan), predicted(plan)
    columns = (column for _, _, column, *_ in _FIGURES)
    table = Table("", "step", "loss", *columns, box=None, pad_edge=False, header_style="bold")
    table.add_row("now", str(steps[-1].step), _loss_text(steps[-1]), *_cells(now))
    if prediction.seconds:
        pairs = ((getattr(now, figure), getattr(prediction, figure)) for figure, *_ in _FIGURES)
        table.add_row("predicted", "", "", *_cells(prediction), style="dim")
        table.add_row("", "", "", *(f"{a / b - 1:+.0%}" if a and b else "" for a, b in pairs), style="dim")
    return table


def _cells(figures: StepFigures) -> list[str]:
    """The figures as text; empty where a figure is not known."""
    values = ((getattr(figures, figure), text_of) for figure, *_, text_of in _FIGURES)
    return [text_of(value) if value else "" for value, text_of in values]


def _loss_text(step: StepRecord) -> str:
    return "?" if step.loss is None else f"{step.loss:.4g}"
