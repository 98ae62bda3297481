"""What is gathered, and dealt out, of a layer with shared channels, and statistics of its norms. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Role
from galvatron_lite.model.sides import sides_of
from galvatron_lite.parallelism.channel.parts import OperatorPart, Parts, is_named, parts_of
from galvatron_lite.parallelism.pictures import channels_of, has_weights, items_of
from galvatron_lite.units import ITEM_BYTES

EDGES = (Role.BEFORE.value, Role.AFTER.value)
"""Names of the kinds of what is before and after the blocks."""


def gathered_items(kind: LayerKind) -> list[int]:
    """Items a sample of every picture that is gathered, by ``filters``.

    Of two that are as large as what leaves the layer, the second is taken to be added to the first. Before and after
    the blocks what a module makes is gathered at once, as the model's own code runs behind it.
    """
    made = lone_pictures(kind)
    return [items for place, (items, _) in enumerate(made) if not is_added(made, place, kind.dims.out_channels)]


def lone_pictures(kind: LayerKind) -> list[tuple[int, int]]:
    """Items and channels of all that no operator takes up."""
    parts = parts_of(kind.operators, "filters")
    found: list[tuple[int, int]] = []
    for place, (one, part) in enumerate(parts):
        if part is OperatorPart.GATHERED:
            behind = () if kind.name in EDGES else parts[place + 1 :]
            found.append((_left_of(one, behind), channels_of(one)[1]))
    return found


def is_added(pictures: Sequence[tuple[int, int]], place: int, leaving: int) -> bool:
    """Whether a picture is added to a later one while both are shares."""
    return pictures[place][1] == leaving and pictures[place] in pictures[place + 1 :]


def _left_of(one: Operator, behind: Parts) -> int:
    """Items of what an operator makes after what works on its shares: pooling makes a picture smaller; a factor for
    each channel is one pixel that makes a picture of the largest that follows."""
    items, is_factor = items_of(one)[1], items_of(one)[1] == channels_of(one)[1]
    for other, part in behind:
        if has_weights(other) and part is not OperatorPart.SHARED:
            break
        if other.kind is OperatorClass.MEMORY and (sides_of(other) or (is_factor and other.shape[0] > items)):
            items = other.shape[0]
    return items


def joined_items(kind: LayerKind) -> list[int]:
    """Items a sample of every picture that is made by joining others along their channels."""
    return [one.shape[0] for one in kind.operators if not has_weights(one) and is_named(one, ("cat",))]


def pixel_norms(kind: LayerKind, by: str) -> list[float]:
    """Statistics (two figures a pixel) that are summed over shared channels, of every norm over a pixel's channels.

    Norms have two items for each channel, of the precision of weights or fp32; learned scales have one.
    """
    channels, found = kind.dims.in_channels, list[float]()
    shared = by == "channels" or kind.name not in EDGES
    for one, part in parts_of(kind.operators, by):
        if has_weights(one):
            channels = channels_of(one)[1]
        elif (
            shared
            and part is OperatorPart.SHARED
            and one.weight_bytes in _norm_bytes(kind, channels)
            and not one.statistics
        ):
            found.append(2 * one.shape[0] / channels)
    return found


def _norm_bytes(kind: LayerKind, channels: int) -> tuple[int, int]:
    """Bytes of a norm's weights."""
    sizes = [one.weight_bytes // items_of(one)[2] for one in kind.operators if has_weights(one)]
    return 2 * channels * min(sizes, default=0), 2 * channels * ITEM_BYTES["fp32"]
