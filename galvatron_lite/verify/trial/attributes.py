"""Plain attributes of modules (numbers, tensors, and lists and dicts of them), saved and restored around a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.batch import map_tensors


class PlainAttributes:
    """A snapshot of the attributes of all modules of a model, without those that every module has."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {
            f"{path}.{name}".lstrip("."): (module, name, value, frozen(value))
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if name not in OF_MODULES
        }
        self._modules = dict(model.named_modules())

    def put(self, values: Mapping[str, Any]) -> None:
        """Set attributes by name."""
        for name, value in values.items():
            path, _, local_name = name.rpartition(".")
            if path in self._modules:
                setattr(self._modules[path], local_name, frozen(value))

    def restore(self) -> dict[str, Any]:
        """Restore the snapshot; return attributes that had changed, by name."""
        changed = dict[str, Any]()
        for path, module in self._modules.items():
            for local_name in [name for name in vars(module) if name not in OF_MODULES]:
                name, current = f"{path}.{local_name}".lstrip("."), vars(module)[local_name]
                if name not in self._before:
                    changed[name] = frozen(current)
                    delattr(module, local_name)
                elif not same_values(self._before[name][3], current):
                    changed[name] = frozen(current)
        for name, (module, local_name, value, content) in self._before.items():
            if name not in changed and local_name in vars(module):
                continue
            if type(value) in (list, dict):  # other objects may hold it
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)
            setattr(module, local_name, value if type(value) in (list, dict) else content)
        return changed


OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def frozen(value: Any) -> Any:
    """Return a copy of a nest of tensors and numbers, without history; parameters stay the same objects."""

    def copied(tensor: Tensor) -> Tensor:
        is_kept = isinstance(tensor, nn.Parameter) or not _has_values(tensor)
        return tensor if is_kept else tensor.detach().clone()

    return map_tensors(value, copied) if isinstance(value, Tensor) or type(value) in (list, tuple, dict) else value


def _has_values(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def same_values(first: Any, second: Any) -> bool:
    """Whether two nests hold equal tensors, numbers and strings, and the same other objects."""
    if isinstance(first, Tensor) and _has_values(first):
        if not (isinstance(second, Tensor) and _has_values(second)):
            return False
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (first, second)]
        return kinds[0] == kinds[1] and torch.equal(first, second)
    if type(first) in (list, tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(same_values, first, second))
    if type(first) is dict:
        if not isinstance(second, dict) or first.keys() != second.keys():
            return False
        return all(same_values(first[key], second[key]) for key in first)
    if first is second:
        return True
    return isinstance(first, (int, float, str)) and type(first) is type(second) and first == second
