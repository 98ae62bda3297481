"""Model files of convolutional networks beside ResNet and ConvNeXt (``fields``), and pictures of another size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from galvatron_lite.errors import InputError
from galvatron_lite.files import Strict
from galvatron_lite.limits import Name

if TYPE_CHECKING:
    from galvatron_lite.model.shapes.fields import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureShape(Strict):
    """Fields that these networks share."""

    name: Name = ""  # name, source: for people
    source: str = ""
    image_size: int = 224  # pixels along each side
    channels: int = 3  # of the image
    classes: int = 1000  # outputs of the head


@dataclass(frozen=True, slots=True, kw_only=True)
class VggShape(PictureShape):
    """A VGG: groups of 3 x 3 convolutions with max pooling between them, three fully connected layers."""

    arch: Literal["vgg"] = "vgg"
    depths: tuple[int, ...]  # convolutions a group
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)  # channels a group
    hidden: int = 4096  # outputs of the first two fully connected layers
    pooled: int = 7  # pixels along each side of what enters the first of these
    dropout: float = 0.5  # probability after them


@dataclass(frozen=True, slots=True, kw_only=True)
class AlexNetShape(PictureShape):
    """An AlexNet in one tower."""

    arch: Literal["alexnet"] = "alexnet"
    widths: tuple[int, ...] = (64, 192, 384, 256, 256)  # channels of the five convolutions
    hidden: int = 4096  # hidden, pooled: as of a VGG
    pooled: int = 6
    dropout: float = 0.5  # probability before the first two fully connected layers


@dataclass(frozen=True, slots=True, kw_only=True)
class RegNetShape(PictureShape):
    """A RegNet."""

    arch: Literal["regnet"] = "regnet"
    widths: tuple[int, ...]  # channels of every block; the picture is halved where they grow
    group: int  # channels of a group of the 3 x 3 convolutions
    squeeze: bool = False  # whether blocks squeeze and excite
    stem: int = 32  # channels of the first convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetShape(PictureShape):
    """A U-Net with padded convolutions, a class for every pixel."""

    arch: Literal["unet"] = "unet"
    base: int = 64  # channels of the first level; doubled from level to level
    levels: int = 4  # halvings of the picture
    norm: bool = False  # whether batch normalisation follows every convolution (which then has no bias)
    # whether the way back enlarges by interpolation (the lowest level has half of its channels then), not by
    # transposed convolution
    bilinear: bool = False
    image_size: int = 512
    channels: int = 1
    classes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CosmoFlowShape(PictureShape):
    """A CosmoFlow: 3-D convolutions with mean pooling, fully connected layers, ``classes`` numbers to be found."""

    arch: Literal["cosmoflow"] = "cosmoflow"
    widths: tuple[int, ...] = (16, 32, 64, 128, 256, 256, 128)  # channels of every convolution
    kernels: tuple[int, ...] = (3, 3, 3, 3, 2, 2, 2)  # voxels along each side of their kernels
    strides: tuple[int, ...] = (1, 1, 2, 1, 1, 1, 1)  # along each side
    # whether all convolutions but the last one are padded, so that only strides and pooling shrink volumes
    padded: bool = False
    hidden: tuple[int, ...] = (2048, 256)  # outputs of the fully connected layers before the last one
    bias: bool = False  # whether convolutions and fully connected layers have biases
    image_size: int = 512
    channels: int = 4
    classes: int = 4

    @property
    def sides(self) -> tuple[int, ...]:
        """Voxels along each side that enter each convolution, and what is left after the last one."""
        sides, last = [self.image_size], len(self.kernels) - 1
        for index, (kernel, stride) in enumerate(zip(self.kernels, self.strides, strict=True)):
            around = kernel - 1 if self.padded and index < last else 0
            after = (sides[-1] + around - kernel) // stride + 1
            sides.append(after // 2 if index < last else after)
        return tuple(sides)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerceptionShape(PictureShape):
    """Two encoder-decoders that read one bird's-eye view of LiDAR scans, one channel each, and give a picture each."""

    arch: Literal["perception"] = "perception"
    base: int = 32  # channels of the first level; doubled from level to level
    levels: int = 6  # halvings of the picture, rounded down
    # whether each level of the segmentation network's way up takes what the level below gives; else, as published,
    # all but the finest are computed and dropped
    chained: bool = True
    image_size: int = 1000
    channels: int = 16
    classes: int = 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, the finest first."""
        return tuple(self.base * 2**level for level in range(self.levels))

    @property
    def sides(self) -> tuple[int, ...]:
        """Pixels along a side of what enters each level."""
        return tuple(self.image_size // 2**level for level in range(self.levels))


def check_pictures(shape: PictureShape) -> None:
    """Raise InputError where sizes of a network do not fit one another."""
    match shape:
        case VggShape():
            _same_number("depths", shape.depths, shape.widths)
        case AlexNetShape():
            _same_number("widths", shape.widths, range(5))
        case RegNetShape():
            uneven = [width for width in shape.widths if width % min(shape.group, width)]
            if uneven:
                raise InputError("group", shape.group, f"Choose a number that divides the widths {uneven}.")
        case UNetShape():
            if shape.image_size % 2**shape.levels:
                remedy = f"Choose a multiple of {2**shape.levels}: {shape.levels} halvings."
                raise InputError("image_size", shape.image_size, remedy)
        case PerceptionShape():
            _check_levels(shape)
        case CosmoFlowShape():
            _same_number("kernels", shape.kernels, shape.widths)
            _same_number("strides", shape.strides, shape.widths)
            if shape.sides[-1] != 1:
                remedy = f"One voxel must be left, not {shape.sides[-1]}; sides are {shape.sides}."
                raise InputError("image_size", shape.image_size, remedy)


def _check_levels(shape: PerceptionShape) -> None:
    if shape.base % 2:
        raise InputError("base", shape.base, "Choose an even number: the last level has half of it.")
    if shape.image_size < 2**shape.levels:
        remedy = f"Choose at least {2**shape.levels}: {shape.levels} halvings leave no pixel."
        raise InputError("image_size", shape.image_size, remedy)
    if shape.classes != 1:
        raise InputError("classes", shape.classes, "Leave it at 1: each network gives one picture.")


def _same_number(field: str, values: tuple[int, ...], like: Sequence[int]) -> None:
    if len(values) != len(like):
        raise InputError(field, values, f"Give {len(like)} numbers.")


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
