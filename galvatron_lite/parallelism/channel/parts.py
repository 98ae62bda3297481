"""Which operators of a convolutional layer are split by their output channels, and which by their input channels.

``filters``: the image that enters is full on every device. An operator with weights makes a share of its output
channels; the next one that reads exactly these channels takes them as its share of input channels and makes partial
sums of its full output. So operators pair up, and one sum serves two of them, as in Megatron's column and row pairs.
Grouped convolutions and what works channel by channel go on with the shares between the two; in front of a pair each
device does them in full. Shares that no operator takes up are gathered where a full image is needed: after pooling,
and once for two that are added.

``channels``: every image is shared by channels. Each operator makes partial sums of its full output from its share
of input channels, which are reduced and scattered into shares.

Assumed: operators are listed in the order they run, and one reads what the one before it made where its input channels
are that many (a shortcut of equal width would be taken for the main path).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from math import ceil, prod

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Recompute, Role, TensorSplit
from galvatron_lite.model.sides import sides_of
from galvatron_lite.parallelism.base import Moment
from galvatron_lite.parallelism.pictures import channels_of, has_weights, is_picture, items_of
from galvatron_lite.units import ITEM_BYTES


class OperatorPart(StrEnum):
    """What a device does of an operator."""

    FILTERS = "filters"
    """A share of the output channels from the whole input."""
    GATHERED = "gathered"
    """The same, and its output is gathered after it."""
    CHANNELS = "channels"
    """Partial sums of the whole output from a share of the input channels."""
    SCATTERED = "scattered"
    """The same, and they are reduced into shares."""
    SHARED = "shared"
    """A share of the channels, in and out."""
    WHOLE = "whole"
    """All."""


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """How a layer's channels are shared: what ``infer_channels`` finds and ``shard_channels`` carries out."""

    by: str  # ``filters`` or ``channels``
    degree: int  # devices that share them
    # what a device does of each convolution and linear that is split, by its path in the layer: ``FILTERS`` (its output
    # is gathered where it must be full), ``CHANNELS``, ``SCATTERED`` or ``SHARED``
    parts: Mapping[str, OperatorPart] = field(default_factory=dict)
    # names of full parameters that meet shares: each device has a part of their gradients. By ``channels`` that holds
    # for all full parameters, named or not
    partial: frozenset[str] = frozenset()
    inputs: tuple[int, ...] = ()  # channels of the images that enter, in order, by ``channels``
    outputs: tuple[int, ...] = ()  # channels of the images that leave, likewise


Parts = tuple[tuple[Operator, OperatorPart], ...]
OUTPUT = (OperatorPart.FILTERS, OperatorPart.GATHERED)
"""Shares of the output channels."""


@lru_cache(maxsize=4096)
def parts_of(operators: tuple[Operator, ...], by: str) -> Parts:
    """What a device does of each operator; see the module.

    Args:
        operators: of a layer, in the order they run.
        by: ``filters`` or ``channels``.
    """
    return _paired(operators) if by == "filters" else tuple((operator, _scattered(operator)) for operator in operators)


def _scattered(one: Operator) -> OperatorPart:
    dense = has_weights(one) and channels_of(one)[2] == 1
    return OperatorPart.SCATTERED if dense else OperatorPart.SHARED


def _paired(operators: tuple[Operator, ...]) -> Parts:
    parts: list[OperatorPart] = []
    begun, width = -1, 0
    for place, operator in enumerate(operators):
        if not has_weights(operator):
            parts.append(OperatorPart.SHARED if begun >= 0 else OperatorPart.WHOLE)
            continue
        inputs, outputs, groups = channels_of(operator)
        follows = begun >= 0 and inputs == width
        if groups > 1:
            parts.append(OperatorPart.SHARED if follows else OperatorPart.WHOLE)
            width = outputs if follows else width
        elif follows:
            parts.append(OperatorPart.CHANNELS)
            begun = -1
        else:
            _gather(parts, begun)
            parts.append(OperatorPart.FILTERS)
            begun, width = place, outputs
    _gather(parts, begun)
    return tuple(zip(operators, parts, strict=True))


def _gather(parts: list[OperatorPart], begun: int) -> None:
    """Nothing takes up the shares that the operator at ``begun`` made."""
    if begun >= 0:
        parts[begun] = OperatorPart.GATHERED


def takes_gradient(one: Operator) -> bool:
    """Whether what enters an operator with weights takes a gradient; the image takes none."""
    return one.backward_flops > one.flops


def splits_channels(kind: LayerKind, by: str) -> bool:
    """Whether a layer's channels may be shared; what ends in a loss, or returns one, has none to hand on."""
    if not is_picture(kind) or by in kind.channel_reasons:
        return False
    return by == "filters" or (kind.output_bytes > LOSS_BYTES and kind.dims.out_channels > 0)


LOSS_BYTES = 8
"""The most bytes of a sample's loss."""


