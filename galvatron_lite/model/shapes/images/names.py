"""From an image network's published name to its graph, by rules a family.

Names follow the common convention of model zoos (``resnext50_32x4d``, ``regnety_032``, ``tf_efficientnet_b3_ns``):
suffixes that only say how or by whom the weights were trained are dropped. Of a name that no rule covers, a graph from
totals may do (``summary``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from galvatron_lite.files import read_data
from galvatron_lite.folders import config_folder
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.fields import ConvNextShape, RegNetShape, Shape, VggShape, VitShape
from galvatron_lite.model.shapes.images.convnets import (
    Residual,
    detector_graph,
    picture_graph,
    residual_graph,
)
from galvatron_lite.model.shapes.images.evolved import evolved_graph
from galvatron_lite.model.shapes.images.families import family_of
from galvatron_lite.model.shapes.images.mirrored import MEDICAL, medical_graph, pooled_graph
from galvatron_lite.model.shapes.images.mobile import mobile_graph, mobile_of
from galvatron_lite.model.shapes.registry import shape_from_data

_TRAINED = r"(?:_(?:in1k|in21k|in22k|in22ft1k|in21ft1k|384|miil|ra|a1h|tv|hnf|ols))*"
_DEPTHS = {
    "10": (1, 1, 1, 1), "14": (1, 1, 1, 1), "18": (2, 2, 2, 2), "26": (2, 2, 2, 2), "34": (3, 4, 6, 3),
    "50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3), "200": (3, 24, 36, 3), "269": (3, 30, 48, 8),
    "rs50": (3, 4, 6, 3), "rs101": (3, 4, 23, 3), "rs152": (3, 8, 36, 3), "rs200": (3, 24, 36, 3),
    "rs270": (4, 29, 53, 4), "rs350": (4, 36, 72, 4), "rs420": (4, 44, 87, 4),
}  # fmt: skip
_RESNET = (
    r"(?:gluon_|tv_|ssl_|swsl_|ig_|legacy_)?(?P<attention>se|eca)?(?P<wide>wide_)?resne(?P<next>x?)t(?P<blur>aa|blur)?"
    r"(?P<depth>(?:rs)?\d+)(?:_?v?1?(?P<variant>b|c|d|s|t))?(?P<wide2>_2)?(?:_(?P<groups>\d+)x(?P<width>\d+)d)?"
)
_STEMS = {"c": (32, 32, 64), "d": (32, 32, 64), "s": (64, 64, 128), "t": (24, 32, 64)}
Builder = Callable[[int, int, str, int], ModelGraph]
"""The graph from side, classes, precision and bytes of an item."""


def canonical(name: str) -> str:
    """A name as model zoos write it: lower case, underscores, no spaces, no mark of ResNet's version 1.5."""
    plain = re.sub(r"v1\.5$", "", name.strip().lower()).replace("-", "_").replace(" ", "_")
    plain = re.sub(r"^se_resne", "seresne", plain)
    return re.sub(r"^efficientnet_v2_", "efficientnetv2_", plain)


def residual_of(name: str) -> Residual | None:
    """The residual network of a name; None: none of this family."""
    if found := re.fullmatch(r"resnetv2_(50|101|152)(?:x(\d)_bit\w*|([dts]?)(_gn)?)", name):
        return Residual(
            depths=_DEPTHS[found[1]], width=64 * int(found[2] or 1), stem=_STEMS.get(found[3], (0,)), preactive=True,
            average_down=bool(found[3]), grouped_norm=bool(found[2] or found[4]),
        )  # fmt: skip
    found = re.fullmatch(r"resnest(\d+)(d|e)(?:_(\d)s(\d)x(\d+)d)?", name)
    if found and found[1] in _DEPTHS:
        return Residual(
            depths=_DEPTHS[found[1]], groups=int(found[4] or 1), group_width=int(found[5] or 64), average_down=True,
            stem=_STEMS["s" if found[2] == "e" else "d"], radix=int(found[3] or 2), pool_first=bool(found[3]),
        )  # fmt: skip
    found = re.fullmatch(_RESNET + _TRAINED, name)
    if not found or found["depth"] not in _DEPTHS:
        return None
    scaled, variant = found["depth"].startswith("rs"), found["variant"] or ""
    variant = "d" if scaled else variant
    squeeze = {"se": 1 / 16, "eca": -1.0}.get(found["attention"] or "", 0.0)
    return Residual(
        depths=_DEPTHS[found["depth"]], basic=found["depth"] in ("10", "18", "34"), groups=int(found["groups"] or 1),
        group_width=128 if found["wide"] else int(found["width"] or 64), stem=_STEMS.get(variant, (64,)),
        pool=not scaled, average_down=variant in ("d", "t"), squeeze=0.25 if scaled else squeeze,
        blur=bool(found["blur"]), early=name.startswith("legacy_") and not found["next"],
    )  # fmt: skip


