"""Networks of equal blocks over the patches of a picture: XCiT and ConvMixer.

Sources: El-Nouby et al. 2021 (arXiv:2106.09681, table 1), Trockman and Kolter 2022 (arXiv:2201.09792).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import Activation, ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder

_XCIT = {"nano": (128, 4), "tiny": (192, 4), "small": (384, 8), "medium": (512, 8), "large": (768, 16)}
"""Width and heads."""
CLASS_LAYERS = 2  # XCiT's last layers, whose attention is the class token's only


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossCovariance:
    """An XCiT: attention between channels instead of tokens."""

    width: int  # of the hidden state
    heads: int  # of attention
    depth: int  # blocks
    patch: int  # pixels along each side of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A ConvMixer: depthwise and pointwise convolutions over patches."""

    width: int  # channels
    depth: int  # blocks
    kernel: int  # of the depthwise convolutions
    patch: int  # pixels along each side of a patch
    function: Activation = "gelu"  # activation


def tokens_of(name: str) -> CrossCovariance | Mixed | None:
    """The network that a name means; None: none of these."""
    if (found := re.fullmatch(r"xcit_(\w+?)_(\d+)_p(8|16)_\d+(?:_dist)?", name)) and found[1] in _XCIT:
        width, heads = _XCIT[found[1]]
        return CrossCovariance(width=width, heads=heads, depth=int(found[2]), patch=int(found[3]))
    if found := re.fullmatch(r"convmixer_(\d+)_(\d+)(?:_ks(\d+)_p(\d+))?", name):
        kernel, patch = int(found[3] or 9), int(found[4] or 7)
        return Mixed(width=int(found[1]), depth=int(found[2]), kernel=7 if found[1] == "768" else kernel, patch=patch,
                     function="relu" if found[1] == "768" else "gelu")  # fmt: skip
    return None


def tokens_graph(
    name: str, spec: CrossCovariance | Mixed, side: int, classes: int, precision: str, item_bytes: int
) -> ModelGraph:
    """Stem, equal blocks, head."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    if isinstance(spec, Mixed):
        net.stem(_patches, spec=spec)
        for _ in range(spec.depth):
            net.block(_mixed, spec=spec)
        return net.finish(classes, precision)
    net.stem(_halving, spec=spec)
    for _ in range(spec.depth):
        net.block(_covariance, spec=spec)
    for _ in range(CLASS_LAYERS):
        net.block(_class_layer, spec=spec)
    return net.finish(classes, precision, _norm)


def _patches(flow: ImageFlow, spec: Mixed) -> None:
    flow.convolve(spec.width, spec.patch, spec.patch, bias=True).activate(spec.function).normalise()


def _mixed(flow: ImageFlow, spec: Mixed) -> None:
    x = flow.fork()
    flow.convolve(spec.width, spec.kernel, 1, spec.width, bias=True, padding=spec.kernel // 2)
    flow.activate(spec.function).normalise().add(x)
    flow.convolve(spec.width, bias=True).activate(spec.function).normalise()


def _halving(flow: ImageFlow, spec: CrossCovariance) -> None:
    """3 x 3 convolutions that halve the picture down to one pixel a patch; 64 waves make positions."""
    halvings = {16: 4, 8: 3}[spec.patch]
    for left in reversed(range(halvings)):
        flow.convolve(spec.width // 2**left, 3, 2).normalise()
        if left:
            flow.activate("gelu")
    flow.tape.count(64 * spec.width + spec.width)
    flow.mix("positions", (3, 1), keeps=False)


def _covariance(flow: ImageFlow, spec: CrossCovariance) -> None:
    """Attention between channels, local 3 x 3 convolutions, MLP; each scaled and added."""
    width, x = spec.width, flow.fork()
    flow.layer_norm().linear(3 * width).covary(spec.heads).linear(width).scale().add(x)
    x = flow.fork()
    flow.layer_norm().mix("permute", (2, 2), keeps=False).convolve(width, 3, 1, width, bias=True).activate("gelu")
    flow.normalise().convolve(width, 3, 1, width, bias=True).mix("permute", (2, 2), keeps=False).scale().add(x)
    x = flow.fork()
    flow.layer_norm().linear(4 * width).activate("gelu").linear(width).scale().add(x)


def _class_layer(flow: ImageFlow, spec: CrossCovariance) -> None:
    """Keys and values of all tokens; the query, projection and MLP of the class token cost next to nothing."""
    x, width = flow.fork(), spec.width
    flow.layer_norm()
    flow.fork().linear(2 * width).mix("attend", (2, 4))
    flow.tape.count(10 * width * width + 9 * width)
    flow.add(x)


def _norm(flow: ImageFlow) -> None:
    flow.layer_norm()