def divides(kind: LayerKind, by: str, degree: int) -> bool:
    """Whether all channels that a layer splits are split evenly."""
    parts = parts_of(kind.operators, by)
    dense = any(has_weights(one) and part is not OperatorPart.WHOLE for one, part in parts)
    return dense and all(_even(one, part, degree) for one, part in parts if has_weights(one))


def undivided(kind: LayerKind, by: str, degree: int) -> str:
    """The operator whose channels cannot be split evenly, and how many it has; empty where all can."""
    parts = parts_of(kind.operators, by)
    for one, part in parts:
        if has_weights(one) and not _even(one, part, degree):
            inputs, outputs, groups = channels_of(one)
            shape = f"{inputs} -> {outputs} channels" + (f" in {groups} groups" if groups > 1 else "")
            return f"{one.name}: {shape} cannot be shared evenly by {degree}"
    return "" if divides(kind, by, degree) else "none of its operators has weights of all channels"


def _even(one: Operator, part: OperatorPart, degree: int) -> bool:
    inputs, outputs, groups = channels_of(one)
    match part:
        case OperatorPart.FILTERS | OperatorPart.GATHERED:
            return outputs % degree == 0
        case OperatorPart.CHANNELS:
            return inputs % degree == 0
        case OperatorPart.SCATTERED:
            return inputs % degree == 0 and outputs % degree == 0
        case OperatorPart.SHARED:
            return groups % degree == 0
    return True


def split_items(kind: LayerKind, by: str) -> int:
    """Parameter items that are divided: weights; biases and norms count as whole on every device."""
    return sum(
        items_of(one)[2]
        for one, part in parts_of(kind.operators, by)
        if has_weights(one) and part is not OperatorPart.WHOLE
    )


def is_named(one: Operator, names: tuple[str, ...]) -> bool:
    """Whether an operator has one of these names, behind its module's path and before its number."""
    return one.name.rpartition(".")[2].rstrip("_0123456789") in names


# What is gathered, and statistics of norms

EDGES = (Role.BEFORE.value, Role.AFTER.value)
"""Names of the kinds of what is before and after the blocks."""


def gathered_items(kind: LayerKind) -> list[int]:
    """Items a sample of every picture that is gathered, by ``filters``.

    Of two that are as large as what leaves the layer, the second is taken to be added to the first. Before and after
    the blocks what a module makes is gathered at once, as the model's own code runs behind it.
    """
    feature_maps = lone_pictures(kind)
    return [
        items
        for place, (items, _) in enumerate(feature_maps)
        if not is_added(feature_maps, place, kind.dims.out_channels)
    ]


def lone_pictures(kind: LayerKind) -> list[tuple[int, int]]:
    """Items and channels of all that no operator takes up."""
    parts = parts_of(kind.operators, "filters")
    feature_maps: list[tuple[int, int]] = []
    for place, (one, part) in enumerate(parts):
        if part is OperatorPart.GATHERED:
            behind = () if kind.name in EDGES else parts[place + 1 :]
            feature_maps.append((_left_of(one, behind), channels_of(one)[1]))
    return feature_maps


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
    return [
        operator.shape[0] for operator in kind.operators if not has_weights(operator) and is_named(operator, ("cat",))
    ]


def pixel_norms(kind: LayerKind, by: str) -> list[float]:
    """Statistics (two figures a pixel) that are summed over shared channels, of every norm over a pixel's channels.

    Norms have two items for each channel, of the precision of weights or fp32; learned scales have one.
    """
    channels, norms = kind.dims.in_channels, list[float]()
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
            norms.append(2 * one.shape[0] / channels)
    return norms


