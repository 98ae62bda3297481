"""Where the figure of ``galvatron validate --plot`` goes."""

from __future__ import annotations

from pathlib import Path

from galvatron_lite.errors import InputError


def check_target(path: Path) -> None:
    """Whether an SVG can be written there.

    Raises:
        InputError: the name does not end in ``.svg``, or there is no such folder.
    """
    if path.suffix.lower() != ".svg":
        raise InputError("--plot", str(path), "The figure is SVG: give a name that ends in .svg.")
    if not path.parent.is_dir():
        raise InputError("--plot", str(path), f"There is no folder {path.parent}: make it first.")
