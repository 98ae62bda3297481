"""Rows of the networks that ``mobile`` builds, from their papers' tables, and which name means which."""

from __future__ import annotations

import re
from dataclasses import replace

from galvatron_lite.model.shapes.images.mobile import BlockSpec, Mobile

_MOBILENET_V2 = (
    BlockSpec(1, 3, 1, 1, 16, kind="separable", fixed=True),
    BlockSpec(2, 3, 2, 6, 24),
    BlockSpec(3, 3, 2, 6, 32),
    BlockSpec(4, 3, 2, 6, 64),
    BlockSpec(3, 3, 1, 6, 96),
    BlockSpec(3, 3, 2, 6, 160),
    BlockSpec(1, 3, 1, 6, 320, fixed=True),
)
_V3_LARGE = (
    BlockSpec(1, 3, 1, 1, 16, kind="separable"),
    BlockSpec(1, 3, 2, 4, 24),
    BlockSpec(1, 3, 1, 3, 24),
    BlockSpec(3, 5, 2, 3, 40, 0.25),
    BlockSpec(1, 3, 2, 6, 80),
    BlockSpec(1, 3, 1, 2.5, 80),
    BlockSpec(2, 3, 1, 2.3, 80),
    BlockSpec(2, 3, 1, 6, 112, 0.25),
    BlockSpec(3, 5, 2, 6, 160, 0.25),
    BlockSpec(1, 1, 1, 1, 960, kind="plain"),
)
_V3_SMALL = (
    BlockSpec(1, 3, 2, 1, 16, 0.25, "separable"),
    BlockSpec(1, 3, 2, 4.5, 24),
    BlockSpec(1, 3, 1, 3.67, 24),
    BlockSpec(1, 5, 2, 4, 40, 0.25),
    BlockSpec(2, 5, 1, 6, 40, 0.25),
    BlockSpec(2, 5, 1, 3, 48, 0.25),
    BlockSpec(3, 5, 2, 6, 96, 0.25),
    BlockSpec(1, 1, 1, 1, 576, kind="plain"),
)
_MNASNET_A1 = (
    BlockSpec(1, 3, 1, 1, 16, kind="separable"),
    BlockSpec(2, 3, 2, 6, 24),
    BlockSpec(3, 5, 2, 3, 40, 0.25),
    BlockSpec(4, 3, 2, 6, 80),
    BlockSpec(2, 3, 1, 6, 112, 0.25),
    BlockSpec(3, 5, 2, 6, 160, 0.25),
    BlockSpec(1, 3, 1, 6, 320),
)
_MNASNET_B1 = (
    BlockSpec(1, 3, 1, 1, 16, kind="separable"),
    BlockSpec(3, 3, 2, 3, 24),
    BlockSpec(3, 5, 2, 3, 40),
    BlockSpec(3, 5, 2, 6, 80),
    BlockSpec(2, 3, 1, 6, 96),
    BlockSpec(4, 5, 2, 6, 192),
    BlockSpec(1, 3, 1, 6, 320),
)
_MNASNET_SMALL = (
    BlockSpec(1, 3, 1, 1, 8, kind="separable"),
    BlockSpec(1, 3, 2, 3, 16),
    BlockSpec(2, 3, 2, 6, 16),
    BlockSpec(4, 5, 2, 6, 32, 0.25),
    BlockSpec(3, 3, 1, 6, 32, 0.25),
    BlockSpec(3, 5, 2, 6, 88, 0.25),
    BlockSpec(1, 3, 1, 6, 144),
)
_FBNET_C = (
    BlockSpec(1, 3, 1, 1, 16),
    BlockSpec(1, 3, 2, 6, 24),
    BlockSpec(2, 3, 1, 1, 24),
    BlockSpec(1, 5, 2, 6, 32),
    BlockSpec(1, 5, 1, 3, 32),
    BlockSpec(1, 5, 1, 6, 32),
    BlockSpec(1, 3, 1, 6, 32),
    BlockSpec(1, 5, 2, 6, 64),
    BlockSpec(1, 5, 1, 3, 64),
    BlockSpec(2, 5, 1, 6, 64),
    BlockSpec(3, 5, 1, 6, 112),
    BlockSpec(1, 5, 1, 3, 112),
    BlockSpec(4, 5, 2, 6, 184),
    BlockSpec(1, 3, 1, 6, 352),
)
_SINGLE_PATH = (
    BlockSpec(1, 3, 1, 1, 16, kind="separable"),
    BlockSpec(3, 3, 2, 3, 24),
    BlockSpec(1, 5, 2, 6, 40),
    BlockSpec(3, 3, 1, 3, 40),
    BlockSpec(1, 5, 2, 6, 80),
    BlockSpec(3, 3, 1, 3, 80),
    BlockSpec(1, 5, 1, 6, 96),
    BlockSpec(3, 5, 1, 3, 96),
    BlockSpec(4, 5, 2, 6, 192),
    BlockSpec(1, 3, 1, 6, 320),
)
_EFFICIENTNET = (
    BlockSpec(1, 3, 1, 1, 16, 0.25, "separable"),
    BlockSpec(2, 3, 2, 6, 24, 0.25),
    BlockSpec(2, 5, 2, 6, 40, 0.25),
    BlockSpec(3, 3, 2, 6, 80, 0.25),
    BlockSpec(3, 5, 1, 6, 112, 0.25),
    BlockSpec(4, 5, 2, 6, 192, 0.25),
    BlockSpec(1, 3, 1, 6, 320, 0.25),
)
_EDGE = (
    BlockSpec(1, 3, 1, 4, 24, kind="fused", of_output=True),
    BlockSpec(2, 3, 2, 8, 32, kind="fused"),
    BlockSpec(4, 3, 2, 8, 48, kind="fused"),
    BlockSpec(5, 5, 2, 8, 96),
    BlockSpec(4, 5, 1, 8, 144),
    BlockSpec(2, 5, 2, 8, 192),
)
_V2_BASE = (
    BlockSpec(1, 3, 1, 1, 16, kind="plain"),
    BlockSpec(2, 3, 2, 4, 32, kind="fused"),
    BlockSpec(2, 3, 2, 4, 48, kind="fused"),
    BlockSpec(3, 3, 2, 4, 96, 0.25),
    BlockSpec(5, 3, 1, 6, 112, 0.25),
    BlockSpec(8, 3, 2, 6, 192, 0.25),
)