def _norm_bytes(kind: LayerKind, channels: int) -> tuple[int, int]:
    """Bytes of a norm's weights."""
    sizes = [operator.weight_bytes // items_of(operator)[2] for operator in kind.operators if has_weights(operator)]
    return 2 * channels * min(sizes, default=0), 2 * channels * ITEM_BYTES["fp32"]


# A layer as one of the devices works on it


def sliced_kind(kind: LayerKind, by: str, degree: int, each: bool = False) -> LayerKind:
    """A layer as one of ``degree`` devices works on it: operators at their sharded shapes, and what is kept.

    Full recomputation keeps the picture that enters. Temporary tensors count as whole: collectives hold them so.

    Args:
        kind: of layer.
        by: ``filters`` or ``channels``.
        degree: devices.
        each: whether pictures come together behind every convolution (``channel.each``): all that is kept is whole.
    """
    parts = each_parts(kind.operators, by) if each else parts_of(kind.operators, by)
    share = {choice: 1.0 if each else _kept_share(kind, by, degree, choice) for choice in kind.kept}
    kept = {choice: _scaled(size, share[choice]) for choice, size in kind.kept.items()}
    return replace(kind, operators=tuple(_sliced(one, part, degree) for one, part in parts), kept=kept)


def _scaled(size: TensorSplit, share: float) -> TensorSplit:
    return TensorSplit(*(ceil(part * share) for part in (size.tensor, size.sequence, size.whole)))


def _kept_share(kind: LayerKind, by: str, degree: int, choice: Recompute) -> float:
    """Share of what is kept: of the inputs of operators that keep them, by their items.

    Where two pictures are added as shares, their share is kept beside the whole picture that is handed on.
    """
    if by == "channels":
        return 1 / degree
    if choice is Recompute.FULL:
        return 1.0
    inputs = [(_input_items(one), part) for one, part in parts_of(kind.operators, by) if _keeps_input(one)]
    total = sum(items for items, _ in inputs)
    held = sum(
        items / (degree if part in (OperatorPart.CHANNELS, OperatorPart.SHARED) else 1) for items, part in inputs
    )
    feature_maps, leaving = lone_pictures(kind), kind.dims.out_channels
    held += sum(
        items / degree for place, (items, _) in enumerate(feature_maps) if is_added(feature_maps, place, leaving)
    )
    return held / total if total else 1.0


def _keeps_input(one: Operator) -> bool:
    """Sums and joins keep nothing, and what ReLU keeps is the input of what follows."""
    return one.weight_bytes > 0 or not is_named(one, ("relu", "leaky_relu", "add", "residual", "cat"))


def _input_items(one: Operator) -> int:
    if has_weights(one):
        return items_of(one)[0]
    sides = sides_of(one)
    return one.shape[1] * prod(side.extent for side in sides) if sides else one.shape[0]


def _sliced(one: Operator, part: OperatorPart, degree: int) -> Operator:
    if part is OperatorPart.WHOLE:
        return one
    moved = 1 / degree if part is OperatorPart.SHARED else _moved_share(one, part, degree)
    return replace(
        one,
        shape=_shape(one, part, degree),
        flops=one.flops // degree,
        backward_flops=one.backward_flops // degree,
        moved=ceil(one.moved * moved),
        backward_moved=ceil(one.backward_moved * moved),
        weight_bytes=ceil(one.weight_bytes / degree),
    )


def _moved_share(one: Operator, part: OperatorPart, degree: int) -> float:
    """Share of the bytes of input and output, one of which is whole."""
    x, y, _ = items_of(one)
    return (x + y / degree) / (x + y) if part in OUTPUT else (x / degree + y) / (x + y)


def _shape(one: Operator, part: OperatorPart, degree: int) -> tuple[int, ...]:
    if one.kind is OperatorClass.MEMORY:
        return (ceil(one.shape[0] / degree), *one.shape[1:])
    inner, outer = (1 if part in OUTPUT else degree), (degree if part in (*OUTPUT, OperatorPart.SHARED) else 1)
    if one.kind is OperatorClass.MATMUL:
        rows, inputs, outputs = one.shape
        return rows, inputs // inner, outputs // outer
    inputs, outputs, groups = one.shape[:3]
    return inputs // inner, outputs // outer, groups // (degree if groups > 1 else 1), *one.shape[3:]


# Gathering behind every convolution, as ChainerMN does (Kahira et al. 2021, arXiv:2104.09075, section 4; chainermn/
# functions/collective_communication.py, whose all-gather's gradient is an all-to-all and a sum). Only dense
# convolutions are split; all else works on full images, on every device. Of an image x that enters a convolution and
# y that leaves:
#
#                 forward           backward
#     filters     all-gather of y   reduce-scatter of y's gradient
#     channels    all-reduce of y   all-gather of x's gradient


def each_parts(operators: tuple[Operator, ...], by: str) -> Parts:
    """What a device does of each operator; input channels of an image are not shared.

    Args:
        operators: of a layer.
        by: ``filters`` or ``channels``.
    """
    split = OperatorPart.GATHERED if by == "filters" else OperatorPart.CHANNELS
    return tuple((operator, split if _is_split(operator, by) else OperatorPart.WHOLE) for operator in operators)


def _is_split(one: Operator, by: str) -> bool:
    dense = one.kind is OperatorClass.CONVOLUTION and channels_of(one)[2] == 1
    return dense and (by == "filters" or takes_gradient(one))


def each_divides(kind: LayerKind, by: str, degree: int) -> bool:
    """Whether a layer of pictures can be run so: what is split is split evenly; where nothing is, all do the same."""
    place = 1 if by == "filters" else 0
    split = [one for one, part in each_parts(kind.operators, by) if part is not OperatorPart.WHOLE]
    return is_picture(kind) and all(channels_of(one)[place] % degree == 0 for one in split)


def each_sizes(kind: LayerKind, by: str) -> tuple[tuple[Collective, Moment, list[int]], ...]:
    """Collectives of a layer, when they happen, and the items a sample of each call."""
    split = [one for one, part in each_parts(kind.operators, by) if part is not OperatorPart.WHOLE]
    leaving = [items_of(one)[1] for one in split]
    if by == "filters":
        back = [items_of(one)[1] for one in split if takes_gradient(one)]
        return (Collective.ALL_GATHER, Moment.FORWARD, leaving), (Collective.REDUCE_SCATTER, Moment.BACKWARD, back)
    entering = [items_of(one)[0] for one in split]
    return (Collective.ALL_REDUCE, Moment.FORWARD, leaving), (Collective.ALL_GATHER, Moment.BACKWARD, entering)
