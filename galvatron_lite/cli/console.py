"""Where tables are printed: as wide as the terminal, and wide enough for what they hold where there is none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 200
"""Most columns of a table in a file or pipe; narrower ones take what they need. ``COLUMNS`` sets another number."""


def wide_console() -> Console:
    """A console without markup, on standard output."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, soft_wrap=True)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(markup=False, highlight=False, soft_wrap=True, width=WIDE)
    return console
