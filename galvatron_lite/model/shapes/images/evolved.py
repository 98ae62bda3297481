"""AmoebaNet-D, whose cells take the outputs of the two cells before them.

Sources: Real et al. 2018 (arXiv:1802.01548, figure 5 and appendix), as GPipe (Huang et al. 2018, arXiv:1811.06965) and
torchgpipe (Kim et al. 2020, arXiv:2004.09910, section 4) train it: the outputs of a normal cell are its states 0, 3, 4
and 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from galvatron_lite.model.graph import ModelGraph, Passed
from galvatron_lite.model.shapes.images.flow import Extent, ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder, compare
from galvatron_lite.model.shapes.records import Division
from galvatron_lite.units import activation_bytes


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


def evolved_graph(net: NetworkBuilder, layers: str, filters: str) -> ModelGraph:
    """Stem, two reduction cells, three rows of normal cells with reduction cells between them, classifier.

    Every output goes to the two cells after it; the classifier takes the last one's alone.
    """
    normal, channels = [False] * (int(layers) // 3), int(filters) // 4
    net.autocast = False
    width = channels
    net.stem(lambda flow: flow.rectify().convolve(width, 3, 2).normalise())
    names, pictures = ["before"], [(net.channels, net.extent)]
    for reduction in (True, True, *normal, True, *normal, True, *normal):
        channels *= 2 if reduction else 1
        before = pictures[-2] if len(pictures) > 1 else None
        names.append(
            net.block(_cell, f"cells.{len(net.layers)}", before=before, channels=channels, reduction=reduction)
        )
        pictures.append((net.channels, net.extent))

    def classifier(flow: ImageFlow) -> None:
        """The mean of all pixels by a window of their extent."""
        _enter(flow, pictures[-2])
        compare(flow.pool(flow.extent[0], flow.extent[0], maximum=False, padding=0).linear(1000))

    graph = net.end(classifier)
    readers = [tuple(names[place + 1 : place + 3]) or ("after",) for place in range(len(names))]
    sizes = [_items(picture) * activation_bytes(net.precision) for picture in pictures]
    return replace(graph, tensors=tuple(map(Passed, names, readers, sizes)))


def _items(picture: Picture) -> int:
    return picture[0] * prod(picture[1])


def _enter(flow: ImageFlow, picture: Picture) -> ImageFlow:
    """Another picture that enters the layer."""
    return ImageFlow(flow.tape, flow.tape.enter(_items(picture), Division.WHOLE), *picture)


def _cell(flow: ImageFlow, before: Picture | None, channels: int, reduction: bool) -> None:
    """A cell.

    Args:
        flow: the previous cell's output.
        before: the output two cells back; None: the same tensor.
        channels: of the cell's states.
        reduction: whether it halves the picture.
    """
    flow.passed = (flow.value,)
    extent = flow.extent
    skipped = _enter(flow, before) if before else flow.fork()
    states = [_unit(flow.fork(), channels, (1, 1)), _fitted(skipped, extent, channels)]
    for pair in _REDUCTION if reduction else _NORMAL:
        first, second = (
            _OPERATIONS[kind](states[source].fork(), 2 if reduction and source < 2 else 1) for source, kind in pair
        )
        states.append(first.add(second))
    chosen = (4, 5, 6) if reduction else (0, 3, 4, 6)
    out = states[chosen[0]].fork().concatenate(*(states[index] for index in chosen[1:]))
    flow.value, flow.channels, flow.extent = out.value, out.channels, out.extent


def _fitted(before: ImageFlow, extent: Extent, channels: int) -> ImageFlow:
    """The output two cells back at the cell's channels and extent; halved by two 1 x 1 convolutions side by side."""
    if before.extent != extent:
        before.rectify()
        other = before.fork().mix("shift", (2, 2), keeps=False)
        halves = [half.convolve(channels // 2, 1, 2) for half in (before.fork(), other)]
        return halves[0].concatenate(halves[1]).normalise()
    return before if before.channels == channels else _unit(before, channels, (1, 1))
