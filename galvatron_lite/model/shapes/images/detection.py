"""SSD300 over ResNet-50 (Liu et al. 2016, arXiv:1512.02325; NVIDIA DeepLearningExamples' variant)."""

from __future__ import annotations

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder
from galvatron_lite.model.shapes.images.residual import Residual, bottleneck, residual_stem

CLASSES = 81
"""COCO's classes and the background."""
_EXTRA = ((256, 512, 2, 1), (256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 1, 0), (128, 256, 1, 0))
"""Channels of the 1 x 1 and the 3 x 3 convolution, stride and padding of the latter, map after map."""
_BOXES = (4, 6, 6, 6, 4, 4)
"""Default boxes a place, map after map."""


def detector_graph(name: str, side: int, precision: str, item_bytes: int) -> ModelGraph:
    """ResNet-50 without its last stage, the third one not halving the picture; further maps; heads on every map."""
    spec = Residual(depths=(3, 4, 6))
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(residual_stem, spec=spec)
    for stage, depth in enumerate(spec.depths):
        for index in range(depth):
            net.block(bottleneck, spec=spec, stage=stage, first=not index, halves=stage == 1)
    net.block(_maps)
    return net.finish(CLASSES, precision)


def _maps(flow: ImageFlow) -> None:
    _heads(flow, _BOXES[0])
    for (inner, outer, stride, padding), boxes in zip(_EXTRA, _BOXES[1:], strict=True):
        flow.unit(inner).convolve(outer, 3, stride, padding=padding).normalise().activate()
        _heads(flow, boxes)


def _heads(flow: ImageFlow, boxes: int) -> None:
    """Places and classes of the boxes of one map, with their losses in fp32."""
    for columns in (4 * boxes, CLASSES * boxes):
        head = flow.fork().convolve(columns, 3, bias=True)
        head.mix("loss", (6, 6), count=4)
