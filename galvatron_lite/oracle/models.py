"""Models of the planner by the names that the oracle takes. No torch here."""

from __future__ import annotations

from pathlib import Path

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes import build_graph, load_model, load_shape, model_names
from galvatron_lite.model.shapes.images.names import builder_of, canonical, shape_of_name
from galvatron_lite.model.shapes.sizes import not_square, sides_of, sizes_of
from galvatron_lite.units import activation_bytes

SIDE, CLASSES = 224, 1000
"""Pixels of a picture's side and classes of networks known by name only."""


def graph_named(name: str, precision: str, image: str | None = None) -> ModelGraph:
    """The planner's model of a name or file: shipped ones, then image networks by their published names.

    Args:
        name: ``resnet50``, ``vgg16``, ``regnety_032``, or the path of a model file.
        precision: of activations and compute.
        image: pixels of a picture, ``224`` or ``512x1024``; None: the model's own.

    Raises:
        InputError: no rule knows the name, or it takes no such pictures.
    """
    plain = canonical(name)
    if Path(name).suffix in (".yaml", ".yml", ".json") or name in model_names():
        sizes = sizes_of(load_shape(name), name, image) if image else None
        return load_model(name, overrides=sizes, precision=precision)
    height, width = sides_of(image) if image else (SIDE, SIDE)
    shape = shape_of_name(plain, height)
    if shape is None and (builder := builder_of(plain)) is not None:
        if height != width:
            raise not_square(name, image or "")
        return builder(height, CLASSES, precision, activation_bytes(precision))
    if shape is None:
        known = ", ".join(model_names())
        remedy = f"Shipped models: {known}; image networks by name, such as vgg16, resnet152, regnety_032; or a file."
        raise InputError("model", name, remedy)
    if height != width:
        raise not_square(name, image or "")
    return build_graph(shape, precision=precision)
