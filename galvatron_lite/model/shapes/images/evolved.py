"""AmoebaNet-D, whose cells take the outputs of the two cells before them.

Sources: Real et al. 2018 (arXiv:1802.01548, figure 5 and appendix), as GPipe (Huang et al. 2018, arXiv:1811.06965) and
torchgpipe (Kim et al. 2020, arXiv:2004.09910, section 4) train it: the outputs of a normal cell are its states 0, 3, 4
and 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Passed, Role, SplitDims
from galvatron_lite.model.shapes.images.flow import Extent, ImageFlow
from galvatron_lite.model.shapes.images.network import NOT_SPLIT, compare
from galvatron_lite.model.shapes.records import Division, Value
from galvatron_lite.model.shapes.tape import Tape, assemble


def _narrow(flow: ImageFlow, stride: int, kernels: tuple[Extent, ...]) -> ImageFlow:
    """Convolutions at a quarter of the channels between two 1 x 1 ones; the first of them strides."""
    channels = flow.channels
    _unit(flow, channels // 4, (1, 1))
    for index, kernel in enumerate(kernels):
        _unit(flow, channels // 4, kernel, 1 if index else stride)
    return _unit(flow, channels, (1, 1))


def _unit(flow: ImageFlow, out: int, kernel: Extent, stride: int = 1) -> ImageFlow:
    return flow.rectify().convolve(out, kernel, stride, padding=None if kernel != (1, 1) else 0).normalise()


_OPERATIONS: dict[str, Callable[[ImageFlow, int], ImageFlow]] = {
    "none": lambda flow, _: flow,
    "conv": lambda flow, stride: _unit(flow, flow.channels, (1, 1), stride),
    "conv3": lambda flow, stride: _narrow(flow, stride, ((3, 3),)),
    "conv7": lambda flow, stride: _narrow(flow, stride, ((1, 7), (7, 1))),
    "mean": lambda flow, stride: flow.pool(3, stride, maximum=False),
    "max": lambda flow, stride: flow.pool(2, stride, padding=0),
}
_NORMAL = (
    ((1, "conv"), (1, "mean")), ((1, "none"), (0, "conv7")), ((0, "conv"), (0, "conv7")), ((2, "mean"), (2, "none")),
    ((1, "mean"), (5, "conv")),
)  # fmt: skip
_REDUCTION = (
    ((0, "max"), (0, "mean")), ((2, "none"), (1, "conv3")), ((2, "conv7"), (2, "mean")), ((3, "none"), (1, "max")),
    ((2, "mean"), (3, "conv")),
)  # fmt: skip
"""Pairs of operations whose results are summed into a new state, each with the state it takes (3 x 3 maxima are means
in torchgpipe's port)."""


Picture = tuple[int, Extent]
"""Channels and extent."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Cells are equal where these are."""

    before: Picture  # the output two cells back
    last: Picture  # the previous cell's output
    channels: int  # of the cell's states
    reduction: bool  # whether it halves the picture
    single: bool  # whether both inputs are one tensor


def evolved_graph(
    name: str, layers: int, filters: int, side: int, classes: int, precision: str, item_bytes: int
) -> ModelGraph:
    """Stem, two reduction cells, three rows of normal cells with reduction cells between them, classifier.

    Every output goes to the two cells after it; the classifier takes the last one's alone.
    """
    each, channels = layers // 3, filters // 4
    tape = Tape(item_bytes)
    flow = _enter(tape, (3, (side, side)), grad=False).rectify().convolve(channels, 3, 2).normalise()
    stem = _kind(tape, "before", (flow.value,), (3, (side, side)), channels)
    before = last = (channels, flow.extent)
    kinds: dict[Cell, LayerKind] = {}
    blocks: list[Layer] = []
    sizes = [_items(last) * item_bytes]
    for reduction in (True, True, *[False] * each, True, *[False] * each, True, *[False] * each):
        channels *= 2 if reduction else 1
        cell = Cell(before, last, channels, reduction, not blocks)
        if cell not in kinds:
            kinds[cell] = _cell_kind(cell, f"cell{len(kinds)}", item_bytes)
        blocks.append(Layer(f"cells.{len(blocks)}", kinds[cell].name, Role.BLOCK))
        height, width = last[1]
        result = (3 * channels, (height // 2, width // 2)) if reduction else (4 * channels, (height, width))
        before, last = last, result
        sizes.append(_items(last) * item_bytes)
    after = _classifier(last, before, classes, item_bytes)
    names = ["before", *(block.name for block in blocks)]
    readers = [names[place + 1 : place + 3] or ["after"] for place in range(len(names))]
    tensors = [Passed(name, tuple(own), size) for name, own, size in zip(names, readers, sizes, strict=True)]
    return assemble(name, [stem, *kinds.values(), after], blocks, sequence=1, precision=precision, tensors=tensors)


def _items(picture: Picture) -> int:
    return picture[0] * prod(picture[1])


def _enter(tape: Tape, picture: Picture, *, grad: bool = True) -> ImageFlow:
    return ImageFlow(tape, tape.enter(_items(picture), Division.WHOLE, grad=grad), *picture)


def _kind(tape: Tape, name: str, outputs: tuple[Value, ...], entering: Picture, out: int) -> LayerKind:
    channels, (height, width) = entering
    dims = SplitDims(in_channels=channels, out_channels=out, height=height, width=width)
    return tape.kind(name, outputs, dims, tensor_reason=NOT_SPLIT, recomputed=name.startswith("cell"))


def _cell_kind(cell: Cell, name: str, item_bytes: int) -> LayerKind:
    tape = Tape(item_bytes)
    last = _enter(tape, cell.last)
    before = last.fork() if cell.single else _enter(tape, cell.before)
    skip = last.value
    states = [_unit(last, cell.channels, (1, 1)), _fitted(before, cell)]
    for pair in _REDUCTION if cell.reduction else _NORMAL:
        first, second = (
            _OPERATIONS[kind](states[source].fork(), 2 if cell.reduction and source < 2 else 1) for source, kind in pair
        )
        states.append(first.add(second))
    chosen = (4, 5, 6) if cell.reduction else (0, 3, 4, 6)
    out = states[chosen[0]].fork().concatenate(*(states[index] for index in chosen[1:]))
    return _kind(tape, name, (out.value, skip), cell.last, out.channels)


def _fitted(before: ImageFlow, cell: Cell) -> ImageFlow:
    """The output two cells back at the cell's channels and extent; halved by two 1 x 1 convolutions side by side."""
    if before.extent != cell.last[1]:
        before.rectify()
        other = before.fork().mix("shift", (2, 2), keeps=False)
        halves = [half.convolve(cell.channels // 2, 1, 2) for half in (before.fork(), other)]
        return halves[0].concatenate(halves[1]).normalise()
    return before if before.channels == cell.channels else _unit(before, cell.channels, (1, 1))


def _classifier(last: Picture, skip: Picture, classes: int, item_bytes: int) -> LayerKind:
    tape = Tape(item_bytes)
    flow = _enter(tape, last)
    _enter(tape, skip)
    side = last[1][0]
    compare(flow.pool(side, side, maximum=False, padding=0).linear(classes))
    return _kind(tape, "after", (flow.value,), last, classes)
