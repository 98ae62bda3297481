"""Reference models, and named sizes of them. Torch is imported when one is built."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from galvatron_lite.errors import InputError, unknown
from galvatron_lite.model.shapes.fields import Shape, complete
from galvatron_lite.model.shapes.registry import load_shape, match_name, model_names, shape_from_data

if TYPE_CHECKING:
    from torch import nn

_LANGUAGE = {"gpt": ("gpt", "GPT"), "llama": ("llama", "Llama"), "moe": ("moe", "MoE")}
"""Module and class of each family of language models; the config is the class with that name and ``Config``."""
_IMAGES = {
    "resnet": ("convnets", "ResNet"), "vgg": ("convnets", "VGG"), "alexnet": ("convnets", "AlexNet"),
    "convnext": ("convnets", "ConvNeXt"), "regnet": ("convnets", "RegNet"), "unet": ("unet", "UNet"),
    "cosmoflow": ("convnets", "CosmoFlow"), "perception": ("perception", "Perception"),
}  # fmt: skip
"""Module and class of each family of image networks, by the ``arch`` of their shapes."""
_SMALL = {"vocab": 256, "layers": 6, "hidden": 256, "heads": 8, "sequence": 256}
_TINY = {"vocab": 256, "layers": 4, "hidden": 64, "heads": 4, "sequence": 64}
_PERCEPTION = {"arch": "perception", "base": 4, "levels": 3, "image_size": 36, "channels": 4}

SIZES: dict[str, dict[str, Any]] = {
    "gpt-tiny": _TINY,
    "gpt-small": _SMALL,
    "llama-tiny": _TINY | {"kv_heads": 2, "ffn_hidden": 176},
    "llama-small": _SMALL | {"kv_heads": 4, "ffn_hidden": 688},
    "moe-tiny": _TINY | {"kv_heads": 2, "ffn_hidden": 64, "experts": 8, "choices": 2},
    "resnet-mini": {"arch": "resnet", "depths": (2, 2), "width": 8, "image_size": 32, "classes": 10},
    "vgg-mini": {"arch": "vgg", "depths": (1, 2, 2), "widths": (8, 16, 16), "hidden": 32, "pooled": 2}
    | {"dropout": 0.0, "image_size": 32, "classes": 10},
    "alexnet-mini": {"arch": "alexnet", "widths": (8, 16, 16, 16, 16), "hidden": 32, "pooled": 1, "dropout": 0.0}
    | {"image_size": 64, "classes": 10},
    "convnext-mini": {"arch": "convnext", "depths": (2, 2), "widths": (8, 16), "kernel": 3, "image_size": 32}
    | {"classes": 10},
    "regnet-mini": {"arch": "regnet", "widths": (8, 8, 16, 16), "group": 4, "squeeze": True, "stem": 8}
    | {"image_size": 32, "classes": 10},
    "unet-mini": {"arch": "unet", "base": 4, "levels": 2, "image_size": 32},
    "unet-bilinear-mini": {"arch": "unet", "base": 4, "levels": 2, "image_size": 32, "bilinear": True, "norm": True},
    "cosmoflow-mini": {"arch": "cosmoflow", "widths": (4, 8, 8, 16, 16), "kernels": (3, 3, 3, 2, 2), "padded": True}
    | {"strides": (1, 1, 1, 1, 1), "hidden": (32, 16), "image_size": 32},
    "perception-mini": _PERCEPTION,
    "perception-published-mini": _PERCEPTION | {"chained": False},
}
"""Small sizes: fields of a config (language models) or of a shape (image networks)."""


def size_named(name: str) -> str | None:
    """Return the key of ``SIZES``, or the image network of ``configs/models``, that a name means, with or without
    hyphens; None if it means neither."""
    small = match_name(name, SIZES)
    if small is not None or match_name(name, model_names()) is None:
        return small
    shape = load_shape(name)
    return shape.name if shape.arch in _IMAGES else None


def build(name: str, **overrides: Any) -> nn.Module:
    """Make a reference model by name (``gpt-tiny``, ``resnet-50``), on the current default device.

    Args:
        name: see ``size_named``.
        overrides: fields of the config or shape, and options of the class.
    """
    size = size_named(name)
    if size is None:
        raise unknown("model", name, (*SIZES, *model_names()))
    family = size.split("-")[0]
    if family in _LANGUAGE:
        file, label = _LANGUAGE[family]
        module = import_module(f"{__name__}.{file}")
        config = getattr(module, f"{label}Config")
        _check_overrides(overrides, config.__dataclass_fields__)
        model: nn.Module = getattr(module, label)(config(**SIZES[size] | overrides))
        return model
    shape = shape_from_data({"name": size} | SIZES[size]) if size in SIZES else load_shape(size)
    names = {item.name for item in fields(shape)}
    changed = replace(shape, **{name: value for name, value in overrides.items() if name in names})
    return build_image(changed, **{name: value for name, value in overrides.items() if name not in names})


def build_image(shape: Shape, **options: Any) -> nn.Module:
    """Make the image network of a shape, with options of its class.

    Raises:
        InputError: sizes that do not fit one another, or an unknown option.
    """
    file, label = _IMAGES[shape.arch]
    network = getattr(import_module(f"{__name__}.{file}"), label)
    names = [item.name for item in fields(shape)]
    _check_overrides(options, [*names, *list(inspect.signature(network).parameters)[1:]])
    model: nn.Module = network(complete(shape), **options)
    return model


def _check_overrides(overrides: dict[str, Any], names: Any) -> None:
    unknown = sorted(set(overrides) - set(names))
    if unknown:
        raise InputError("overrides", unknown, f"The fields are {', '.join(names)}.")
