"""Snapshots of plain values that a model keeps: in attributes of its modules, and in code outside of them.

Plain values are numbers, tensors, and lists, tuples and dicts of them. Code keeps them in globals, closures, class
attributes, default arguments and attributes of the loss function; that of installed packages is not searched. They are
restored after passes over an example, so that training starts from what the user's program has set.
"""

from __future__ import annotations

import dis
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from inspect import getfile
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.batch import LossFn, map_tensors, tensors_of

_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGE = str(Path(__file__).parents[2])
_MAX_LENGTH = 10_000  # of a list or dict that is no data set; tensors may have 1000 times as many items
_CACHED_FUNCTION = type(cache(len))
_MISSING = object()
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


class PlainAttributes:
    """A snapshot of the attributes of all modules of a model, without those that every module has."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {
            f"{path}.{name}".lstrip("."): (module, name, value, _detached(value))
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if name not in _OF_MODULES
        }
        self._modules = dict(model.named_modules())

    def put(self, values: Mapping[str, Any]) -> None:
        """Set attributes by name."""
        for name, value in values.items():
            path, _, local_name = name.rpartition(".")
            if path in self._modules:
                setattr(self._modules[path], local_name, _detached(value))

    def restore(self) -> dict[str, Any]:
        """Restore the snapshot; return attributes that had changed, by name."""
        changed = dict[str, Any]()
        for path, module in self._modules.items():
            for local_name in [name for name in vars(module) if name not in _OF_MODULES]:
                name, current = f"{path}.{local_name}".lstrip("."), vars(module)[local_name]
                if name not in self._before:
                    changed[name] = _detached(current)
                    delattr(module, local_name)
                elif not same_values(self._before[name][3], current):
                    changed[name] = _detached(current)
        for name, (module, local_name, value, content) in self._before.items():
            if name not in changed and local_name in vars(module):
                continue
            if type(value) in (list, dict):  # other objects may hold it
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)
            setattr(module, local_name, value if type(value) in (list, dict) else content)
        return changed


@dataclass(frozen=True, slots=True)
class _Place:
    """Where code keeps a value: under a key of a dict, in an attribute of a class, or in the cell of a closure."""

    holder: Any
    name: Any  # key, attribute, or ``cell_contents``

    def read(self) -> Any:
        if isinstance(self.holder, CellType):
            try:
                return self.holder.cell_contents
            except ValueError:
                return _MISSING
        return (self.holder if isinstance(self.holder, dict) else vars(self.holder)).get(self.name, _MISSING)

    def write(self, value: Any) -> None:
        if isinstance(self.holder, dict):
            if value is _MISSING:
                self.holder.pop(self.name, None)
            else:
                self.holder[self.name] = value
        elif value is _MISSING:
            delattr(self.holder, self.name)
        else:
            setattr(self.holder, self.name, value)


class OutsideValues:
    """A snapshot of the plain values outside of modules, of a model and its loss function."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None) -> None:
        self._before: dict[str, tuple[_Place, Any, Any]] = {}  # place, value, copy of the value
        self._caches: list[Any] = []
        for name, place in self._places(model, loss_fn):
            value = place.read()
            with suppress(RecursionError):  # a list may hold itself
                if _is_plain(value):
                    self._before[name] = place, value, _detached(value)

    def put(self, values: Mapping[str, Any]) -> None:
        """Set those of the values that are in the snapshot, by name."""
        for name in values.keys() & self._before.keys():
            self._set(name, values[name])

    def restore(self) -> dict[str, Any]:
        """Restore the snapshot, and clear caches of functions; return values that had changed, by name."""
        changed = dict[str, Any]()
        for cached in self._caches:
            cached.cache_clear()
        for name, (place, _, content) in self._before.items():
            current = place.read()
            if not same_values(content, current):
                changed[name] = _detached(current)
                self._set(name, content)
        return changed

    def _set(self, name: str, content: Any) -> None:
        place, value, _ = self._before[name]
        content = _detached(content)
        if type(value) in (list, dict) and type(content) is type(value):  # other objects may hold it
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
            content = value
        place.write(content)

    def _places(self, model: nn.Module, loss_fn: LossFn | None) -> Iterator[tuple[str, _Place]]:
        pending = [*_code_of(model), loss_fn]
        seen = {id(module) for module in model.modules()}
        while pending:
            item = pending.pop()
            if id(item) in seen:
                continue
            seen.add(id(item))
            for name, place in self._places_of(item, pending):
                yield name, place
                pending.append(place.read())

    def _places_of(self, item: Any, pending: list[Any]) -> Iterator[tuple[str, _Place]]:
        """Yield the places of a function, class or object, with names; append what it refers to to ``pending``."""
        if isinstance(item, partial):
            pending += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, (MethodType, staticmethod, classmethod)):
            pending += [item.__func__, getattr(item, "__self__", None)]
        elif isinstance(item, property):
            pending.append(item.fget)
        elif isinstance(item, _CACHED_FUNCTION):
            if _is_user_code(item.__wrapped__):
                self._caches.append(item)
            pending.append(item.__wrapped__)
        elif not _is_user_code(item):
            if isinstance(item, FunctionType):  # of a decorator
                pending.append(getattr(item, "__wrapped__", None))
        elif isinstance(item, FunctionType):
            path = f"{item.__module__}.{item.__qualname__}"
            for name, attributes in _globals_of(item.__code__):
                value = item.__globals__.get(name, _MISSING)
                if isinstance(value, ModuleType):
                    if _is_user_code(value):
                        yield from ((f"{value.__name__}.{name}", _Place(vars(value), name)) for name in attributes)
                else:
                    yield f"{item.__module__}.{name}", _Place(item.__globals__, name)
            for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
                yield f"{path}.{name}", _Place(cell, "cell_contents")
            defaults = dict(enumerate(item.__defaults__ or ())) | (item.__kwdefaults__ or {})
            yield from ((f"{path}, default {key}", _Place(defaults, key)) for key in defaults)
        elif isinstance(item, type):
            yield from ((f"{item.__module__}.{item.__qualname__}.{name}", _Place(item, name)) for name in [*vars(item)])
            pending += item.__bases__
        elif hasattr(item, "__dict__"):
            names = [name for name in vars(item) if name not in _OF_MODULES]
            yield from ((f"{type(item).__qualname__}.{name}", _Place(vars(item), name)) for name in names)
            if isinstance(item, nn.Module):
                yield from (
                    (f"{type(item).__qualname__}.{name}", _Place(item._buffers, name)) for name in item._buffers
                )
                pending += item.children()
            pending.append(type(item))


