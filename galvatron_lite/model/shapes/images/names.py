"""Graphs of image networks by their published names.

Names follow the common convention of model zoos (``resnext50_32x4d``, ``regnety_032``, ``tf_efficientnet_b3_ns``);
suffixes that name only how, or by whom, weights were trained are dropped. For other names a graph from totals may do
(``summary``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from galvatron_lite.files import from_data, read_data
from galvatron_lite.folders import config_folder
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.model.shapes.fields import ConvNextShape, RegNetShape, Shape, VggShape, VitShape
from galvatron_lite.model.shapes.images.convnets import picture_graph
from galvatron_lite.model.shapes.images.families import (
    CrossStage,
    NormFree,
    branched_graph,
    conv_mixer_graph,
    cross_stage_graph,
    dense_graph,
    normfree_graph,
    xcit_graph,
)
from galvatron_lite.model.shapes.images.mirrored import evolved_graph, medical_graph, pooled_graph
from galvatron_lite.model.shapes.images.mobile import mobile_graph, mobile_networks
from galvatron_lite.model.shapes.images.network import NetworkBuilder
from galvatron_lite.model.shapes.images.residual import TRAINED, detector_graph, residual_graph, residual_of
from galvatron_lite.model.shapes.registry import build_graph, shape_from_data


def canonical(name: str) -> str:
    """Write a name as model zoos do: lower case, underscores, no spaces, no mark of ResNet's version 1.5.

    ``RN50`` and ``3D U-Net`` are other names of ResNet-50 and of MLPerf's U-Net.
    """
    plain = re.sub(r"[\s_-]*v1[._]?5$", "", name.strip().lower()).replace("-", "_").replace(" ", "_")
    plain = re.sub(r"^(?:resnet_|rn_?)(\d+)$", r"resnet\1", plain)
    plain = re.sub(r"^(?:3d_?u_?net|u_?net_?3d)(?:_\(?kits_?19\)?)?$", "unet3d", plain)
    plain = re.sub(r"^se_resne", "seresne", plain)
    return re.sub(r"^efficientnet_v2_", "efficientnetv2_", plain)


@cache
def _listed() -> dict[str, Shape]:
    data = read_data(config_folder("networks") / "shapes.yaml")
    return {name: shape_from_data({"name": name} | fields) for name, fields in data.items()}


def convnext_of(name: str, side: int = 224) -> ConvNextShape | None:
    """Return the ConvNeXt of a name; None if it is of another family."""
    shape = _listed().get(re.sub(TRAINED + "$", "", name))
    return replace(shape, name=name, image_size=side) if isinstance(shape, ConvNextShape) else None


_TOKENS = re.compile(r"vit|deit|beit|swin|mixer|mlp|cait|xcit|pit|nest|volo|twins|tnt|pvt|former|levit|coat|sequencer")


def works_on_tokens(name: str) -> bool:
    """Whether a network has linear layers over tokens (transformers, mixers) rather than convolutions."""
    return _TOKENS.search(name) is not None and not name.startswith(("convmixer", "mobilevit", "semobilevit"))


def normalises_inplace(name: str) -> bool:
    """Whether a network has activated batch normalisation in place (Ridnik et al. 2020, TResNet)."""
    return name.startswith("tresnet")


_BLOCKS_OF_24 = {"tiny": 12, "small": 24, "base": 24, "large": 24, "huge": 24, "giant": 48}


def once_a_batch(name: str, side: int) -> tuple[float, float]:
    """Return activations and multiply-adds that published totals count per sample but that run once per batch.

    They are Swin V2's continuous positions: in each block an MLP (2, 384, heads) over all pairs of tokens in a window
    (Liu et al. 2022, arXiv:2111.09883, section 3.3); the window of these variants is the side / 32.
    """
    match = re.fullmatch(r"swinv2_cr_(\w+?)(?:_ns)?_\d+", name)
    if not match or match[1] not in _BLOCKS_OF_24:
        return 0.0, 0.0
    pairs = _BLOCKS_OF_24[match[1]] * (side // 32) ** 4
    return pairs * 384.0, pairs * 384.0 * 2


_VIT = {"tiny": (192, 3, 12), "small": (384, 6, 12), "base": (768, 12, 12), "large": (1024, 16, 24),
        "huge": (1280, 16, 32)}  # fmt: skip
"""Width, heads and blocks (Dosovitskiy et al. 2021, table 1; Touvron et al. 2021, table 1)."""


def vit_of(name: str, side: int = 224) -> VitShape | None:
    """Return the vision transformer of a name (ViT, DeiT, BEiT); None if it is of another family."""
    match = re.fullmatch(
        r"(?:vit|deit3?|beit)_(\w+?)(?:_distilled)?_patch(\d+)_\d+(?:_(?:in21k|in21ft1k|in22k|sam|dino))*", name
    )
    if not match or match[1] not in _VIT:
        return None
    hidden, heads, layers = _VIT[match[1]]
    return VitShape(name=name, layers=layers, hidden=hidden, heads=heads, image_size=side, patch=int(match[2]))


def graph_of_name(name: str, side: int, precision: str, kernels: Kernels | None = None) -> ModelGraph | None:
    """Return the graph of an image network, under autocast except ConvNeXt and ViT; None if no rule covers the name.

    Args:
        name: as ``canonical`` returns it.
        side: pixels along each side of a picture.
        precision: of compute.
        kernels: of a ConvNeXt or ViT; PyTorch's own if None.
    """
    if shape := convnext_of(name, side) or vit_of(name, side):
        return build_graph(shape, precision=precision, kernels=kernels)
    listed = _listed().get(name.removeprefix("tv_"))
    if isinstance(listed, RegNetShape | VggShape):
        return picture_graph(replace(listed, name=name, image_size=side), precision, autocast=True)
    net = NetworkBuilder(name, precision, 3, (side, side))
    if residual := residual_of(name):
        return residual_graph(net, residual)
    match = _MOBILE.fullmatch(name)
    if match and (mobile := mobile_networks().get(match[1])):
        return mobile_graph(net, mobile)
    if spec := _families().get(name.removeprefix("dm_")):
        return normfree_graph(net, spec) if isinstance(spec, NormFree) else cross_stage_graph(net, spec)
    for pattern, add in _NAMES:
        if match := re.fullmatch(pattern, name):
            return add(net, *match.groups(default=""))
    return None


_MOBILE = re.compile(r"(?:tf_|gc_)?(\w+?)(?:_(?:ap|ns|in1k|in21k|in21ft1k|in22k|in22ft1k|miil|475|ra|jft)(?:_\w+)?)*")
_NAMES: tuple[tuple[str, Callable[..., ModelGraph]], ...] = (
    (r"(?:tv_)?densenet(121|161|169|201|264)", dense_graph),
    (r"repvgg_(a[012]|b[0123])", branched_graph),
    (r"convmixer_(\d+)_(\d+)(?:_ks(\d+)_p(\d+))?", conv_mixer_graph),
    (r"xcit_(nano|tiny|small|medium|large)_(\d+)_p(8|16)_\d+(?:_dist)?", xcit_graph),
    (r"(unet_medical|nnunet_2d|nnunet_3d|unet3d)", medical_graph),
    (r"ssd300_resnet50", detector_graph),
    (r"amoebanet_d_l(\d+)_d(\d+)", evolved_graph),
    (r"unet_b(\d+)_c(\d+)", pooled_graph),
)
"""Patterns of names, and the functions that their groups are passed to."""


@cache
def _families() -> dict[str, NormFree | CrossStage]:
    data = read_data(config_folder("networks") / "families.yaml")
    normfree = {name: from_data(NormFree, fields, name) for name, fields in data["normfree"].items()}
    return normfree | {name: from_data(CrossStage, fields, name) for name, fields in data["cross"].items()}
