"""Graphs of models by name: those of ``configs/models`` by closed forms, those of the zoo and of transformers traced.
Torch is imported for the latter alone."""

from __future__ import annotations

from galvatron_lite.capture.factory import graph_of_factory, is_factory
from galvatron_lite.capture.huggingface import find_config, graph_of_config
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes import load_model, model_names
from galvatron_lite.model.zoo import SIZES, build, size_named


def graph_named(name: str, *, sequence: int | None = None, precision: str = "bf16") -> ModelGraph:
    """The graph of a model by its name.

    Args:
        name: of ``configs/models`` (``llama2-7b``), the path of such a file, or of the zoo (``gpt-tiny``); or a
            configuration of transformers: ``config.json``, its folder, or a name in the hub's local cache; or
            ``FILE.py:FACTORY``.
        sequence: tokens a sample; the model's own if not given.
        precision: of compute.

    Raises:
        InputError: no such name: tells all.
        FileFormatError: the file cannot be read.
    """
    if is_factory(name):
        if sequence is not None:
            raise InputError("--seq", sequence, f"{name} decides how long its samples are: leave --seq out.")
        return graph_of_factory(name, precision)
    config = find_config(name)
    if config is not None:
        return graph_of_config(config, sequence=sequence, precision=precision)
    try:
        return load_model(name, sequence=sequence, precision=precision)
    except InputError as error:
        size = size_named(name)
        if error.field == "model" and size is None:
            raise InputError("model", name, f"{error.remedy} Small ones of the zoo: {', '.join(_small())}.") from error
        if size is None or name.replace("-", "") in {known.replace("-", "") for known in model_names()}:
            raise
        return _traced(size, sequence, precision)


def _small() -> tuple[str, ...]:
    """Sizes of the zoo that ``configs/models`` does not have."""
    shipped = {name.replace("-", "") for name in model_names()}
    return tuple(size for size in SIZES if size.replace("-", "") not in shipped)


def _traced(size: str, sequence: int | None, precision: str) -> ModelGraph:
    import torch

    from galvatron_lite.capture.trace import trace
    from galvatron_lite.model.example import example_batch

    with torch.device("meta"):
        model = build(size, **({} if sequence is None else {"sequence": sequence}))
    return trace(model, example_batch(model), precision=precision, name=size)
