"""Models of the planner by the names that the oracle takes. No torch here."""

from __future__ import annotations

import re
from pathlib import Path

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes import build_graph, load_model, load_shape, model_names
from galvatron_lite.model.shapes.images.names import builder_of, canonical, shape_of_name
from galvatron_lite.units import activation_bytes

SIDE, CLASSES = 224, 1000
"""Pixels of a picture's side and classes of networks known by name only."""
_SIDES = re.compile(r"^([1-9]\d*)(?:x([1-9]\d*))?$")


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
        return load_model(name, overrides=_pictured(name, image), precision=precision)
    height, width = sides_of(image) if image else (SIDE, SIDE)
    shape = shape_of_name(plain, height)
    if shape is None and (builder := builder_of(plain)) is not None:
        if height != width:
            raise InputError("--image", image, f"{name}: its pictures are square: give {height}.")
        return builder(height, CLASSES, precision, activation_bytes(precision))
    if shape is None:
        known = ", ".join(model_names())
        remedy = f"Shipped models: {known}; image networks by name, such as vgg16, resnet152, regnety_032; or a file."
        raise InputError("model", name, remedy)
    if height != width:
        raise InputError("--image", image, f"{name}: its pictures are square: give {height}.")
    return build_graph(shape, precision=precision)


def sides_of(image: str) -> tuple[int, int]:
    """Height and width.

    Raises:
        InputError: no number of pixels.
    """
    found = _SIDES.match(image.lower())
    if found is None:
        raise InputError("--image", image, "Give pixels as 224, or height and width as 512x1024.")
    return int(found[1]), int(found[2] or found[1])


def _pictured(name: str, image: str | None) -> dict[str, object] | None:
    """Fields of a shape for pictures of another size.

    Raises:
        InputError: the model takes none, or square ones only.
    """
    if image is None:
        return None
    height, width = sides_of(image)
    wanted: dict[str, object] = (
        {"image_size": height} if height == width else {"image_height": height, "image_width": width}
    )
    shape = load_shape(name)
    if not all(hasattr(shape, field) for field in wanted):
        square = "Its pictures are square: give 224." if hasattr(shape, "image_size") else "It takes no pictures."
        raise InputError("--image", image, f"{name}: {square}")
    return wanted
