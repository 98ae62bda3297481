"""Which operators of a convolutional layer are split by output channels, and which by input channels.

``filters``: the input is full on all devices. An operator with weights computes a share of its output channels. The
next operator with as many input channels reads this share, and computes partial sums of its full output. So a sum
serves a pair of operators, as in Megatron's column and row pairs. Between the two, grouped convolutions and operators
on single channels run on shares; in front of a pair each device runs them in full. Shares that no operator reads are
gathered where a full image is needed: after pooling, and once for two that are added.

``channels``: all images are shared by channels. An operator computes partial sums of its full output from its share of
input channels, which are reduce-scattered into shares.

We assume that operators are listed in the order they run, and that an operator reads the output of the previous one if
its number of input channels matches (a shortcut of equal width would be taken for the main path).
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

BY = ("filters", "channels")
"""Fields of ``Strategy``: output channels, input channels."""


class OperatorPart(StrEnum):
    """The part of an operator that a device runs."""

    FILTERS = "filters"
    """A share of the output channels, from the full input."""
    GATHERED = "gathered"
    """Like FILTERS, and the output is gathered."""
    CHANNELS = "channels"
    """Partial sums of the full output, from a share of the input channels."""
    SCATTERED = "scattered"
    """Like CHANNELS, and the output is reduce-scattered."""
    SHARED = "shared"
    """A share of the channels of input and output."""
    WHOLE = "whole"
    """The full operator."""


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """How the channels of a layer are shared: ``infer_channels`` returns it, and ``shard_channels`` carries it out."""

    by: str  # ``filters`` or ``channels``
    degree: int  # devices that share them
    # parts of convolutions and linears that are split, by path in the layer: ``FILTERS`` (outputs are gathered where
    # they must be full), ``CHANNELS``, ``SCATTERED`` or ``SHARED``
    parts: Mapping[str, OperatorPart] = field(default_factory=dict)
    # names of unsplit parameters with partial gradients, as they are used on shares; by ``channels`` all unsplit
    # parameters have partial gradients
    partial: frozenset[str] = frozenset()
    inputs: tuple[int, ...] = ()  # channels of input images in order, by ``channels``
    outputs: tuple[int, ...] = ()  # channels of output images in order, by ``channels``


Parts = tuple[tuple[Operator, OperatorPart], ...]
OUTPUT = (OperatorPart.FILTERS, OperatorPart.GATHERED)
"""Shares of the output channels."""


@lru_cache(maxsize=4096)
def parts_of(operators: tuple[Operator, ...], by: str) -> Parts:
    """Return the part of each operator that a device runs; see the module.

    Args:
        operators: of a layer, in the order they run.
        by: ``filters`` or ``channels``.
    """
    return _paired(operators) if by == "filters" else tuple((operator, _scattered(operator)) for operator in operators)


def _scattered(operator: Operator) -> OperatorPart:
    dense = has_weights(operator) and channels_of(operator)[2] == 1
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
    """Gather the output of the operator at ``begun``, since no operator reads its shares."""
    if begun >= 0:
        parts[begun] = OperatorPart.GATHERED


def takes_gradient(operator: Operator) -> bool:
    """Whether the input of an operator with weights needs a gradient; the model's input needs none."""
    return operator.backward_flops > operator.flops


def splits_channels(kind: LayerKind, by: str) -> bool:
    """Whether a layer's channels may be shared; by ``channels`` not if it returns a loss, which has no channels."""
    if not is_picture(kind) or by in kind.channel_reasons:
        return False
    return by == "filters" or (kind.output_bytes > LOSS_BYTES and kind.dims.out_channels > 0)


LOSS_BYTES = 8
"""The most bytes of a sample's loss."""


def divides(kind: LayerKind, by: str, degree: int) -> bool:
    """Whether all channels that a layer splits are split evenly."""
    parts = parts_of(kind.operators, by)
    dense = any(has_weights(operator) and part is not OperatorPart.WHOLE for operator, part in parts)
    return dense and all(_even(operator, part, degree) for operator, part in parts if has_weights(operator))


def undivided(kind: LayerKind, by: str, degree: int) -> str:
    """Name an operator whose channels cannot be split evenly; empty if all can be."""
    parts = parts_of(kind.operators, by)
    for operator, part in parts:
        if has_weights(operator) and not _even(operator, part, degree):
            inputs, outputs, groups = channels_of(operator)
            shape = f"{inputs} -> {outputs} channels" + (f" in {groups} groups" if groups > 1 else "")
            return f"{operator.name}: {shape} cannot be shared evenly by {degree}"
    return "" if divides(kind, by, degree) else "none of its operators has weights of all channels"


def _even(operator: Operator, part: OperatorPart, degree: int) -> bool:
    inputs, outputs, groups = channels_of(operator)
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
    """Return the items of split parameters: of weights; biases and norms count as unsplit."""
    return sum(
        items_of(operator)[2]
        for operator, part in parts_of(kind.operators, by)
        if has_weights(operator) and part is not OperatorPart.WHOLE
    )


