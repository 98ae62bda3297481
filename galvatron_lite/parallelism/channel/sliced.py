"""A layer as one of the devices that share its channels works on it: operators, and what is kept. No torch here."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod

from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Recompute, TensorSplit
from galvatron_lite.model.sides import sides_of
from galvatron_lite.parallelism.channel.each import each_parts
from galvatron_lite.parallelism.channel.gathers import is_added, lone_pictures
from galvatron_lite.parallelism.channel.parts import OUTPUT, OperatorPart, is_named, parts_of
from galvatron_lite.parallelism.pictures import has_weights, items_of


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
    whole = sum(items for items, _ in inputs)
    held = sum(
        items / (degree if part in (OperatorPart.CHANNELS, OperatorPart.SHARED) else 1) for items, part in inputs
    )
    made, leaving = lone_pictures(kind), kind.dims.out_channels
    held += sum(items / degree for place, (items, _) in enumerate(made) if is_added(made, place, leaving))
    return held / whole if whole else 1.0


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
