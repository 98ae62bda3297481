"""Reference models, and named sizes of them. Torch is imported when one is built."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from galvatron_lite.errors import InputError
from galvatron_lite.model.zoo import sizes

if TYPE_CHECKING:
    from torch import nn

_FAMILIES = (
    (sizes.GPT, "gpt", "GPT"),
    (sizes.LLAMA, "llama", "Llama"),
    (sizes.MOE, "moe", "MoE"),
    (sizes.RESNET, "convnets", "ResNet"),
    (sizes.VGG, "convnets", "VGG"),
    (sizes.ALEXNET, "convnets", "AlexNet"),
    (sizes.CONVNEXT, "convnext", "ConvNeXt"),
    (sizes.REGNET, "convnets", "RegNet"),
    (sizes.UNET, "unet", "UNet"),
    (sizes.COSMOFLOW, "cosmoflow", "CosmoFlow"),
    (sizes.PERCEPTION, "perception", "Perception"),
)
"""Sizes of each family, its module here, and its class, beside which stands the class's config."""

SIZES: dict[str, dict[str, Any]] = {name: fields for family, _, _ in _FAMILIES for name, fields in family.items()}
"""Config fields of every named size."""


def size_named(name: str) -> str | None:
    """The key of ``SIZES`` that a name means, hyphens as you like; None where there is none."""
    return {size.replace("-", ""): size for size in SIZES}.get(name.replace("-", ""))


def build(name: str, **overrides: Any) -> nn.Module:
    """A reference model by name (``gpt-tiny``, ``resnet-50``), on the current default device."""
    known = size_named(name)
    if known is None:
        raise InputError("model", name, f"Choose one of {', '.join(SIZES)}.")
    module, label = next((module, label) for family, module, label in _FAMILIES if known in family)
    home = import_module(f"{__name__}.{module}")
    config = getattr(home, f"{label}Config")
    fields = SIZES[known] | overrides
    unknown = set(fields) - set(config.__dataclass_fields__)
    if unknown:
        raise InputError("overrides", sorted(unknown), f"The fields are {', '.join(config.__dataclass_fields__)}.")
    made: nn.Module = getattr(home, label)(config(**fields))
    return made
