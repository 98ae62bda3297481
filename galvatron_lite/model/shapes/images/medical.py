"""U-Nets for medical pictures and volumes: the original one, and nnU-Net's plans for brain tumours.

Sources: Ronneberger et al. 2015 (arXiv:1505.04597, figure 1: 572 x 572, convolutions without padding); Isensee et al.
2021 (nnU-Net; plans of BraTS as NVIDIA's DeepLearningExamples train them: patches of 192 x 160 and of 128^3, 32
channels doubled to at most 512 and 320, strided convolutions on the way down, instance normalisation).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from galvatron_lite.model.graph import ModelGraph, Passed
from galvatron_lite.model.shapes.assemble import with_skips
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder, compare


@dataclass(frozen=True, slots=True)
class Medical:
    """One such network."""

    inputs: int  # channels of the picture
    extent: tuple[int, ...]  # pixels along its sides
    widths: tuple[int, ...]  # channels of each level, the lowest last
    classes: int  # of a pixel
    padded: bool = True  # whether convolutions keep the extent
    strided: bool = True  # whether a convolution halves the picture, else maximum pooling before it
    norm: bool = True  # whether normalisation follows every convolution


MEDICAL = {
    "unet_medical": Medical(1, (572, 572), (64, 128, 256, 512, 1024), 2, padded=False, strided=False, norm=False),
    "nnunet_2d": Medical(4, (192, 160), (32, 64, 128, 256, 512, 512), 4),
    "nnunet_3d": Medical(4, (128, 128, 128), (32, 64, 128, 256, 320, 320), 4),
}
"""By the names of published runs."""


def medical_graph(name: str, spec: Medical, precision: str, item_bytes: int) -> ModelGraph:
    """Levels down and up again; each picture on the way down goes to its neighbour on the way up."""
    net = NetworkBuilder(name, item_bytes, spec.inputs, spec.extent)
    net.stem(_level, spec=spec, width=spec.widths[0], halves=False)
    kept = [("before", net.channels, net.extent)]
    for width in spec.widths[1:]:
        net.block(_level, spec=spec, width=width, halves=True)
        kept.append((net.layers[-1].name, net.channels, net.extent))
    kept.pop()
    skips = []
    for producer, width, extent in reversed(kept):
        net.block(_climb, spec=spec, width=width)
        skips.append(Passed(producer, (net.layers[-1].name,), width * prod(extent) * item_bytes))
    return with_skips(net.end(precision, _classes, spec=spec), skips)


def _level(flow: ImageFlow, spec: Medical, width: int, halves: bool) -> None:
    if halves and not spec.strided:
        flow.pool(2, 2, padding=0)
    for index in range(2):
        _unit(flow, spec, width, 2 if halves and spec.strided and not index else 1)


def _unit(flow: ImageFlow, spec: Medical, width: int, stride: int = 1) -> None:
    flow.convolve(width, 3, stride, bias=not spec.norm, padding=None if spec.padded else 0)
    (flow.normalise() if spec.norm else flow).activate()


def _climb(flow: ImageFlow, spec: Medical, width: int) -> None:
    """The picture at twice the size, that of the way down (its middle, where that is larger) before it."""
    flow.double(width).beside(width)
    for _ in range(2):
        _unit(flow, spec, width)


def _classes(flow: ImageFlow, spec: Medical) -> None:
    compare(flow.convolve(spec.classes, bias=True))
