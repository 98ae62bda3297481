"""Pictures of another size for a model described by its shape."""

from __future__ import annotations

import re

from galvatron_lite.errors import InputError
from galvatron_lite.model.shapes.fields import Shape

_SIDES = re.compile(r"^([1-9]\d*)(?:x([1-9]\d*))?$")


def sides_of(image: str) -> tuple[int, int]:
    """Height and width."""
    found = _SIDES.match(image.lower())
    if found is None:
        raise InputError("--image", image, "Give pixels as 224, or height and width as 512x1024.")
    return int(found[1]), int(found[2] or found[1])


def sizes_of(shape: Shape, name: str, image: str) -> dict[str, object]:
    """Fields of a shape for pictures of another size."""
    height, width = sides_of(image)
    sizes: dict[str, object] = (
        {"image_height": height, "image_width": width} if height != width else {"image_size": height}
    )
    if all(hasattr(shape, field) for field in sizes):
        return sizes
    if hasattr(shape, "image_size"):
        raise not_square(name, image)
    raise InputError("--image", image, f"{name}: It takes no pictures.")


def not_square(name: str, image: str) -> InputError:
    """That a model is priced with square pictures only, and what else there is."""
    side = min(sides_of(image))
    remedy = (
        f"models of this family are priced with square pictures: give {side}, or trace your own with SCRIPT:FACTORY."
    )
    return InputError("--image", image, f"{name}: {remedy}")
