"""Errors of this package that end a rank, written to files so that the launcher can print each once at the end.

torchrun's report of a failure is long and comes last, after the message of every rank that says what to do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

from galvatron_lite.errors import GalvatronError, PeerError
from galvatron_lite.files import write_text

FOLDER_VARIABLE = "GALVATRON_TOLD"
"""Environment variable with the launcher's folder for the files."""


def listen() -> None:
    """Write an error of ours that ends this process to the launcher's folder, if there is one."""
    before = sys.excepthook
    if FOLDER_VARIABLE in os.environ and getattr(before, "__name__", "") != "keep_and_print":

        def keep_and_print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, GalvatronError):
                keep(error)
            before(kind, error, trace)

        sys.excepthook = keep_and_print


def keep(error: GalvatronError) -> None:
    """Write an error that ends this process to the launcher's folder, if there is one."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, ""))
    if FOLDER_VARIABLE in os.environ and folder.is_dir():
        # Ranks that waited for a failed rank are not reported if that rank is.
        kind = "waited" if isinstance(error, PeerError) else "failed"
        write_text(folder / f"{kind}-{os.environ.get('RANK', '0')}.txt", f"{type(error).__name__}: {error}")


def last_words(folder: Path) -> str:
    """The errors in a folder, each once with its ranks; those of ranks that waited only if there are no others."""
    paths = sorted(folder.glob("failed-*.txt")) or sorted(folder.glob("waited-*.txt"))
    ranks_of: dict[str, list[int]] = {}
    for path in paths:
        ranks_of.setdefault(path.read_text(encoding="utf-8"), []).append(int(path.stem.partition("-")[2]))
    lines = []
    for message, ranks in ranks_of.items():
        others = f" and {len(ranks) - 4} others" if len(ranks) > 4 else ""
        lines.append(f"Rank {', '.join(map(str, sorted(ranks)[:4]))}{others}: {message}")
    return "\n".join(lines)
