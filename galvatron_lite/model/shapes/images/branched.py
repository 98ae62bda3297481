"""RepVGG in training: 3 x 3 and 1 x 1 convolutions and the picture itself, each normalised, summed.

Source: Ding et al. 2021 (arXiv:2101.03697, tables 2 and 3).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder

_WIDTHS = {
    "a0": (0.75, 2.5), "a1": (1.0, 2.5), "a2": (1.5, 2.75), "b0": (1.0, 2.5), "b1": (2.0, 4.0), "b2": (2.5, 5.0),
    "b3": (3.0, 5.0),
}  # fmt: skip
"""Factors on the channels of the first three stages and of the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branched:
    """One RepVGG."""

    depths: tuple[int, ...]  # blocks a stage
    widths: tuple[int, ...]  # channels a stage
    groups: int = 1  # of the convolutions of every second block


def branched_of(name: str) -> Branched | None:
    """The network that a name means; None: none of this family."""
    found = re.fullmatch(r"repvgg_([ab]\d)(?:g(\d))?", name)
    if not found or found[1] not in _WIDTHS:
        return None
    factor, last = _WIDTHS[found[1]]
    widths = (*(int(64 * 2**stage * factor) for stage in range(3)), int(512 * last))
    depths = (2, 4, 14, 1) if found[1].startswith("a") else (4, 6, 16, 1)
    return Branched(depths=depths, widths=widths, groups=int(found[2] or 1))


def branched_graph(name: str, spec: Branched, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Stem, blocks stage by stage, the first of each halving the picture, head."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(_block, width=min(64, spec.widths[0]), stride=2, groups=1)
    place = 0
    for depth, width in zip(spec.depths, spec.widths, strict=True):
        for index in range(depth):
            place += 1
            net.block(_block, width=width, stride=1 if index else 2, groups=1 if place % 2 else spec.groups)
    return net.finish(classes, precision)


def _block(flow: ImageFlow, width: int, stride: int, groups: int) -> None:
    x = flow.fork()
    narrow = flow.fork().convolve(width, 1, stride, groups).normalise()
    flow.convolve(width, 3, stride, groups).normalise().add(narrow)
    if stride == 1 and x.channels == width:
        flow.add(x.normalise())
    flow.activate()
