"""Printing to the terminal: consoles, tables, JSON, and progress bars for work of two seconds or more."""

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
"""Columns of output to a file or pipe; the environment variable ``COLUMNS`` sets another number."""
NO_PLAN = "Interrupted before a first plan was found."
PATIENCE = 2.0  # seconds before a bar is shown
_INTERRUPTED = 128 + 2  # exit status of a program ended by SIGINT


def wide_console(folded: bool = True) -> Console:
    """A console on standard output, without markup; ``folded``: in a pipe it is as wide as ``COLUMNS`` says."""
    from rich.console import Console

    colours: Any = None if os.environ.get("NO_COLOR") else "auto"
    make = partial(Console, markup=False, highlight=False, soft_wrap=True, color_system=colours)
    console = make()
    return console if console.is_terminal or (folded and "COLUMNS" in os.environ) else make(width=WIDE)


def print_wrapped(console: Console, line: str, indent: int) -> None:
    """Print a line wrapped to the terminal's width, with indented continuation; in a pipe unwrapped."""
    if console.is_terminal:
        line = "\n".join(wrap(line, console.width, subsequent_indent=" " * indent, break_on_hyphens=False))
    console.print(line)


def plain_table(*columns: str) -> Table:
    """A table without borders, its headers in bold."""
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False, header_style="bold", show_header=any(columns) or not columns)


def print_table(console: Console, table: TableText, indent: str = "") -> None:
    """Print the heads and rows of a table; ``indent``: before the first cells."""
    printed = plain_table(*table.heads)
    for first, *cells in table.rows:
        printed.add_row(indent + first, *cells)
    console.print(printed)


@contextmanager
def progress_bar(title: str, quiet: bool = False, lines: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar on standard error after two seconds; yields the function (done, total, label) that moves it.

    Args:
        title: before the bar.
        quiet: show nothing.
        lines: if standard error is not a terminal, print a line for each step instead of nothing.
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
    """Show the progress bar of a search; Ctrl-C before there is a plan ends the command."""
    with interruptible(NO_PLAN), progress_bar("Searching", quiet) as move:
        yield move


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """End the command with a message at Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt as stop:
        typer.echo(f"galvatron: {message}", err=True)
        raise typer.Exit(_INTERRUPTED) from stop


def check_folder(option: str, path: Path | None) -> None:
    """Raise ``InputError`` if the folder of a file to write does not exist."""
    if path is not None and not path.parent.is_dir():
        raise InputError(option, str(path), f"There is no folder {path.parent}: make it first.")


def written(path: Path | None, what: str = "") -> None:
    """Print that a file was written, if there is one."""
    if path is not None:
        typer.echo(f"Written to {path}{what}.")


def print_json(data: object, **more: object) -> None:
    """Print a dataclass value, or plain data, as JSON; ``more``: additional fields."""
    import json

    from galvatron_lite.files import to_data

    plain: Any = data if isinstance(data, dict | list) else to_data(data)
    typer.echo(json.dumps(plain | more if more else plain))
