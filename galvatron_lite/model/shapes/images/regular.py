"""RegNet X and Y: widths from a line, quantised (Radosavovic et al. 2020, arXiv:2003.13678)."""

from __future__ import annotations

from math import log

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder

Line = tuple[int, float, float, int, int]
"""First width, slope, quantisation step, channels a group, blocks (table 8 and 9 of the paper's appendix)."""

LINES: dict[str, Line] = {
    "x_002": (24, 36.44, 2.49, 8, 13),
    "x_004": (24, 24.48, 2.54, 16, 22),
    "x_006": (48, 36.97, 2.24, 24, 16),
    "x_008": (56, 35.73, 2.28, 16, 16),
    "x_016": (80, 34.01, 2.25, 24, 18),
    "x_032": (88, 26.31, 2.25, 48, 25),
    "x_040": (96, 38.65, 2.43, 40, 23),
    "x_064": (184, 60.83, 2.07, 56, 17),
    "x_080": (80, 49.56, 2.88, 120, 23),
    "x_120": (168, 73.36, 2.37, 112, 19),
    "x_160": (216, 55.59, 2.1, 128, 22),
    "x_320": (320, 69.86, 2.0, 168, 23),
    "y_002": (24, 36.44, 2.49, 8, 13),
    "y_004": (48, 27.89, 2.09, 8, 16),
    "y_006": (48, 32.54, 2.32, 16, 15),
    "y_008": (56, 38.84, 2.4, 16, 14),
    "y_016": (48, 20.71, 2.65, 24, 27),
    "y_032": (80, 42.63, 2.66, 24, 21),
    "y_040": (96, 31.41, 2.24, 64, 22),
    "y_064": (112, 33.22, 2.27, 72, 25),
    "y_080": (192, 76.82, 2.19, 56, 17),
    "y_120": (168, 73.36, 2.37, 112, 19),
    "y_160": (200, 106.23, 2.48, 112, 18),
    "y_320": (232, 115.89, 2.53, 232, 20),
}


def widths_of(line: Line) -> list[int]:
    """Channels of every block, each a multiple of the group's (equations 2 to 4)."""
    start, slope, step, group, blocks = line
    powers = (round(log((start + slope * index) / start) / log(step)) for index in range(blocks))
    widths = [round(start * step**power / 8) * 8 for power in powers]
    return [max(1, round(width / min(group, width))) * min(group, width) for width in widths]


def regular_graph(name: str, key: str, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Stem of one 3 x 3 convolution, blocks that halve the picture where the width grows, head."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(_stem)
    group, before = LINES[key][3], 0
    for width in widths_of(LINES[key]):
        stride = 2 if width != before else 1
        net.block(regular_block, width=width, group=min(group, width), stride=stride, squeeze=key.startswith("y"))
        before = width
    return net.finish(classes, precision)


def _stem(flow: ImageFlow) -> None:
    flow.unit(32, 3, 2)


def regular_block(flow: ImageFlow, width: int, group: int, stride: int, squeeze: bool) -> None:
    """1 x 1, grouped 3 x 3 (with the stride) and 1 x 1 convolutions added to the input."""
    x, enters = flow.fork(), flow.channels
    flow.unit(width).unit(width, 3, stride, width // group)
    if squeeze:
        flow.squeeze(round(enters / 4))
    flow.convolve(width).normalise()
    if stride > 1 or enters != width:
        x.convolve(width, 1, stride).normalise()
    flow.add(x).activate()
