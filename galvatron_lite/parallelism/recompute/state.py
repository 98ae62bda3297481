"""What a layer changes besides its outputs, and how it runs again as if it had not.

A layer may count its calls, update buffers (an average over steps) or append to a cache that it is given. Run again in
backward, it must see what it saw the first time and leave everything as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import tensors_of

_STATELESS = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, nn.Module, Tensor)
_MACHINERY = ("torch", "deepspeed", "galvatron_lite")
"""Packages whose objects count what runs, the second time too."""


@dataclass(slots=True)
class _Container:
    """A container, what it held, and copies of its tensors (only those that are overwritten, once these are known)."""

    path: str
    value: Any
    names: tuple[str, ...] | None
    content: Any = None
    copies: dict[Any, tuple[int, Tensor]] = field(default_factory=dict)

    def read(self) -> Any:
        if isinstance(self.value, dict):
            names = self.value if self.names is None else [name for name in self.names if name in self.value]
            return {name: self.value[name] for name in names}
        return self.value.copy()

    def write(self, content: Any) -> None:
        if isinstance(self.value, (dict, set)):
            if self.names is None:
                self.value.clear()
            self.value.update(content)
        else:
            self.value.clear()
            self.value.extend(content)

    def items(self) -> Iterator[tuple[Any, Any]]:
        if not isinstance(self.content, set):
            yield from self.content.items() if isinstance(self.content, dict) else enumerate(self.content)

    def write_first(self) -> None:
        """What it held the first time, copies in place of tensors that were overwritten since."""
        content = self.content.copy()
        for key, (_, copied) in self.copies.items():
            content[key] = copied
        self.write(content)


class LayerState:
    """What a layer can change: attributes and buffers of its modules, and objects among its arguments.

    The first call finds out whether it changes any; a layer that does not is looked at no more.

    Args:
        module: the layer. Attributes that it gets later are not looked at.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name, self._known, self._overwritten = type(module).__name__, False, frozenset[tuple[str, Any]]()
        self._repeatable = type(module) in (nn.ReLU, nn.ReLU6)  # of its own result gives the same
        self._changes = True
        self._modules = [
            (path, one, tuple(name for name in vars(one) if not name.startswith("_") and name != "training"))
            for path, one in module.named_modules()
        ]

    def call(self, run: Callable[[list[_Container]], Any], arguments: Any) -> Any:
        """Run the layer, which is given its state before the call.

        Raises:
            InputError: it overwrites a tensor that it is given.
        """
        if not self._changes:
            return run([])
        before = list(self._containers(arguments))
        for one in before:
            one.content = one.read()
            one.copies = {key: (value._version, value.detach().clone()) for key, value in self._to_copy(one)}
        versions = [(tensor, tensor._version) for tensor in tensors_of(arguments)]
        output = run(before)
        if not self._repeatable and any(tensor._version != version for tensor, version in versions):
            remedy = "It overwrites a tensor that it is given, and cannot run again on it: plan it without recompute."
            raise InputError("recompute", self._name, remedy)
        if not self._known:
            self._learn(before)
        return output

    def _to_copy(self, one: _Container) -> Iterator[tuple[Any, Tensor]]:
        for key, value in one.items():
            plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            if plain and (not self._known or (one.path, key) in self._overwritten):
                yield key, value

    def _learn(self, before: list[_Container]) -> None:
        for one in before:
            one.copies = {key: copy for key, copy in one.copies.items() if _is_overwritten(one.content[key], *copy)}
        self._overwritten = frozenset((one.path, key) for one in before for key in one.copies)
        self._changes = bool(self._overwritten) or any(not _equal(one.content, one.read()) for one in before)
        self._known = True
        if not self._changes:
            before.clear()

    def _containers(self, value: Any) -> Iterator[_Container]:
        seen: set[int] = set()
        for path, module, names in self._modules:
            yield _Container(f"{path}.", vars(module), names)
            yield _Container(f"{path}._buffers", module._buffers, None)
            for name in names:
                yield from _inside(f"{path}.{name}", vars(module).get(name), seen)
        yield from _inside("arguments", value, seen)


@contextmanager
def as_before(containers: list[_Container]) -> Iterator[None]:
    """The state of a layer before its first run, inside; afterwards as it is now."""
    now = [(one, one.read()) for one in containers]
    for one in containers:
        one.write_first()
    try:
        yield
    finally:
        for one, content in now:
            one.write(content)


def _inside(path: str, value: Any, seen: set[int]) -> Iterator[_Container]:
    """Containers that can change, in a nest of containers and objects."""
    if isinstance(value, _STATELESS) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, tuple):
        for place, item in enumerate(value):
            yield from _inside(f"{path}.{place}", item, seen)
        return
    is_object = hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _MACHINERY
    held = value if isinstance(value, (dict, list, deque, set)) else vars(value) if is_object else None
    if held is None:
        return
    yield _Container(path, held, None)
    if not isinstance(held, set):
        for key, item in list(held.items() if isinstance(held, dict) else enumerate(held)):
            yield from _inside(f"{path}.{key}", item, seen)


def _is_overwritten(tensor: Tensor, version: int, copied: Tensor) -> bool:
    return tensor._version != version or not (tensor.is_meta or torch.equal(tensor, copied))


def _equal(first: Any, second: Any) -> bool:
    """Whether two contents are the same objects, or equal plain values."""
    if isinstance(first, set):
        return bool(first == second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_alike(value, second[key]) for key, value in first.items())
    return len(first) == len(second) and all(map(_alike, first, second))


def _alike(first: Any, second: Any) -> bool:
    return first is second or (isinstance(first, (int, float, str)) and type(first) is type(second) and first == second)