def _code_of(model: nn.Module) -> Iterator[Any]:
    """Yield the classes, hooks, and functions in attributes of all modules of a model."""
    for module in model.modules():
        yield type(module)
        for name, value in vars(module).items():
            if name.endswith("_hooks"):
                yield from value.values()
            elif isinstance(value, (FunctionType, MethodType, partial, _CACHED_FUNCTION)):
                yield value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)) and len(value) > _MAX_LENGTH:
        return False
    plain = value is _MISSING or value is None or isinstance(value, (int, float, complex, str, Tensor))
    return (plain or type(value) in (list, tuple, dict)) and (
        sum(tensor.numel() for tensor in tensors_of(value)) <= 1000 * _MAX_LENGTH
    )


def _is_user_code(item: Any) -> bool:
    """Whether a function, class or object is neither of an installed package nor of this one."""
    if isinstance(item, FunctionType):
        file = item.__code__.co_filename
    else:
        kind = item if isinstance(item, (type, ModuleType)) else type(item)
        try:
            file = getfile(kind)
        except (TypeError, OSError):  # built-in, or of an interactive session
            return isinstance(kind, type) and kind.__module__ == "__main__" and hasattr(kind, "__dict__")
    return not file.startswith((*_INSTALLED, _PACKAGE, "<frozen"))


@cache
def _globals_of(code: CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the globals that a function and those inside it name, each with all names of attributes in the code."""
    names = dict.fromkeys(
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")
    )
    inner = [pair for const in code.co_consts if isinstance(const, CodeType) for pair in _globals_of(const)]
    return (*((name, code.co_names) for name in names), *inner)


def _detached(value: Any) -> Any:
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