@cache
def _listed() -> dict[str, Shape]:
    data = read_data(config_folder("networks") / "shapes.yaml")
    return {name: shape_from_data({"name": name} | fields) for name, fields in data.items()}


def convnext_of(name: str, side: int = 224, classes: int = 1000) -> ConvNextShape | None:
    """The ConvNeXt that a name means; None: none of this family."""
    shape = _listed().get(re.sub(_TRAINED + "$", "", name))
    return replace(shape, name=name, image_size=side, classes=classes) if isinstance(shape, ConvNextShape) else None


_TOKENS = re.compile(r"vit|deit|beit|swin|mixer|mlp|cait|xcit|pit|nest|volo|twins|tnt|pvt|former|levit|coat|sequencer")


def works_on_tokens(name: str) -> bool:
    """Whether a name is of a network of linear layers over tokens (transformers, mixers) rather than convolutions."""
    return _TOKENS.search(name) is not None and not name.startswith(("convmixer", "mobilevit", "semobilevit"))


def normalises_inplace(name: str) -> bool:
    """Whether a name is of a network with activated batch normalisation in place (Ridnik et al. 2020, TResNet)."""
    return name.startswith("tresnet")


_BLOCKS_OF_24 = {"tiny": 12, "small": 24, "base": 24, "large": 24, "huge": 24, "giant": 48}


def once_a_batch(name: str, side: int) -> tuple[float, float]:
    """Activations and multiply-adds that published totals count for every sample but that are made once a batch.

    Swin V2's continuous positions: a small MLP (2, 384, heads) over all pairs of places in a window, a block
    (Liu et al. 2022, arXiv:2111.09883, section 3.3); the window of these variants is the side / 32.
    """
    found = re.fullmatch(r"swinv2_cr_(\w+?)(?:_ns)?_\d+", name)
    if not found or found[1] not in _BLOCKS_OF_24:
        return 0.0, 0.0
    pairs = _BLOCKS_OF_24[found[1]] * (side // 32) ** 4
    return pairs * 384.0, pairs * 384.0 * 2


_VIT = {
    "tiny": (192, 3, 12),
    "small": (384, 6, 12),
    "base": (768, 12, 12),
    "large": (1024, 16, 24),
    "huge": (1280, 16, 32),
}
"""Width, heads and blocks (Dosovitskiy et al. 2021, table 1; Touvron et al. 2021, table 1)."""


def vit_of(name: str, side: int = 224, classes: int = 1000) -> VitShape | None:
    """The vision transformer that a name means (ViT, DeiT, BEiT); None: none of these."""
    found = re.fullmatch(
        r"(?:vit|deit3?|beit)_(\w+?)(?:_distilled)?_patch(\d+)_\d+(?:_(?:in21k|in21ft1k|in22k|sam|dino))*", name
    )
    if not found or found[1] not in _VIT:
        return None
    hidden, heads, layers = _VIT[found[1]]
    return VitShape(
        name=name, layers=layers, hidden=hidden, heads=heads, image_size=side, patch=int(found[2]), classes=classes
    )


def shape_of_name(name: str, side: int) -> ConvNextShape | VitShape | None:
    """The shape of a name whose family has a shape of its own; None: ``builder_of`` may have it."""
    return convnext_of(name, side) or vit_of(name, side)


def builder_of(name: str) -> Builder | None:
    """Makes the graph of a name, under autocast; None: no rule covers the name."""
    if residual := residual_of(name):
        return partial(residual_graph, name, residual)
    if mobile := mobile_of(name):
        return partial(mobile_graph, name, mobile)
    if family := family_of(name):
        return family
    if name in MEDICAL:
        return lambda _, __, precision, size: medical_graph(name, MEDICAL[name], precision, size)
    if name == "ssd300_resnet50":
        return lambda side, _, precision, size: detector_graph(name, side, precision, size)
    if found := re.fullmatch(r"amoebanet_d_l(\d+)_d(\d+)", name):
        return partial(evolved_graph, name, int(found[1]), int(found[2]))
    if found := re.fullmatch(r"unet_b(\d+)_c(\d+)", name):
        count, base = int(found[1]), int(found[2])
        return lambda side, _, precision, size: pooled_graph(name, count, base, side, precision, size)
    shape = _listed().get(name.removeprefix("tv_"))
    return _builder(replace(shape, name=name)) if isinstance(shape, (RegNetShape, VggShape)) else None


def _builder(shape: RegNetShape | VggShape) -> Builder:
    return lambda side, classes, precision, item_bytes: picture_graph(
        replace(shape, image_size=side, classes=classes), precision, item_bytes, autocast=True
    )
