"""Models that a function of the user's makes: ``FILE.py:FACTORY``. Torch is imported when the function is called."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph


def is_factory(target: str) -> bool:
    """Whether a name is that of a function in a file."""
    return ".py:" in target


def find_factory(target: str) -> Callable[[], Any]:
    """The function that ``FILE.py:FACTORY`` names."""
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
    """
    made = find_factory(target)()
    model, batch, loss_fn = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
    if not hasattr(model, "named_modules"):
        name = target.rpartition(":")[2]
        raise InputError("MODEL", target, f"{name} returned {type(model).__name__}, not an nn.Module.")
    return model, batch, loss_fn


def graph_of_factory(target: str, precision: str = "bf16") -> ModelGraph:
    """The graph of what a factory makes, without memory where it can be called so.

    Raises:
        InputError: there is no such file or function, or no example batch is known.
        TraceError: the model cannot be traced.
    """
    import torch

    from galvatron_lite.capture.trace import trace
    from galvatron_lite.model.example import example_batch

    try:
        with torch.device("meta"):
            model, batch, loss_fn = load_factory(target)
            batch = example_batch(model) if batch is None else batch
    except InputError:
        raise
    except Exception:  # whatever a user's function does that there are no shapes for
        model, batch, loss_fn = load_factory(target)
        batch = example_batch(model) if batch is None else batch
    return trace(model, batch, loss_fn=loss_fn, precision=precision)
