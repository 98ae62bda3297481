"""The last words of ranks that end with an error of this package, kept for the launcher to say once, at the end.

torchrun's own account of a failure is long and comes last; what to do stands above it, once for every rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

from galvatron_lite.errors import GalvatronError, PeerError
from galvatron_lite.files import write_text

FOLDER_VARIABLE = "GALVATRON_TOLD"
"""Environment variable with the launcher's folder for them; only processes that see the folder write there."""


def listen() -> None:
    """From now on an error of ours that ends this process is kept, where a launcher wants it."""
    before = sys.excepthook
    if FOLDER_VARIABLE in os.environ and getattr(before, "__name__", "") != "keeping":

        def keeping(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, GalvatronError):
                keep(error)
            before(kind, error, trace)

        sys.excepthook = keeping


def keep(error: GalvatronError) -> None:
    """Write the words of an error that ends this process; nothing where no launcher wants them."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, ""))
    if FOLDER_VARIABLE in os.environ and folder.is_dir():
        named = f"{type(error).__name__}: {error}"
        # those who waited in vain for another rank are of no interest where that rank tells why
        kind = "waited" if isinstance(error, PeerError) else "failed"
        write_text(folder / f"{kind}-{os.environ.get('RANK', '0')}.txt", named)


def last_words(folder: Path) -> str:
    """What ranks said, each thing once with the ranks that said it; of those that waited only where no other did."""
    paths = sorted(folder.glob("failed-*.txt")) or sorted(folder.glob("waited-*.txt"))
    ranks_of: dict[str, list[int]] = {}
    for path in paths:
        ranks_of.setdefault(path.read_text(encoding="utf-8"), []).append(int(path.stem.partition("-")[2]))
    return "\n".join(f"Rank {_ranks(ranks)}: {words}" for words, ranks in ranks_of.items())


def _ranks(ranks: list[int]) -> str:
    ordered = sorted(ranks)
    return ", ".join(map(str, ordered[:4])) + (f" and {len(ordered) - 4} others" if len(ordered) > 4 else "")
