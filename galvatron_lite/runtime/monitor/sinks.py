"""Where the records of a run go: files, TensorBoard, the terminal; and the thread that writes them."""

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
from typing import IO, TYPE_CHECKING, Any, Protocol

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

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

PAUSE = 0.1
"""Seconds of records that are written together."""
_PATIENCE = 10.0
FOLDER = "tensorboard"
_SCALARS_PAUSE = 1.0
"""Seconds between two steps that go to TensorBoard: it takes time from training."""
LARGEST = 4 * 2**20
"""Bytes after which a new file is started."""
KEPT = 16
"""Files of a kind that are kept: the first and the newest."""
_REFRESH = 0.25
"""Seconds between two refreshes of a terminal."""
_FIRST, _LONGEST = 1.0, 10.0
"""Seconds between two plain lines: at first, and at last; they double."""
_FIGURES: tuple[tuple[str, str, str, str, Callable[[Any], str]], ...] = (
    ("seconds", "seconds", "step time", "{} a step", format_seconds),
    ("samples", "samples_per_second", "samples/s", "{} samples/s", format_count),
    ("tokens", "tokens_per_second", "tokens/s", "{} tokens/s", format_count),
    ("mfu", "mfu", "MFU", "MFU {}", "{:.1%}".format),
    ("memory", "memory_bytes", "memory", "memory {}", format_bytes),
)
"""What is shown of ``StepFigures``: the attribute, the name in TensorBoard, the column, the words, the format."""


class Sink(Protocol):
    """Where records go."""

    def take(self, records: Sequence[Record]) -> None:
        """More records, in order."""

    def close(self) -> None:
        """There are no more."""


class RecordWriter(Finishing):
    """A thread that hands records to sinks, so that training waits for neither disk nor terminal.

    A sink that fails is reported once, and gets no more: training goes on.

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
        """Add a record; returns at once."""
        self._queue.put(record)
        self._wake.set()

    def run(self) -> None:
        """The thread's loop."""
        while not self._ended.is_set():
            self._wake.wait()
            self._wake.clear()
            self._hand_on()
            if not self._ended.is_set():
                sleep(PAUSE)
        self._hand_on()
        for sink in self._sinks:
            self._tried(sink, sink.close)

    def finish(self) -> None:
        """Write all records, and end."""
        atexit.unregister(self.finish)
        if not self._ended.is_set():
            self.closing()
        self._ended.set()
        self._wake.set()
        if threading.current_thread() is not self:
            self.join(_PATIENCE)

    def _hand_on(self) -> None:
        records = [self._queue.get() for _ in range(self._queue.qsize())]  # this thread alone takes some
        if records:
            self._sinks = [sink for sink in self._sinks if self._tried(sink, partial(sink.take, records))]

    def _tried(self, sink: Sink, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as error:
            warnings.warn(f"{type(sink).__name__} takes no more of the run's records: {error}", stacklevel=2)
            return False
        return True


class LineFiles:
    """Files ``NAME-00001.jsonl`` of a folder, numbered on from earlier ones; a sink.

    Args:
        head: the first record of each file, until a later one replaces or follows it.
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
        """Add lines, and hand them to the system."""
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
        """There are no more lines."""
        self._stream.close()

    def _put(self, records: Sequence[Record]) -> None:
        text = "".join(_line_of(record) for record in records)
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


def _line_of(record: Record) -> str:
    if isinstance(record, (RunHeader, PlanRecord)):
        data = to_data(record)
    else:  # flat records; this takes a few microseconds, while training goes on
        items = ((item, getattr(record, item.name)) for item in fields(record))
        data = {item.name: value for item, value in items if value != item.default}
    return json.dumps({"kind": record.kind, **data}, allow_nan=False) + "\n"


def scalar_writer(folder: Path) -> Any:
    """A ``SummaryWriter``; None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(log_dir=str(folder))


class Scalars:
    """Writes steps as scalars, measured and predicted; a sink."""

    def __init__(self, writer: Any, plan: Plan) -> None:
        self._writer, self._plan, self._written = writer, plan, -_SCALARS_PAUSE

    def take(self, records: Sequence[Record]) -> None:
        """Steps, or another plan."""
        for record in records:
            if isinstance(record, PlanRecord):
                self._plan = record.plan
            elif isinstance(record, StepRecord) and monotonic() - self._written >= _SCALARS_PAUSE:
                self._written = monotonic()
                self._write(record)

    def close(self) -> None:
        """There are no more."""
        self._writer.close()

    def _write(self, step: StepRecord) -> None:
        scalars = {} if step.loss is None else {"loss": step.loss}
        for kind, figures in (("measured", measured([step], self._plan)), ("predicted", predicted(self._plan))):
            values = ((name, getattr(figures, figure)) for figure, name, *_ in _FIGURES)
            scalars |= {f"{name}/{kind}": value for name, value in values if value}
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, global_step=step.step, walltime=step.time)


