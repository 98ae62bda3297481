"""Tensors that are not here yet: what a branch returned, and what code between layers makes of it.

Where a branch is called, it does not run at once, and where it runs on other ranks, its output is not awaited. The
caller gets pending tensors, which tell shape and type. Torch functions of pending tensors are pending too. Values are
found when something cannot do without: code that looks at them, a layer of the trunk, the end of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors, places, tensors_of
from galvatron_lite.parallelism.pipeline.unknown import shape_of, writes
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, name_of


class ModelRun(Protocol):
    """One run of the model."""

    device: torch.device  # of the values
    applied: list[Applied]  # functions that were put off in it, in order
    shapes: dict[object, Any]  # what functions make of shapes, from this run and earlier ones


class Node(Protocol):
    """What pending tensors are of."""

    @property
    def run(self) -> ModelRun:
        """The run that it is of."""

    def value(self) -> Any:
        """The nest of tensors itself."""


class PendingTensor(ShardedTensor):
    """See the module; made by ``pending``. A subclass of cut tensors, so that among them it is asked first."""

    node: Node  # that makes it
    place: str  # of it in what the node makes (see ``map_places``)
    template: Tensor  # like it, on the meta device

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what is known, put off what gives tensors, and do the rest with the values."""
        name, first, given = name_of(func), args[0] if args else None, kwargs or {}
        if isinstance(first, PendingTensor):
            if name == "device":
                return first.node.run.device
            if name in _TOLD and not _sets(func):
                return func(first.template, *args[1:], **given)
        changes = writes(name) or _sets(func) or "out" in given
        made = None if changes else _put_off(func, args, given)
        if made is not None:
            return made
        for node in nodes_of((args, given)) if changes else ():
            # what was put off may read what is changed now
            for one in node.run.applied:
                one.value()
        return func(*map_tensors(args, resolved), **map_tensors(given, resolved))


_TOLD = frozenset({
    "dtype", "requires_grad", "is_floating_point", "is_complex", "layout", "shape", "size", "dim", "ndim", "ndimension",
    "numel", "nelement", "__len__", "is_leaf",
})  # fmt: skip
"""What a template answers."""


def pending(node: Node, nest: Any) -> Any:
    """A nest of templates as pending tensors of a node."""
    at = {id(tensor): place for place, tensor in places(nest)}
    return map_tensors(nest, lambda template: _pending(node, at[id(template)], template))


def _pending(node: Node, place: str, template: Tensor) -> Tensor:
    made: PendingTensor = torch.empty(0, dtype=template.dtype).as_subclass(PendingTensor)
    made.node, made.place, made.template, made.specs = node, place, template, ()
    return made


def pick(nest: Any, place: str) -> Tensor:
    """The tensor at a place of a nest."""
    return next(tensor for known, tensor in places(nest) if known == place)


def resolved(tensor: Tensor) -> Tensor:
    """The tensor itself, once it is here; other tensors as they are."""
    return pick(tensor.node.value(), tensor.place) if isinstance(tensor, PendingTensor) else tensor


class Surroundings:
    """The modes of torch that a function was called in, to call it in them later."""

    def __init__(self) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kinds = ("cpu", "cuda")
        self._casts = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}

    def __call__(self) -> AbstractContextManager[object]:
        """Those modes again."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, (enabled, dtype) in self._casts.items():
            if (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) != (enabled, dtype):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return stack


class Applied:
    """A torch function of pending tensors, put off.

    Args:
        func: the function.
        args: as they were given.
        kwargs: as they were given.
        run: of the model.
    """

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], run: ModelRun) -> None:
        self.func, self.args, self.kwargs, self.run = func, args, kwargs, run
        run.applied.append(self)
        self._around = Surroundings()
        self._versions = [(tensor, _version(tensor)) for tensor in tensors_of((args, kwargs))]
        self._value: Any = None
        self._known = False

    def value(self) -> Any:
        """What the function makes of the values.

        Raises:
            InputError: an argument was changed in place since the function was called.
        """
        if not self._known:
            needed = {id(node) for node in nodes_of((self.args, self.kwargs))}
            for earlier in self.run.applied:
                if id(earlier) in needed:
                    earlier._find()
            self._find()
        return self._value

    def _find(self) -> None:
        if not self._known:
            self._value, self._known = self.of(resolved), True
            self._versions.clear()

    def of(self, change: Callable[[Tensor], Tensor]) -> Any:
        """What it makes of other tensors in the place of its arguments; the modes are those of the call."""
        if any(_version(tensor) != version for tensor, version in self._versions):
            remedy = "Give the function a copy: it runs when the branch's output is there."
            raise InputError(name_of(self.func), "a tensor that was changed in place behind the call", remedy)
        with self._around():
            return self.func(*map_tensors(self.args, change), **map_tensors(self.kwargs, change))


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; no public name tells (the notes on autograd do tell of the counter)."""
    return 0 if isinstance(tensor, ShardedTensor) or tensor.is_inference() else tensor._version


def _put_off(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pending results; None where the function gives something else than tensors, or needs values."""
    run = next(tensor.node.run for tensor in tensors_of((args, kwargs)) if isinstance(tensor, PendingTensor))
    key = (func, signature((args, kwargs)), torch.is_grad_enabled())
    if key not in run.shapes:
        run.shapes[key] = _foreseen(func, args, kwargs)
    result = run.shapes[key]
    return None if result is None else pending(Applied(func, args, kwargs, run), result)


def _foreseen(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        result = meta_of(func, args, kwargs, template_of)
    except Exception:
        return None  # it needs values, or is wrong: called with values it says so itself
    nest = [result] if isinstance(result, Tensor) else result
    tensors = isinstance(nest, (tuple, list)) and bool(nest) and all(type(one) is Tensor for one in nest)
    return result if tensors else None


def signature(value: Any) -> object:
    """What the shape of a function's result depends on."""
    if isinstance(value, PendingTensor):
        value = value.template
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, Mapping):
        return tuple((key, signature(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(signature(item) for item in value)
    return repr(value)


def meta_of(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], like: Callable[[Tensor], Tensor]) -> Any:
    """What a function makes on the meta device.

    Args:
        func: the function.
        args: its arguments; devices among them are left out.
        kwargs: the same.
        like: gives an argument's stand-in on the meta device.
    """
    if name_of(func) in ("to", "cpu", "cuda"):
        args = tuple(one for one in args if not isinstance(one, (str, torch.device)))
        kwargs = {key: one for key, one in kwargs.items() if key != "device"}
    found = func(*map_tensors(args, like), **map_tensors(kwargs, like))
    return map_tensors(found, bare)


def bare(tensor: Tensor) -> Tensor:
    """Like a tensor on the meta device, without what it was made of."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def template_of(tensor: Tensor) -> Tensor:
    """Like a tensor, on the meta device."""
    if isinstance(tensor, PendingTensor):
        return tensor.template
    return shape_of(tensor).requires_grad_(tensor.requires_grad)


def _sets(func: Callable[..., Any]) -> bool:
    return getattr(func, "__name__", "") == "__set__"


def nodes_of(value: Any) -> Iterator[Node]:
    """Every node that the tensors of a nest are made of, each once, the later ones first."""
    waiting, seen = [value], set[int]()
    while waiting:
        for tensor in tensors_of(waiting.pop()):
            if isinstance(tensor, PendingTensor) and id(tensor.node) not in seen:
                node = tensor.node
                seen.add(id(node))
                yield node
                if isinstance(node, Applied):
                    waiting.append((node.args, node.kwargs))
