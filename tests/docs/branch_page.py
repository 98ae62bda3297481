"""Jobs of the page on branches."""

from __future__ import annotations

import runpy
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any


def run_page(folder: Path, name: str) -> dict[str, Any]:
    """What a script of the page has at its end; the folder holds it and what it imports and reads."""
    known = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        with chdir(folder):
            return runpy.run_path(str(folder / name))
    finally:
        sys.path.remove(str(folder))
        for module in set(sys.modules) - known:
            if (folder / f"{module}.py").exists():
                del sys.modules[module]


def train(folder: Path) -> tuple[list[float], dict[str, Any]]:
    """Losses of the page's training script on this rank, and the state that it ends with."""
    found = run_page(folder, "train.py")
    return found["losses"], found["state"]
