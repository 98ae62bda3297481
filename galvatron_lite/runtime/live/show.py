"""The live table of a run, on the terminal; plain lines where there is none (pipes, notebooks). No torch."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from galvatron_lite.plans.schema import Plan
from galvatron_lite.runs.schema import RECENT, PlanRecord, Record, StepFigures, StepRecord, measured, predicted
from galvatron_lite.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

_REFRESH = 0.25
"""Seconds between two looks of a terminal."""
_FIRST, _LONGEST = 1.0, 10.0
"""Seconds between two plain lines: at first, and at last; they double."""
COLUMNS = ("", "step", "loss", "step time", "samples/s", "tokens/s", "MFU", "memory")


class Display:
    """Shows a run's steps as they come, on standard error; a sink of ``Recorder``.

    Args:
        plan: under which it trains.
        console: where it is shown; that of standard error if not given.
    """

    def __init__(self, plan: Plan, console: Console | None = None) -> None:
        from rich.console import Console as Made

        self._console = Made(stderr=True, soft_wrap=True) if console is None else console
        self._plan, self._recent = plan, deque[StepRecord](maxlen=RECENT)
        self._terminal = self._console.is_terminal and not self._console.is_jupyter
        self._live: Live | None = None
        self._shown, self._patience = 0.0, _REFRESH if self._terminal else _FIRST
        self._newest: StepRecord | None = None

    def take(self, records: Sequence[Record]) -> None:
        """Steps that were trained, or another plan."""
        for record in records:
            if isinstance(record, PlanRecord):
                self._plan = record.plan
                self._recent.clear()
            elif isinstance(record, StepRecord):
                self._recent.append(record)
        if self._recent and monotonic() - self._shown >= self._patience:
            self._show()

    def close(self) -> None:
        """The last state stays."""
        if self._recent and self._recent[-1] is not self._newest:
            self._show()
        if self._live is not None:
            self._live.stop()

    def _show(self) -> None:
        self._shown = monotonic()
        steps = list(self._recent)
        self._newest = steps[-1]
        if self._terminal:
            self._refreshed(table(steps, self._plan))
            return
        self._patience = min(2 * self._patience, _LONGEST)
        self._console.print(line(steps, self._plan), highlight=False, markup=False)

    def _refreshed(self, shown: Table) -> None:
        if self._live is None:
            from rich.live import Live as Made

            # prints go above the table where they go to the same terminal, and where they were going elsewhere
            self._live = Made(
                console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty(), redirect_stderr=True
            )
            self._live.start()
        self._live.update(shown, refresh=True)


def line(steps: Sequence[StepRecord], plan: Plan) -> str:
    """The last steps in a line, each figure beside its prediction.

    Args:
        steps: one at least.
        plan: under which they were trained.
    """
    now, wanted = measured(steps, plan), predicted(plan)
    told = [f"step {steps[-1].step}", f"loss {_loss(steps[-1])}"]
    own, theirs = cells(now), cells(wanted)
    words = ("{} a step", "{} samples/s", "{} tokens/s", "MFU {}", "memory {}")
    for word, one, other in zip(words, own, theirs, strict=True):
        if one:
            told.append(word.format(one) + (f" (predicted {other})" if other else ""))
    return ", ".join(told)


def table(steps: Sequence[StepRecord], plan: Plan) -> Table:
    """The last steps, and what was predicted below them."""
    from rich.table import Table as Made

    now, wanted = measured(steps, plan), predicted(plan)
    shown = Made(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    shown.add_row("now", str(steps[-1].step), _loss(steps[-1]), *cells(now))
    if wanted.seconds:
        shown.add_row("predicted", "", "", *cells(wanted), style="dim")
        shown.add_row("", "", "", *_against(now, wanted), style="dim")
    return shown


def cells(figures: StepFigures) -> list[str]:
    """Figures for people; empty where one is not known."""
    return [
        format_seconds(figures.seconds) if figures.seconds else "",
        format_count(figures.samples) if figures.samples else "",
        format_count(figures.tokens) if figures.tokens else "",
        f"{figures.mfu:.1%}" if figures.mfu else "",
        format_bytes(figures.memory) if figures.memory else "",
    ]


def _against(now: StepFigures, wanted: StepFigures) -> list[str]:
    """How far each figure is from its prediction."""
    pairs = (
        (now.seconds, wanted.seconds), (now.samples, wanted.samples), (now.tokens, wanted.tokens),
        (now.mfu, wanted.mfu), (now.memory, wanted.memory),
    )  # fmt: skip
    return [f"{own / other - 1:+.0%}" if own and other else "" for own, other in pairs]


def _loss(step: StepRecord) -> str:
    return "?" if step.loss is None else f"{step.loss:.4g}"
