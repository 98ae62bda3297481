"""Progress bars: nothing where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error, and the function (done, total, label) that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def move(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{title}: {label}" if label else title)

        yield move


@contextmanager
def search_progress(quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """The bar of a search."""
    with progress_bar("Searching", quiet) as move:
        yield move
