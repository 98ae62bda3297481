"""Graphs of models by name: those of ``configs/models`` by closed forms, those of the zoo and of transformers traced.
Torch is imported for the latter alone."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from galvatron_lite.capture.huggingface import find_config, graph_of_config
from galvatron_lite.errors import InputError, unknown
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.model.shapes import load_model, model_names
from galvatron_lite.model.trainable import Trainable
from galvatron_lite.model.zoo import SIZES, build, size_named


def is_factory(target: str) -> bool:
    """Whether a name is that of a function in a file."""
    return ".py:" in target


def check_function_named(field: str, target: str) -> None:
    """Refuse a file without the name of its function."""
    if target.endswith(".py"):
        raise InputError(field, target, f"Name the function that makes the model, too: {target}:make_model.")


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
    built = find_factory(target)()
    model, batch, loss_fn = (*built, None, None)[:3] if isinstance(built, tuple) else (built, None, None)
    if not hasattr(model, "named_modules"):
        name = target.rpartition(":")[2]
        raise InputError("MODEL", target, f"{name} returned {type(model).__name__}, not an nn.Module.")
    return model, batch, loss_fn


def graph_of_factory(target: str, precision: str = "bf16", trainable: Trainable | None = None) -> ModelGraph:
    """The graph of what a factory makes, without memory where it can be called so.

    Raises:
        InputError: there is no such file or function, or no example batch is known.
        TraceError: the model cannot be traced.
    """
    import torch

    from galvatron_lite.capture.adapters import make_trainable
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
    return trace(make_trainable(model, trainable), batch, loss_fn=loss_fn, precision=precision)


def graph_named(
    name: str,
    *,
    sequence: int | None = None,
    precision: str = "bf16",
    kernels: Kernels | None = None,
    trainable: Trainable | None = None,
) -> ModelGraph:
    """The graph of a model by its name.

    Args:
        name: of ``configs/models`` (``llama2-7b``), the path of such a file, or of the zoo (``gpt-tiny``); or a
            configuration of transformers: ``config.json``, its folder, or a name in the hub's local cache; or
            ``FILE.py:FACTORY``.
        sequence: tokens a sample; the model's own if not given.
        precision: of compute.
        kernels: that run a model of ``configs/models``; PyTorch's own if not given. Others run as they are written.

        trainable: which parameters train; None: all.

    Raises:
        InputError: no such name: tells all.
        FileFormatError: the file cannot be read.
    """
    graph = _graph_of(name, sequence, precision, kernels, trainable)
    return graph if trainable is None else replace(graph, trains=trainable.options)


def _graph_of(
    name: str, sequence: int | None, precision: str, kernels: Kernels | None, trainable: Trainable | None
) -> ModelGraph:
    if is_factory(name):
        if sequence is not None:
            raise InputError("--seq", sequence, f"{name} decides how long its samples are: leave --seq out.")
        return graph_of_factory(name, precision, trainable)
    check_function_named("--model", name)
    config = find_config(name)
    if config is not None:
        return graph_of_config(config, sequence=sequence, precision=precision, trainable=trainable)
    try:
        return load_model(name, sequence=sequence, precision=precision, kernels=kernels, trainable=trainable)
    except InputError as error:
        size = size_named(name)
        if error.field == "model" and size is None:
            besides = "Or give a .yaml file, a transformers config.json or FILE.py:FACTORY."
            shipped = {shipped.replace("-", "") for shipped in model_names()}
            small = (size for size in SIZES if size.replace("-", "") not in shipped)
            raise unknown("--model", name, (*model_names(), *small), besides) from error
        if size is None or name.replace("-", "") in {model_name.replace("-", "") for model_name in model_names()}:
            raise
        return _traced(size, sequence, precision, trainable)


def _traced(size: str, sequence: int | None, precision: str, trainable: Trainable | None) -> ModelGraph:
    import torch

    from galvatron_lite.capture.adapters import make_trainable
    from galvatron_lite.capture.trace import trace
    from galvatron_lite.model.example import example_batch

    with torch.device("meta"):
        model = build(size, **({} if sequence is None else {"sequence": sequence}))
    return trace(make_trainable(model, trainable), example_batch(model), precision=precision, name=size)
