"""Lines that a training script's user is told unasked: which plan was chosen, that something is measured."""

from __future__ import annotations

import logging
import sys

LOG = logging.getLogger("galvatron_lite")
"""Takes these lines where a program has set up logging for them; silences them where its level is above ``INFO``."""


def say(line: str) -> None:
    """Tell one line: to ``LOG`` where that passes ``INFO`` on, else to standard error, in colour on a terminal.

    ``logging.getLogger("galvatron_lite").setLevel(logging.WARNING)`` silences it.
    """
    if LOG.level > logging.INFO:
        return
    if LOG.hasHandlers() and LOG.isEnabledFor(logging.INFO):
        LOG.info(line)
    elif sys.stderr.isatty():
        _shown(line)
    else:
        print(f"galvatron: {line}", file=sys.stderr, flush=True)


def _shown(line: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text("galvatron: ", style="bold cyan").append(line, style="default"))
