"""The terminal: how wide tables are, and progress bars for what takes two seconds or more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from textwrap import wrap
from time import monotonic
from typing import TYPE_CHECKING, Any

import typer

from galvatron_lite.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from galvatron_lite.analysis.tables import Table as TableText


WIDE = 200
"""Most columns of a table in a file or pipe; narrower ones take what they need. ``COLUMNS`` sets another number."""


def wide_console(folded: bool = True) -> Console:
    """A console without markup, on standard output."""
    from rich.console import Console

    colours: Any = None if os.environ.get("NO_COLOR") else "auto"
    make = partial(Console, markup=False, highlight=False, soft_wrap=True, color_system=colours)
    console = make()
    return console if console.is_terminal or (folded and "COLUMNS" in os.environ) else make(width=WIDE)


def print_wrapped(console: Console, line: str, indent: int) -> None:
    """Print a line in the terminal's width, the further rows indented; in a pipe as one line."""
    if console.is_terminal:
        line = "\n".join(wrap(line, console.width, subsequent_indent=" " * indent, break_on_hyphens=False))
    console.print(line)


def plain_table(*columns: str) -> Table:
    """A table without borders, its headers in bold."""
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False, header_style="bold", show_header=any(columns) or not columns)


def print_table(console: Console, table: TableText, indent: str = "") -> None:
    """Print the heads and rows of a table."""
    shown = plain_table(*table.heads)
    for first, *cells in table.rows:
        shown.add_row(indent + first, *cells)
    console.print(shown)


NO_PLAN = "Interrupted before a first plan was found."
PATIENCE = 2.0  # seconds before a bar is shown
_INTERRUPTED = 128 + 2  # exit status of a program that SIGINT ended


@contextmanager
def progress_bar(title: str, quiet: bool = False, lines: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error from the third second on, and the function (done, total, label) that moves it.

    Args:
        title: in front of it.
        quiet: show nothing.
        lines: where standard error is no terminal (a log), write a line for each step instead of nothing.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(markup=False, stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
    task, begun = bar.add_task(title, total=None), monotonic()

    def move(done: int, total: int, label: str) -> None:
        if lines and not quiet and not console.is_terminal:
            console.print(f"{title}: {label} ({done} of {total})", soft_wrap=True, highlight=False)
        bar.update(task, completed=done, total=total, description=f"{title}: {label}" if label else title)
        if not bar.live.is_started and monotonic() - begun >= PATIENCE:
            bar.start()

    try:
        yield move
    finally:
        bar.stop()


@contextmanager
def search_progress(quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """The bar of a search; Ctrl-C before there is a plan ends the command."""
    with interruptible(NO_PLAN), progress_bar("Searching", quiet) as move:
        yield move


@contextmanager
def interruptible(words: str) -> Iterator[None]:
    """Ctrl-C ends the command with a line that says what becomes of the work done so far."""
    try:
        yield
    except KeyboardInterrupt as stop:
        typer.echo(f"galvatron: {words}", err=True)
        raise typer.Exit(_INTERRUPTED) from stop


def check_folder(option: str, path: Path | None) -> None:
    """Whether there is a folder to write a file to."""
    if path is not None and not path.parent.is_dir():
        raise InputError(option, str(path), f"There is no folder {path.parent}: make it first.")


def written(path: Path | None, what: str = "") -> None:
    """Say that a file was written, where one was."""
    if path is not None:
        typer.echo(f"Written to {path}{what}.")


def print_json(data: object, **more: object) -> None:
    """A value of ours, or plain data, as JSON; ``more``: further fields."""
    import json

    from galvatron_lite.files import to_data

    plain: Any = data if isinstance(data, dict | list) else to_data(data)
    typer.echo(json.dumps(plain | more if more else plain))