class Display:
    """Shows the present step on standard error: a table on a terminal, else plain lines; a sink."""

    def __init__(self, plan: Plan, console: Console | None = None) -> None:
        from rich.console import Console as Terminal

        self._console = Terminal(stderr=True, soft_wrap=True) if console is None else console
        self._plan, self._recent = plan, deque[StepRecord](maxlen=RECENT)
        self._terminal = self._console.is_terminal and not self._console.is_jupyter
        self._live: Live | None = None
        self._shown, self._patience = 0.0, _REFRESH if self._terminal else _FIRST
        self._newest: StepRecord | None = None

    def take(self, records: Sequence[Record]) -> None:
        """Steps, or another plan."""
        for record in records:
            if isinstance(record, PlanRecord):
                self._plan = record.plan
                self._recent.clear()
            elif isinstance(record, StepRecord):
                self._recent.append(record)
        if self._recent and monotonic() - self._shown >= self._patience:
            self._show()

    def close(self) -> None:
        """Show the last step, and leave it there."""
        if self._recent and self._recent[-1] is not self._newest:
            self._show()
        if self._live is not None:
            self._live.stop()

    def _show(self) -> None:
        self._shown = monotonic()
        steps = list(self._recent)
        self._newest = steps[-1]
        if not self._terminal:
            self._patience = min(2 * self._patience, _LONGEST)
            self._console.print(_line(steps, self._plan), highlight=False, markup=False)
            return
        if self._live is None:
            from rich.live import Live as Table

            # prints go above the table where they go to the same terminal, and else where they were going
            self._live = Table(
                console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty(), redirect_stderr=True
            )
            self._live.start()
        self._live.update(_table(steps, self._plan), refresh=True)


def _line(steps: Sequence[StepRecord], plan: Plan) -> str:
    """The last steps in a line, each figure beside its prediction."""
    now, wanted = _cells(measured(steps, plan)), _cells(predicted(plan))
    texts = [f"step {steps[-1].step}", f"loss {_loss(steps[-1])}"]
    for (*_, words, _), value, other in zip(_FIGURES, now, wanted, strict=True):
        if value:
            texts.append(words.format(value) + (f" (predicted {other})" if other else ""))
    return ", ".join(texts)


def _table(steps: Sequence[StepRecord], plan: Plan) -> Table:
    """The last steps, and the prediction below them."""
    from rich.table import Table as Grid

    now, wanted = measured(steps, plan), predicted(plan)
    columns = (column for _, _, column, *_ in _FIGURES)
    shown = Grid("", "step", "loss", *columns, box=None, pad_edge=False, header_style="bold")
    shown.add_row("now", str(steps[-1].step), _loss(steps[-1]), *_cells(now))
    if wanted.seconds:
        pairs = ((getattr(now, figure), getattr(wanted, figure)) for figure, *_ in _FIGURES)
        shown.add_row("predicted", "", "", *_cells(wanted), style="dim")
        shown.add_row("", "", "", *(f"{a / b - 1:+.0%}" if a and b else "" for a, b in pairs), style="dim")
    return shown


def _cells(figures: StepFigures) -> list[str]:
    """Figures for people; empty where one is not known."""
    values = ((getattr(figures, figure), form) for figure, *_, form in _FIGURES)
    return [form(value) if value else "" for value, form in values]


def _loss(step: StepRecord) -> str:
    return "?" if step.loss is None else f"{step.loss:.4g}"
