"""VGG and DenseNet.

Sources: Simonyan and Zisserman 2014 (arXiv:1409.1556, table 1), Huang et al. 2017 (arXiv:1608.06993, table 1).
"""

from __future__ import annotations

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder

VGG = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions a stage by the number of layers with weights."""
DENSE = {121: (6, 12, 24, 16), 161: (6, 12, 36, 24), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32), 264: (6, 12, 64, 48)}
"""Dense layers a block by depth."""


def vgg_graph(
    name: str, depth: int, norm: bool, side: int, classes: int, precision: str, item_bytes: int
) -> ModelGraph:
    """3 x 3 convolutions and max pooling; the first fully connected layer is a 7 x 7 convolution."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(_vgg_unit, width=64, norm=norm, pool=VGG[depth][0] == 1)
    for stage, count in enumerate(VGG[depth]):
        for index in range(1 if not stage else 0, count):
            net.block(_vgg_unit, width=min(512, 64 * 2**stage), norm=norm, pool=index == count - 1)
    return net.finish(classes, precision, _vgg_head)


def _vgg_unit(flow: ImageFlow, width: int, norm: bool, pool: bool) -> None:
    flow.convolve(width, 3, bias=True)
    (flow.normalise() if norm else flow).activate()
    if pool:
        flow.pool(2, 2, padding=0)


def _vgg_head(flow: ImageFlow) -> None:
    flow.convolve(4096, flow.extent[0], flow.extent[0], bias=True).activate()
    flow.linear(4096).activate()


def dense_graph(name: str, depth: int, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Blocks of layers that each add ``growth`` channels; transitions halve channels and picture."""
    growth = 48 if depth in (161, 264) else 32
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(_dense_stem, width=2 * growth)
    for stage, layers in enumerate(DENSE[depth]):
        if stage:
            net.block(_transition)
        for _ in range(layers):
            net.block(_dense_layer, growth=growth)
    return net.finish(classes, precision, _dense_end)


def _dense_stem(flow: ImageFlow, width: int) -> None:
    flow.unit(width, 7, 2).pool(3, 2)


def _dense_layer(flow: ImageFlow, growth: int) -> None:
    """All channels so far are copied together with the new ones."""
    x = flow.fork()
    flow.normalise().activate().unit(4 * growth).convolve(growth, 3)
    x.concatenate(flow)
    flow.value, flow.channels = x.value, x.channels


def _transition(flow: ImageFlow) -> None:
    flow.normalise().activate().convolve(flow.channels // 2).pool(2, 2, maximum=False, padding=0)


def _dense_end(flow: ImageFlow) -> None:
    flow.normalise().activate()