def _second(plain: tuple[int, int], fused: tuple[int, ...], inverted: tuple[int, ...]) -> tuple[BlockSpec, ...]:
    """Rows of a larger EfficientNetV2: (repeats, channels) of the plain, the two fused and the inverted stages."""
    rows = [BlockSpec(*plain[:1], 3, 1, 1, plain[1], kind="plain")]
    rows += [BlockSpec(fused[2 * i], 3, 2, 4, fused[2 * i + 1], kind="fused") for i in range(2)]
    pairs = [(inverted[2 * i], inverted[2 * i + 1]) for i in range(len(inverted) // 2)]
    settings = ((2, 4), (1, 6), (2, 6), (1, 6))
    rows += [
        BlockSpec(n, 3, stride, grow, out, 0.25) for (n, out), (stride, grow) in zip(pairs, settings, strict=False)
    ]
    return tuple(rows)


_V2 = {
    "s": (_second((2, 24), (4, 48, 4, 64), (6, 128, 9, 160, 15, 256)), 24),
    "m": (_second((3, 24), (5, 48, 5, 80), (7, 160, 14, 176, 18, 304, 5, 512)), 24),
    "l": (_second((4, 32), (7, 64, 7, 96), (10, 192, 19, 224, 25, 384, 7, 640)), 32),
    "xl": (_second((4, 32), (8, 64, 8, 96), (16, 192, 24, 256, 32, 512, 8, 640)), 32),
}
SCALES = {
    "b0": (1.0, 1.0), "b1": (1.0, 1.1), "b2": (1.1, 1.2), "b3": (1.2, 1.4), "b4": (1.4, 1.8), "b5": (1.6, 2.2),
    "b6": (1.8, 2.6), "b7": (2.0, 3.1), "b8": (2.2, 3.6), "l2": (4.3, 5.3),
}  # fmt: skip
"""Width and depth of EfficientNet by its letter (the authors' ``efficientnet_builder``)."""
_LITE = {"0": "b0", "1": "b1", "2": "b2", "3": "b3", "4": "b4"}
_TINY = {"a": (1.0, 1.2), "b": (0.75, 1.1), "c": (0.54, 0.85), "d": (0.54, 0.695), "e": (0.51, 0.6)}
_EDGES = {"es": (1.0, 1.0), "em": (1.0, 1.1), "el": (1.2, 1.4)}
_TRAINING = r"(?:_(?:ap|ns|in1k|in21k|in21ft1k|in22k|in22ft1k|miil|475|ra|jft)(?:_\w+)?)*"


def mobile_of(name: str) -> Mobile | None:
    """The network that a name means, suffixes of how it was trained apart; None: none of these families."""
    for pattern, make in _RULES:
        found = re.fullmatch(f"(?:tf_)?{pattern}{_TRAINING}", name)
        if found:
            return make(*found.groups())
    return None


def _mobilenet_v2(width: str, deep: str | None) -> Mobile:
    factor = int(width) / 100
    depth = {"110": 1.2, "120": 1.4}.get(width, 1.0) if deep else 1.0
    return Mobile(
        rows=_MOBILENET_V2,
        width=factor,
        depth=depth,
        fixed_stem=bool(deep),
        fixed_head=factor < 1 or bool(deep),
        function="relu6",
    )


def _mobilenet_v3(size: str, plain: str | None, width: str) -> Mobile:
    large, factor = size == "large", int(width) / 100
    rows: tuple[BlockSpec, ...] = _V3_LARGE if large else _V3_SMALL
    if plain:
        rows = tuple(replace(row, squeeze=0.0, kernel=min(3, row.kernel)) for row in rows)
    return Mobile(
        rows=rows, width=factor, stem=16, head=1280 if large else 1024, fixed_stem=factor < 0.75, fixed_head=True,
        late_head=True, function="relu" if plain else "silu", squeeze_of_inner=True,
    )  # fmt: skip


def _mnasnet(squeezed: str | None, kind: str) -> Mobile:
    if kind == "small":
        return Mobile(rows=_MNASNET_SMALL, stem=8, fixed_head=True, fixed_stem=True)
    rows = _MNASNET_A1 if squeezed or kind == "a1" else _MNASNET_B1
    return Mobile(rows=rows, width=int(kind) / 100 if kind.isdigit() else 1.0, fixed_head=True)


def _efficientnet(wide: str | None, scale: str) -> Mobile:
    """``wide``: squeeze-and-excitation sized by the expanded channels (NVIDIA DeepLearningExamples)."""
    width, depth = SCALES[scale]
    return Mobile(rows=_EFFICIENTNET, width=width, depth=depth, function="silu", squeeze_of_inner=bool(wide))


def _lite(size: str) -> Mobile:
    width, depth = SCALES[_LITE[size]]
    rows = tuple(
        replace(row, squeeze=0.0, fixed=index in (0, len(_EFFICIENTNET) - 1)) for index, row in enumerate(_EFFICIENTNET)
    )
    return Mobile(rows=rows, width=width, depth=depth, fixed_stem=True, fixed_head=True, function="relu6")


def _edge(size: str) -> Mobile:
    width, depth = _EDGES[size]
    return Mobile(rows=_EDGE, width=width, depth=depth)


def _v2_base(scale: str) -> Mobile:
    width, depth = SCALES[scale]
    return Mobile(rows=_V2_BASE, width=width, depth=depth, function="silu", limit=0.0)


def _v2(size: str) -> Mobile:
    rows, stem = _V2[size]
    return Mobile(rows=rows, stem=stem, function="silu")


def _v2_other(size: str) -> Mobile:
    """Two variants of the small one: deeper at its end, or at 0.8 of the width and 0.9 of the depth."""
    rows = _V2["s"][0]
    if size == "t":
        return Mobile(rows=rows, stem=24, width=0.8, depth=0.9, function="silu", fixed_head=False)
    rows = (BlockSpec(2, 3, 1, 1, 24, kind="fused"), *rows[1:-1], replace(rows[-1], channels=272))
    return Mobile(rows=rows, stem=24, head=1792, function="silu")


def _tiny(size: str) -> Mobile:
    width, depth = _TINY[size]
    return Mobile(
        rows=_EFFICIENTNET, width=width, depth=depth, fixed_stem=True, fixed_head=True, function="silu", nearest=True
    )


_RULES = (
    (r"mobilenetv2_(\d{3})(d)?", _mobilenet_v2),
    (r"mobilenetv3_(large|small)(_minimal)?_(\d{3})", _mobilenet_v3),
    (r"(se)?mnasnet_(\d{3}|a1|b1|small)", _mnasnet),
    (r"efficientnet_(widese_)?(b\d|l2)a?", _efficientnet),
    (r"efficientnet_lite(\d)", _lite),
    (r"efficientnet_(es|em|el)", _edge),
    (r"efficientnetv2_(b\d)", _v2_base),
    (r"efficientnetv2_(s|m|l|xl)", _v2),
    (r"(?:gc_)?efficientnetv2_rw_(t|s)", _v2_other),
    (r"tinynet_([a-e])", _tiny),
    (r"(?:fbnetc)_100", lambda: Mobile(rows=_FBNET_C, stem=16, head=1984, fixed_head=True)),
    (r"spnasnet_100", lambda: Mobile(rows=_SINGLE_PATH, fixed_head=True)),
)
