"""Models of the planner by the names that the oracle takes. No torch here."""

from __future__ import annotations

from pathlib import Path

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes import build_graph, load_model, model_names
from galvatron_lite.model.shapes.images.names import builder_of, canonical, shape_of_name
from galvatron_lite.units import activation_bytes

SIDE, CLASSES = 224, 1000
"""Pixels of a picture's side and classes of networks known by name only."""


def graph_named(name: str, precision: str) -> ModelGraph:
    """The planner's model of a name or file: shipped ones, then image networks by their published names.

    Args:
        name: ``resnet50``, ``vgg16``, ``regnety_032``, or the path of a model file.
        precision: of activations and compute.

    Raises:
        InputError: no rule knows the name.
    """
    plain = canonical(name)
    if Path(name).suffix in (".yaml", ".yml", ".json") or name in model_names():
        return load_model(name, precision=precision)
    if (shape := shape_of_name(plain, SIDE)) is not None:
        return build_graph(shape, precision=precision)
    if (builder := builder_of(plain)) is not None:
        return builder(SIDE, CLASSES, precision, activation_bytes(precision))
    known = ", ".join(one for one in model_names())
    remedy = f"Shipped models: {known}; image networks by name, such as vgg16, resnet152, regnety_032; or a .yaml file."
    raise InputError("model", name, remedy)
