"""The code that has called a function: some answers depend on whether it is the user's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_stack

import torch

TORCH, PACKAGE = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
"""Folders of torch and of this package."""


def callers(hidden: tuple[str, ...], until: str = "") -> Iterator[tuple[str, int]]:
    """Yield file and line of the present calls, innermost first.

    Args:
        hidden: files, and folders of files, that are left out.
        until: name of a function; its call, and those around it, are left out.
    """
    for frame, line in walk_stack(sys._getframe(1)):
        if frame.f_code.co_name == until:
            return
        if not frame.f_code.co_filename.startswith(hidden):
            yield frame.f_code.co_filename, line
