"""A user's model from ``FILE.py:FACTORY``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from galvatron_lite.errors import InputError


def load_factory(target: str) -> tuple[Any, Any]:
    """Call the factory that ``FILE.py:FACTORY`` names.

    Returns:
        The model and its example batch; None for the batch if the factory returned the model alone.

    Raises:
        InputError: no such file or function, or something else than a model was returned.
    """
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise InputError("MODEL", target, f"There is no file {file}.")
    sys.path.insert(0, str(path.resolve().parent))
    names = runpy.run_path(str(path), run_name="galvatron_model")
    factory = names.get(name)
    if not callable(factory):
        raise InputError("MODEL", target, f"{file} has no function {name!r}.")
    made = factory()
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not hasattr(model, "named_modules"):
        raise InputError("MODEL", target, f"{name} returned {type(model).__name__}, not an nn.Module.")
    return model, batch
