"""A user's model from ``FILE.py:FACTORY``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from galvatron_lite.errors import InputError


def find_factory(target: str) -> Callable[[], Any]:
    """The function that ``FILE.py:FACTORY`` names.

    Raises:
        InputError: no such file or function.
    """
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise InputError("MODEL", target, f"There is no file {file}.")
    sys.path.insert(0, str(path.resolve().parent))
    factory: Callable[[], Any] | None = runpy.run_path(str(path), run_name="galvatron_model").get(name)
    if not callable(factory):
        raise InputError("MODEL", target, f"{file} has no function {name!r}.")
    return factory


def load_factory(target: str) -> tuple[Any, Any, Any]:
    """Call the factory that ``FILE.py:FACTORY`` names.

    Returns:
        The model, its example batch and its ``loss_fn(output, batch)``; None for what the factory did not return.

    Raises:
        InputError: no such file or function, or something else than a model was returned.
    """
    made = find_factory(target)()
    model, batch, loss_fn = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
    if not hasattr(model, "named_modules"):
        name = target.rpartition(":")[2]
        raise InputError("MODEL", target, f"{name} returned {type(model).__name__}, not an nn.Module.")
    return model, batch, loss_fn