def is_named(operator: Operator, names: tuple[str, ...]) -> bool:
    """Whether an operator has one of these names, without its module's path and its number."""
    return operator.name.rpartition(".")[2].rstrip("_0123456789") in names


EDGES = (Role.BEFORE.value, Role.AFTER.value)
"""Names of the kinds of layers before and after the blocks."""


def gathered_items(kind: LayerKind) -> list[int]:
    """Return the items of a sample of each gathered picture, by ``filters``.

    If two pictures are as large as the output, the second is added to the first. Before and after the blocks, outputs
    of modules are gathered at once, since code of the model follows them.
    """
    pictures = lone_pictures(kind)
    return [items for index, (items, _) in enumerate(pictures) if not is_added(pictures, index, kind.dims.out_channels)]


def lone_pictures(kind: LayerKind) -> list[tuple[int, int]]:
    """Return items and channels of the shared pictures that no operator reads."""
    parts = parts_of(kind.operators, "filters")
    return [
        (_items_after(operator, () if kind.name in EDGES else parts[index + 1 :]), channels_of(operator)[1])
        for index, (operator, part) in enumerate(parts)
        if part is OperatorPart.GATHERED
    ]


def is_added(pictures: Sequence[tuple[int, int]], place: int, leaving: int) -> bool:
    """Whether a picture is added to a later one while both are shared; ``leaving``: channels of the output."""
    return pictures[place][1] == leaving and pictures[place] in pictures[place + 1 :]


def _items_after(operator: Operator, following: Parts) -> int:
    """Items of an operator's output after the operators on its shares.

    Pooling makes a picture smaller. A factor for each channel (one pixel) makes a picture of the largest that follows.
    """
    items = items_of(operator)[1]
    is_factor = items == channels_of(operator)[1]
    for other, part in following:
        if has_weights(other) and part is not OperatorPart.SHARED:
            break
        if other.kind is OperatorClass.MEMORY and (sides_of(other) or (is_factor and other.shape[0] > items)):
            items = other.shape[0]
    return items


def joined_items(kind: LayerKind) -> list[int]:
    """Return the items of a sample of each picture that joins others along their channels."""
    return [
        operator.shape[0] for operator in kind.operators if not has_weights(operator) and is_named(operator, ("cat",))
    ]


def pixel_norms(kind: LayerKind, by: str) -> list[float]:
    """Return the statistics (two figures a pixel) of each norm over channels that is summed over shared channels.

    Norms have two items of weights for each channel, in the precision of weights or fp32; learned scales have one.
    """
    channels, norms = kind.dims.in_channels, list[float]()
    shared = by == "channels" or kind.name not in EDGES
    for operator, part in parts_of(kind.operators, by):
        if has_weights(operator):
            channels = channels_of(operator)[1]
        elif (
            shared
            and part is OperatorPart.SHARED
            and operator.weight_bytes in _norm_bytes(kind, channels)
            and not operator.statistics
        ):
            norms.append(2 * operator.shape[0] / channels)
    return norms


