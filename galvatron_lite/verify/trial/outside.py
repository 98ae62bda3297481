"""Plain values that the code of a model and of its loss keeps outside of modules.

They are numbers, tensors, and lists, tuples and dicts of them, in globals, closures, class attributes, defaults and
attributes of the loss function. Code of installed packages is not searched. Passes over an example leave them as they
were: training begins with what the user's program has set.
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

from torch import Tensor, nn

from galvatron_lite.model.batch import LossFn, tensors_of
from galvatron_lite.verify.trial.attributes import OF_MODULES, frozen, same_values

_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGE = str(Path(__file__).parents[2])
_LONGEST = 10_000  # items of a list or dict, and of tensors a thousand times as many: what is longer is data
_CACHED = type(cache(len))
_MISSING = object()


@dataclass(frozen=True, slots=True)
class _Place:
    """A key of a dict, an attribute of a class, or what a closure holds."""

    holder: Any
    name: Any

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
    """Those of a model and its loss, to be set back; see the module."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None) -> None:
        self._before: dict[str, tuple[_Place, Any, Any]] = {}
        self._caches: list[Any] = []
        for name, place in self._places(model, loss_fn):
            value = place.read()
            with suppress(RecursionError):  # a list may hold itself
                if _is_plain(value):
                    self._before[name] = place, value, frozen(value)

    def put(self, values: Mapping[str, Any]) -> None:
        """Set some of them."""
        for name in values.keys() & self._before.keys():
            self._set(name, values[name])

    def restore(self) -> dict[str, Any]:
        """Set all as they were, and empty the caches of functions; return those that had changed."""
        changed = dict[str, Any]()
        for cached in self._caches:
            cached.cache_clear()
        for name, (place, _, content) in self._before.items():
            now = place.read()
            if not same_values(content, now):
                changed[name] = frozen(now)
                self._set(name, content)
        return changed

    def _set(self, name: str, content: Any) -> None:
        place, value, _ = self._before[name]
        content = frozen(content)
        if type(value) in (list, dict) and type(content) is type(value):  # others may hold it, too
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
            content = value
        place.write(content)

    def _places(self, model: nn.Module, loss_fn: LossFn | None) -> Iterator[tuple[str, _Place]]:
        pending = [*_code_of(model), loss_fn]
        seen = {id(module) for module in model.modules()}
        while pending:
            one = pending.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            for name, place in self._held_by(one, pending):
                yield name, place
                pending.append(place.read())

    def _held_by(self, one: Any, pending: list[Any]) -> Iterator[tuple[str, _Place]]:
        """What an object keeps; functions and objects behind it become pending."""
        if isinstance(one, partial):
            pending += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, (MethodType, staticmethod, classmethod)):
            pending += [one.__func__, getattr(one, "__self__", None)]
        elif isinstance(one, property):
            pending.append(one.fget)
        elif isinstance(one, _CACHED):
            if _is_users(one.__wrapped__):
                self._caches.append(one)
            pending.append(one.__wrapped__)
        elif not _is_users(one):
            if isinstance(one, FunctionType):  # a decorator's
                pending.append(getattr(one, "__wrapped__", None))
        elif isinstance(one, FunctionType):
            path = f"{one.__module__}.{one.__qualname__}"
            for name, attributes in _globals_of(one.__code__):
                value = one.__globals__.get(name, _MISSING)
                if isinstance(value, ModuleType):
                    if _is_users(value):
                        yield from ((f"{value.__name__}.{a}", _Place(vars(value), a)) for a in attributes)
                else:
                    yield f"{one.__module__}.{name}", _Place(one.__globals__, name)
            for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
                yield f"{path}.{name}", _Place(cell, "cell_contents")
            defaults = dict(enumerate(one.__defaults__ or ())) | (one.__kwdefaults__ or {})
            yield from ((f"{path}, default {key}", _Place(defaults, key)) for key in defaults)
        elif isinstance(one, type):
            yield from ((f"{one.__module__}.{one.__qualname__}.{name}", _Place(one, name)) for name in [*vars(one)])
            pending += one.__bases__
        elif hasattr(one, "__dict__"):
            names = [name for name in vars(one) if name not in OF_MODULES]
            yield from ((f"{type(one).__qualname__}.{name}", _Place(vars(one), name)) for name in names)
            if isinstance(one, nn.Module):
                yield from ((f"{type(one).__qualname__}.{name}", _Place(one._buffers, name)) for name in one._buffers)
                pending += one.children()
            pending.append(type(one))


def _code_of(model: nn.Module) -> Iterator[Any]:
    """Classes, hooks, and functions in attributes, of all modules of a model."""
    for module in model.modules():
        yield type(module)
        for name, value in vars(module).items():
            if name.endswith("_hooks"):
                yield from value.values()
            elif isinstance(value, (FunctionType, MethodType, partial, _CACHED)):
                yield value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)) and len(value) > _LONGEST:
        return False
    plain = value is _MISSING or value is None or isinstance(value, (int, float, complex, str, Tensor))
    return (plain or type(value) in (list, tuple, dict)) and (
        sum(tensor.numel() for tensor in tensors_of(value)) <= 1000 * _LONGEST
    )


def _is_users(one: Any) -> bool:
    """Whether code is neither torch's, nor of an installed package, nor ours."""
    if isinstance(one, FunctionType):
        file = one.__code__.co_filename
    else:
        kind = one if isinstance(one, (type, ModuleType)) else type(one)
        try:
            file = getfile(kind)
        except (TypeError, OSError):  # built-in; of a class in __main__ of an interpreter
            return isinstance(kind, type) and kind.__module__ == "__main__" and hasattr(kind, "__dict__")
    return not file.startswith((*_INSTALLED, _PACKAGE, "<frozen"))


@cache
def _globals_of(code: CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Globals that a function and those inside it name, each with all names of attributes in them."""
    names = dict.fromkeys(
        str(one.argval) for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")
    )
    inner = [pair for one in code.co_consts if isinstance(one, CodeType) for pair in _globals_of(one)]
    return (*((name, code.co_names) for name in names), *inner)
