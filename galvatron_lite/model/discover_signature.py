"""When two modules are structurally equal: same classes, parameter shapes and settings."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn

_INDEX_WORDS = ("idx", "index", "layer_id", "layer_number")
_SETTING_TYPES = (int, float, str, bytes, type(None))


def signature(module: nn.Module) -> Hashable:
    """A key that is equal for modules of the same class, parameter and buffer shapes, and settings, all the way down.

    Settings are the plain numbers and strings (and tuples of them) that the modules hold as attributes, but for those
    that only say which place a layer has (``layer_idx``). Whether the modules train or not is no part of it.
    """
    return tuple((path, _own_signature(part)) for path, part in module.named_modules(remove_duplicate=False))


def _own_signature(module: nn.Module) -> Hashable:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    shapes = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
    settings = tuple(sorted((name, repr(value)) for name, value in vars(module).items() if _is_setting(name, value)))
    return type(module), shapes, settings


def _is_setting(name: str, value: Any) -> bool:
    if name.startswith("_") or name == "training" or any(word in name for word in _INDEX_WORDS):
        return False
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, _SETTING_TYPES) for item in value)
    return isinstance(value, _SETTING_TYPES)


def kind_names(signatures: list[Hashable]) -> list[str]:
    """A kind name for every block: ``block`` where all are equal, else ``block0``, ``block1``, ... by first use."""
    order = {key: place for place, key in enumerate(dict.fromkeys(signatures))}
    if len(order) <= 1:
        return ["block"] * len(signatures)
    return [f"block{order[key]}" for key in signatures]