def _norm_bytes(kind: LayerKind, channels: int) -> tuple[int, int]:
    """Bytes of a norm's weights."""
    sizes = [operator.weight_bytes // items_of(operator)[2] for operator in kind.operators if has_weights(operator)]
    return 2 * channels * min(sizes, default=0), 2 * channels * ITEM_BYTES["fp32"]


def sliced_kind(kind: LayerKind, by: str, degree: int, each: bool = False) -> LayerKind:
    """Return a layer as one of ``degree`` devices runs it: operators with sharded shapes, and saved bytes.

    Full recomputation saves the full input. Transient tensors count in full, as in collectives.

    Args:
        kind: of layer.
        by: ``filters`` or ``channels``.
        degree: devices.
        each: whether pictures are gathered after each convolution (``each_parts``), so that saved tensors are full.
    """
    parts = each_parts(kind.operators, by) if each else parts_of(kind.operators, by)
    share = {choice: 1.0 if each else _kept_share(kind, by, degree, choice) for choice in kind.kept}
    kept = {choice: _scaled(size, share[choice]) for choice, size in kind.kept.items()}
    return replace(kind, operators=tuple(_sliced(operator, part, degree) for operator, part in parts), kept=kept)


def kind_under(kind: LayerKind, split: object, each: bool = False) -> LayerKind:
    """Return a layer as one device runs it under a strategy, or at a point of a profile; see ``sliced_kind``."""
    for by in BY:
        if getattr(split, by) > 1:
            kind = sliced_kind(kind, by, getattr(split, by), each)
    return kind


def _scaled(size: TensorSplit, share: float) -> TensorSplit:
    return TensorSplit(*(ceil(part * share) for part in (size.tensor, size.sequence, size.whole)))


def _kept_share(kind: LayerKind, by: str, degree: int, choice: Recompute) -> float:
    """The share of saved bytes: of the inputs of operators that save them, by items.

    If two shared pictures are added, their shares are saved beside the full sum.
    """
    if by == "channels":
        return 1 / degree
    if choice is Recompute.FULL:
        return 1.0
    parts = parts_of(kind.operators, by)
    inputs = [(_input_items(operator), part) for operator, part in parts if _saves_input(operator)]
    total = sum(items for items, _ in inputs)
    saved = sum(
        items / (degree if part in (OperatorPart.CHANNELS, OperatorPart.SHARED) else 1) for items, part in inputs
    )
    pictures, leaving = lone_pictures(kind), kind.dims.out_channels
    saved += sum(items / degree for index, (items, _) in enumerate(pictures) if is_added(pictures, index, leaving))
    return saved / total if total else 1.0


def _saves_input(operator: Operator) -> bool:
    """Whether autograd saves an operator's input; sums and joins save nothing, and ReLU its output, counted later."""
    return operator.weight_bytes > 0 or not is_named(operator, ("relu", "leaky_relu", "add", "residual", "cat"))


def _input_items(operator: Operator) -> int:
    if has_weights(operator):
        return items_of(operator)[0]
    sides = sides_of(operator)
    return operator.shape[1] * prod(side.extent for side in sides) if sides else operator.shape[0]


def _sliced(operator: Operator, part: OperatorPart, degree: int) -> Operator:
    if part is OperatorPart.WHOLE:
        return operator
    moved = 1 / degree if part is OperatorPart.SHARED else _moved_share(operator, part, degree)
    return replace(
        operator,
        shape=_shape(operator, part, degree),
        flops=operator.flops // degree,
        backward_flops=operator.backward_flops // degree,
        moved=ceil(operator.moved * moved),
        backward_moved=ceil(operator.backward_moved * moved),
        weight_bytes=ceil(operator.weight_bytes / degree),
    )


def _moved_share(operator: Operator, part: OperatorPart, degree: int) -> float:
    """The share of the bytes of input and output, one of which is full."""
    x, y, _ = items_of(operator)
    return (x + y / degree) / (x + y) if part in OUTPUT else (x / degree + y) / (x + y)


def _shape(operator: Operator, part: OperatorPart, degree: int) -> tuple[int, ...]:
    if operator.kind is OperatorClass.MEMORY:
        return (ceil(operator.shape[0] / degree), *operator.shape[1:])
    inner, outer = (1 if part in OUTPUT else degree), (degree if part in (*OUTPUT, OperatorPart.SHARED) else 1)
    if operator.kind is OperatorClass.MATMUL:
        rows, inputs, outputs = operator.shape
        return rows, inputs // inner, outputs // outer
    inputs, outputs, groups = operator.shape[:3]
    return inputs // inner, outputs // outer, groups // (degree if groups > 1 else 1), *operator.shape[3:]


# Gathering after each convolution, as in ChainerMN (Kahira et al. 2021, arXiv:2104.09075, section 4; chainermn/
# functions/collective_communication.py, where the gradient of an all-gather is an all-to-all and a sum). Only dense
# convolutions are split; other operators run on full images, on all devices. For input x and output y of a convolution:
#
#                 forward           backward
#     filters     all-gather of y   reduce-scatter of y's gradient
#     channels    all-reduce of y   all-gather of x's gradient


def each_parts(operators: tuple[Operator, ...], by: str) -> Parts:
    """Return the part of each operator that a device runs; channels of the model's input are not shared.

    Args:
        operators: of a layer.
        by: ``filters`` or ``channels``.
    """
    split = OperatorPart.GATHERED if by == "filters" else OperatorPart.CHANNELS
    return tuple((operator, split if _is_split(operator, by) else OperatorPart.WHOLE) for operator in operators)


def _is_split(operator: Operator, by: str) -> bool:
    dense = operator.kind is OperatorClass.CONVOLUTION and channels_of(operator)[2] == 1
    return dense and (by == "filters" or takes_gradient(operator))


def each_divides(kind: LayerKind, by: str, degree: int) -> bool:
    """Whether all split operators of a layer of pictures are split evenly."""
    index = 1 if by == "filters" else 0
    split = [operator for operator in kind.operators if _is_split(operator, by)]
    return is_picture(kind) and all(channels_of(operator)[index] % degree == 0 for operator in split)


def each_sizes(kind: LayerKind, by: str) -> tuple[tuple[Collective, Moment, list[int]], ...]:
    """Return the collectives of a layer, when they happen, and the items of a sample in each call."""
    split = [operator for operator in kind.operators if _is_split(operator, by)]
    outputs = [items_of(operator)[1] for operator in split]
    if by == "filters":
        gradients = [items_of(operator)[1] for operator in split if takes_gradient(operator)]
        return (Collective.ALL_GATHER, Moment.FORWARD, outputs), (Collective.REDUCE_SCATTER, Moment.BACKWARD, gradients)
    inputs = [items_of(operator)[0] for operator in split]
    return (Collective.ALL_REDUCE, Moment.FORWARD, outputs), (Collective.ALL_GATHER, Moment.BACKWARD, inputs)
