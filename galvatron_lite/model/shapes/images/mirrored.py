"""U-Net (Ronneberger et al. 2015, arXiv:1505.04597) as torchgpipe trains it (Kim et al. 2020, arXiv:2004.09910). No
torch here.
"""

from __future__ import annotations

from galvatron_lite.model.graph import ModelGraph, Passed
from galvatron_lite.model.shapes.assemble import with_skips
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder

LEVELS = 5
"""Halvings of the picture."""


def mirrored_graph(name: str, convolutions: int, base: int, side: int, precision: str, item_bytes: int) -> ModelGraph:
    """Levels that halve the picture and double its channels, the way back with the pictures kept on the way down."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    widths = [base * 2**level for level in range(LEVELS)]
    net.stem(_level, inner=base, out=base, count=convolutions, halve=True)
    kept = [("before", _pictured(net))]
    for width in widths[1:]:
        net.block(_level, inner=width, out=width, count=convolutions, halve=True)
        kept.append((net.layers[-1].name, _pictured(net)))
    net.block(_level, inner=2 * widths[-1], out=widths[-1], count=convolutions, halve=False)
    skips = []
    for width in reversed(widths):
        net.block(_climb, skip=width, out=width // 2, count=convolutions)
        producer, size = kept.pop()
        skips.append(Passed(producer, (net.layers[-1].name,), size))
    return with_skips(net.finish(1, precision), skips)


def _pictured(net: NetworkBuilder) -> int:
    """Bytes of the picture before the pooling that the last level ended with."""
    return net.channels * 4 * net.extent[0] * net.extent[1] * (net.wide or net.item_bytes)


def _level(flow: ImageFlow, inner: int, out: int, count: int, halve: bool) -> None:
    """So many convolutions, then maximum pooling; the picture before it is what the way back takes."""
    for index in range(count):
        _unit(flow, out if index == count - 1 else inner)
    if halve:
        flow.pool(2, 2, padding=0)


def _climb(flow: ImageFlow, skip: int, out: int, count: int) -> None:
    """Every pixel four times, the picture of the same extent on the way down beside it, convolutions."""
    flow.extent = (2 * flow.extent[0], 2 * flow.extent[1])
    flow.enlarge(skip)
    _level(flow, out, out, count, halve=False)


def _unit(flow: ImageFlow, out: int) -> None:
    """Convolution, dropout of whole channels, normalisation of each sample, leaky ReLU: each into a new tensor."""
    flow.convolve(out, 3).mix("dropout", (2, 2), keeps=False).mix("norm", (3, 5)).mix("relu", (2, 3))
