"""Config fields of every named size of the reference models, by family."""

from __future__ import annotations

from typing import Any

from galvatron_lite.model.shapes.images.convnets import LINES, widths_of

Sizes = dict[str, dict[str, Any]]

GPT: Sizes = {
    "gpt-tiny": {"vocab": 256, "layers": 4, "hidden": 64, "heads": 4, "sequence": 64},
    "gpt-small": {"vocab": 256, "layers": 6, "hidden": 256, "heads": 8, "sequence": 256},
}
LLAMA: Sizes = {
    "llama-tiny": {"vocab": 256, "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 176}
    | {"sequence": 64},
    "llama-small": {"vocab": 256, "layers": 6, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn_hidden": 688}
    | {"sequence": 256},
}
MOE: Sizes = {
    "moe-tiny": {"vocab": 256, "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 64}
    | {"sequence": 64, "experts": 8, "choices": 2}
}
RESNET: Sizes = {
    "resnet-50": {"depths": (3, 4, 6, 3)},
    "resnet-152": {"depths": (3, 8, 36, 3)},
    "resnet-mini": {"depths": (2, 2), "width": 8, "side": 32, "classes": 10},
}
VGG: Sizes = {
    "vgg-16": {"depths": (2, 2, 3, 3, 3)},
    "vgg-mini": {"depths": (1, 2, 2), "widths": (8, 16, 16), "hidden": 32, "pooled": 2, "dropout": 0.0, "side": 32}
    | {"classes": 10},
}
ALEXNET: Sizes = {
    "alexnet": {},
    "alexnet-mini": {"widths": (8, 16, 16, 16, 16), "hidden": 32, "pooled": 1, "dropout": 0.0, "side": 64}
    | {"classes": 10},
}
CONVNEXT: Sizes = {
    "convnext-t": {"depths": (3, 3, 9, 3), "widths": (96, 192, 384, 768)},
    "convnext-s": {"depths": (3, 3, 27, 3), "widths": (96, 192, 384, 768)},
    "convnext-b": {"depths": (3, 3, 27, 3), "widths": (128, 256, 512, 1024)},
    "convnext-l": {"depths": (3, 3, 27, 3), "widths": (192, 384, 768, 1536)},
    "convnext-xl": {"depths": (3, 3, 27, 3), "widths": (256, 512, 1024, 2048)},
    "convnext-mini": {"depths": (2, 2), "widths": (8, 16), "kernel": 3, "height": 32, "width": 32, "classes": 10},
}
_REGNETS = {
    "x-800mf": "x_008", "x-3.2gf": "x_032", "x-8gf": "x_080", "x-32gf": "x_320",
    "y-400mf": "y_004", "y-3.2gf": "y_032", "y-16gf": "y_160", "y-32gf": "y_320",
}  # fmt: skip
"""Sizes by their FLOPs, and the lines that their widths follow."""
REGNET: Sizes = {
    f"regnet-{name}": {"widths": tuple(widths_of(LINES[key])), "group": LINES[key][3], "squeeze": key[0] == "y"}
    for name, key in _REGNETS.items()
} | {"regnet-mini": {"widths": (8, 8, 16, 16), "group": 4, "squeeze": True, "stem": 8, "side": 32, "classes": 10}}
UNET: Sizes = {
    "unet": {},
    "unet-bilinear": {"bilinear": True},
    "unet-mini": {"base": 4, "levels": 2, "side": 32},
    "unet-bilinear-mini": {"base": 4, "levels": 2, "side": 32, "bilinear": True, "norm": True},
}
COSMOFLOW: Sizes = {
    "cosmoflow-512": {},
    "cosmoflow-256": {"side": 256, "padded": True, "strides": (1, 1, 1, 2, 1, 1, 1)},
    "cosmoflow-mini": {"widths": (4, 8, 8, 16, 16), "kernels": (3, 3, 3, 2, 2), "strides": (1, 1, 1, 1, 1)}
    | {"padded": True, "hidden": (32, 16), "side": 32},
}
_SMALL = {"base": 4, "levels": 3, "side": 36, "channels": 4}
PERCEPTION: Sizes = {
    "perception": {},
    "perception-published": {"chained": False},
    "perception-mini": _SMALL,
    "perception-published-mini": _SMALL | {"chained": False},
}
