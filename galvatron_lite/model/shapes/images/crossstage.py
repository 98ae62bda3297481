"""Darknets and cross-stage-partial networks (Redmon 2018; Wang et al. 2020, arXiv:1911.11929; YOLOv5's CS3).

A cross stage splits its picture by channels, passes one half through the blocks and puts both together again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import Activation, ImageFlow, rounded
from galvatron_lite.model.shapes.images.network import NetworkBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossStage:
    """One network of this kind."""

    depths: tuple[int, ...]  # blocks a stage
    widths: tuple[int, ...]  # channels a stage
    stem: tuple[int, ...] = (32, 64)  # channels of the stem's convolutions
    stem_kernel: int = 3  # of them
    stem_stride: int = 2  # of the first of them
    inner: float = 1.0  # channels inside a block as a share of those outside
    edge: bool = False  # a block is 3 x 3 then 1 x 1 instead of 1 x 1 then 3 x 3
    cross: bool = True  # the stage splits its channels
    average_down: bool = False  # pooling and a 1 x 1 convolution halve the picture instead of a 3 x 3
    squeeze: float = 0.0  # share of squeeze-and-excitation's hidden channels; 0: none
    function: Activation = "silu"  # activation


_SCALES = {"s": (0.5, 0.5), "m": (0.75, 0.67), "l": (1.0, 1.0), "x": (1.25, 1.33)}
"""Width and depth by letter (YOLOv5's model files)."""
_DARKNETS = {"17": (1, 1, 1, 1, 1), "21": (1, 1, 1, 2, 2), "53": (1, 2, 8, 8, 4)}


def cross_of(name: str) -> CrossStage | None:
    """The network that a name means; None: none of this family."""
    if found := re.fullmatch(r"cs3(se_?)?(dark|edge)net_(focus_)?([smlx])", name):
        width, depth = _SCALES[found[4]]
        edge, focus = found[2] == "edge", bool(found[3])
        quarter = bool(found[1]) and (edge or found[4] == "l")
        return CrossStage(
            depths=tuple(int(count * depth) for count in (3, 6, 9, 3)),
            widths=tuple(rounded(channels * width) for channels in (128, 256, 512, 1024)),
            stem=(rounded(64 * width),) if focus else (rounded(32 * width), rounded(64 * width)),
            stem_kernel=6 if focus else 3, inner=1.5 if edge else 1.0, edge=edge,
            squeeze=0.25 if quarter else 1 / 16 if found[1] else 0.0,
        )  # fmt: skip
    if found := re.fullmatch(r"(se)?darknet(aa)?(17|21|53)", name):
        return CrossStage(
            depths=_DARKNETS[found[3]], widths=(64, 128, 256, 512, 1024), stem=(32,), stem_stride=1, inner=0.5,
            cross=False, average_down=bool(found[2]), squeeze=1 / 16 if found[1] else 0.0, function="relu",
        )  # fmt: skip
    return None


def cross_graph(name: str, spec: CrossStage, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Stem, stages that halve the picture, blocks, head."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(_stem, spec=spec)
    for depth, width in zip(spec.depths, spec.widths, strict=True):
        net.block(_cross_stage if spec.cross else _dark_stage, spec=spec, width=width, depth=depth)
    return net.finish(classes, precision)


def _stem(flow: ImageFlow, spec: CrossStage) -> None:
    for index, width in enumerate(spec.stem):
        flow.unit(width, spec.stem_kernel, 1 if index else spec.stem_stride, 1, spec.function)
        if spec.stem_kernel % 2 == 0:
            flow.extent = (flow.extent[0] - 1, flow.extent[1] - 1)


def _half(flow: ImageFlow, spec: CrossStage, width: int) -> None:
    if spec.average_down:
        flow.pool(2, 2, maximum=False, padding=0).unit(width, 1, 1, 1, spec.function)
    else:
        flow.unit(flow.channels if spec.cross else width, 3, 2, 1, spec.function)


def _cross_stage(flow: ImageFlow, spec: CrossStage, width: int, depth: int) -> None:
    _half(flow, spec, width)
    flow.unit(width, 1, 1, 1, spec.function)
    inside, beside = flow.split(), flow.split()
    for _ in range(depth):
        _block(inside, spec, width // 2)
    inside.concatenate(beside).unit(width, 1, 1, 1, spec.function)
    flow.value, flow.channels = inside.value, inside.channels


def _dark_stage(flow: ImageFlow, spec: CrossStage, width: int, depth: int) -> None:
    _half(flow, spec, width)
    for _ in range(depth):
        _block(flow, spec, width)


def _block(flow: ImageFlow, spec: CrossStage, width: int) -> None:
    x, inner = flow.fork(), round(width * spec.inner)
    flow.unit(inner, 3 if spec.edge else 1, 1, 1, spec.function)
    if spec.squeeze:
        flow.squeeze(rounded(flow.channels * spec.squeeze, 8, 0.0))
    flow.unit(width, 1 if spec.edge else 3, 1, 1, spec.function).add(x)
