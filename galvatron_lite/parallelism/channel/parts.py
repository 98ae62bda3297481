"""Which operators of a convolutional layer are split by their output channels, and which by their input channels.

``filters``: the picture that enters is whole on every device. An operator with weights makes a share of its output
channels; the next one that reads exactly these channels takes them as its share of input channels and makes partial
sums of its whole output. So operators pair up, and one sum serves two of them, as in Megatron's column and row pairs.
Grouped convolutions and what works channel by channel go on with the shares between the two; in front of a pair each
device does them in full. Shares that no operator takes up are gathered where a whole picture is needed: after pooling,
and once for two that are added.

``channels``: every picture is shared by channels. Each operator makes partial sums of its whole output from its share
of input channels, which are reduced and scattered into shares.

Assumed: operators are listed in the order they run, and one reads what the one before it made where its input channels
are that many (a shortcut of equal width would be taken for the main path).
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

from galvatron_lite.model.graph import LayerKind, Operator
from galvatron_lite.parallelism.pictures import channels_of, has_weights, is_picture, items_of


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
    return _paired(operators) if by == "filters" else tuple((one, _scattered(one)) for one in operators)


def _scattered(one: Operator) -> OperatorPart:
    dense = has_weights(one) and channels_of(one)[2] == 1
    return OperatorPart.SCATTERED if dense else OperatorPart.SHARED


def _paired(operators: tuple[Operator, ...]) -> Parts:
    parts: list[OperatorPart] = []
    begun, width = -1, 0
    for place, one in enumerate(operators):
        if not has_weights(one):
            parts.append(OperatorPart.SHARED if begun >= 0 else OperatorPart.WHOLE)
            continue
        inputs, outputs, groups = channels_of(one)
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
