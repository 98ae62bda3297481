"""What modules keep in plain attributes: numbers, tensors, and lists and dicts of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.batch import map_tensors


class PlainAttributes:
    """Those of all modules of a model, to be set back; see the module."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {
            f"{path}.{name}".lstrip("."): (module, name, value, frozen(value))
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if name not in OF_MODULES
        }
        self._modules = dict(model.named_modules())

    def put(self, values: Mapping[str, Any]) -> None:
        """Set some of them."""
        for name, value in values.items():
            path, _, local_name = name.rpartition(".")
            if path in self._modules:
                setattr(self._modules[path], local_name, frozen(value))

    def restore(self) -> dict[str, Any]:
        """Set all as they were; those that changed, as they were now."""
        changed = dict[str, Any]()
        for path, module in self._modules.items():
            for local_name in [name for name in vars(module) if name not in OF_MODULES]:
                name, now = f"{path}.{local_name}".lstrip("."), vars(module)[local_name]
                if name not in self._before:
                    changed[name] = frozen(now)
                    delattr(module, local_name)
                elif not same_values(self._before[name][3], now):
                    changed[name] = frozen(now)
        for name, (module, local_name, value, content) in self._before.items():
            if name not in changed and local_name in vars(module):
                continue
            if type(value) in (list, dict):  # others may hold it, too
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)
            setattr(module, local_name, value if type(value) in (list, dict) else content)
        return changed


OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def frozen(value: Any) -> Any:
    """Return a copy of a nest whose tensors are new and have no history."""

    def copied(one: Tensor) -> Tensor:
        return one if isinstance(one, nn.Parameter) or not _has_values(one) else one.detach().clone()

    return map_tensors(value, copied) if isinstance(value, Tensor) or type(value) in (list, tuple, dict) else value


def _has_values(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def same_values(one: Any, other: Any) -> bool:
    """Whether two nests hold the same; of other objects, whether they are the same object or equal numbers."""
    if isinstance(one, Tensor) and _has_values(one):
        if not (isinstance(other, Tensor) and _has_values(other)):
            return False
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (one, other)]
        return kinds[0] == kinds[1] and torch.equal(one, other)
    if type(one) in (list, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same_values, one, other))
    if type(one) is dict:
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(same_values(one[k], other[k]) for k in one)
        )
    return one is other or (isinstance(one, (int, float, str)) and type(one) is type(other) and one == other)
