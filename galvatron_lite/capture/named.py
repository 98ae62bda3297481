"""Graphs of models by name: closed forms for ``configs/models``; traces for the zoo, transformers and user functions.

Torch is imported for traces only.
"""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galvatron_lite.capture.huggingface import find_config, graph_of_config
from galvatron_lite.errors import InputError, unknown
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.model.shapes.registry import SUFFIXES, load_model, match_name, model_names
from galvatron_lite.model.trainable import Trainable
from galvatron_lite.model.zoo import SIZES, build

if TYPE_CHECKING:
    from torch import nn


def is_factory(target: str) -> bool:
    """Whether a name is that of a function in a file."""
    return ".py:" in target


def check_function_named(field: str, target: str) -> None:
    """Refuse a file without the name of its function."""
    if target.endswith(".py"):
        raise InputError(field, target, f"Name the function that makes the model, too: {target}:make_model.")


def find_factory(target: str) -> Callable[[], Any]:
    """Return the function that ``FILE.py:FACTORY`` names."""
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
    factory, name = find_factory(target), target.rpartition(":")[2]
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise InputError("MODEL", target, f"{name} is called without arguments: {error}.") from error
    built = factory()
    model, batch, loss_fn = (*built, None, None)[:3] if isinstance(built, tuple) else (built, None, None)
    if not hasattr(model, "named_modules"):
        raise InputError("MODEL", target, f"{name} returned {type(model).__name__}, not an nn.Module.")
    return model, batch, loss_fn


def graph_named(
    name: str,
    *,
    sequence: int | None = None,
    precision: str = "bf16",
    kernels: Kernels | None = None,
    trainable: Trainable | None = None,
) -> ModelGraph:
    """Return the graph of a model by its name.

    Args:
        name: of ``configs/models`` (``llama2-7b``), the path of such a file, or of the zoo (``gpt-tiny``); or a
            configuration of transformers: ``config.json``, its folder, or a name in the hub's local cache; or
            ``FILE.py:FACTORY``.
        sequence: tokens a sample; the model's default if None.
        precision: of compute.
        kernels: that run a model of ``configs/models``; PyTorch's own if None. Other models run as they are written.
        trainable: which parameters train; all if None.

    Raises:
        InputError: an unknown name (lists all), a file without such a function, or no example batch.
        FileFormatError: the file cannot be read.
        TraceError: the model cannot be traced.
    """
    check_function_named("--model", name)
    shipped = model_names()
    if is_factory(name):
        if sequence is not None:
            raise InputError("--seq", sequence, f"{name} decides how long its samples are: leave --seq out.")
        graph = _trace(lambda: load_factory(name), precision, trainable)
    elif config := find_config(name):
        graph = graph_of_config(config, sequence=sequence, precision=precision, trainable=trainable)
    elif Path(name).suffix in SUFFIXES or match_name(name, shipped):
        graph = load_model(name, sequence=sequence, precision=precision, kernels=kernels, trainable=trainable)
    elif size := match_name(name, SIZES):
        sizes = {} if sequence is None else {"sequence": sequence}
        graph = _trace(lambda: (build(size, **sizes), None, None), precision, trainable, size)
    else:
        remedy = "Or give a .yaml file, a transformers config.json or FILE.py:FACTORY."
        raise unknown("--model", name, (*shipped, *(size for size in SIZES if not match_name(size, shipped))), remedy)
    return graph if trainable is None else replace(graph, trains=trainable.options)


def _trace(
    make: Callable[[], tuple[nn.Module, Any, Any]], precision: str, trainable: Trainable | None, name: str | None = None
) -> ModelGraph:
    """Trace a model with its example batch and loss; it is made on the meta device if its code allows that."""
    import torch

    from galvatron_lite.capture.adapters import make_trainable
    from galvatron_lite.capture.trace import trace
    from galvatron_lite.model.example import example_batch

    try:
        with torch.device("meta"):
            model, batch, loss_fn = make()
            batch = example_batch(model) if batch is None else batch
    except InputError:
        raise
    except Exception:  # whatever a user's function does on the meta device
        model, batch, loss_fn = make()
        batch = example_batch(model) if batch is None else batch
    return trace(make_trainable(model, trainable), batch, loss_fn=loss_fn, precision=precision, name=name)
