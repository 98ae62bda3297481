"""Pending tensors: outputs of branches, and results of functions of them, whose values are computed later.

A call of a branch returns at once, without waiting for the branch. The caller gets pending tensors, which have a shape
and dtype but no values. Torch functions of pending tensors return pending tensors. Values are computed when they are
needed: by code that reads them, by a layer of the trunk, and at the end of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_places, map_tensors, places, tensors_of
from galvatron_lite.model.trace.meta import meta_copy
from galvatron_lite.parallelism.pipeline.flow import shape_of, writes
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, name_of

Like = Callable[[Tensor, int], Tensor]
"""Returns the template of an argument on the meta device for a number of samples."""


class ModelRun(Protocol):
    """A run of the model."""

    device: torch.device  # of the values
    applied: list[DeferredFunction]  # functions deferred in this run, in order
    shapes: dict[object, Any]  # cached templates of the results of functions, from this run and earlier ones


class Node(Protocol):
    """The source of pending tensors."""

    @property
    def run(self) -> ModelRun:
        """The run that the node belongs to."""

    def value(self) -> Any:
        """The nest of tensors, computed if it is not available yet."""


class PendingTensor(ShardedTensor):
    """A tensor whose values are computed later. As a subclass, it handles functions before ``ShardedTensor`` does."""

    node: Node  # its source
    place: str  # position in the value of the node (see ``map_places``)
    template: Tensor  # tensor of the same shape and dtype on the meta device

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Read metadata from the template, defer functions that return tensors, and call others with the values."""
        name, first, options = name_of(func), args[0] if args else None, kwargs or {}
        is_setter = getattr(func, "__name__", "") == "__set__"
        if isinstance(first, PendingTensor):
            if name == "device":
                return first.node.run.device
            if name in _METADATA and not is_setter:
                return func(first.template, *args[1:], **options)
        in_place = writes(name) or is_setter or "out" in options
        deferred = None if in_place else _defer(func, args, options)
        if deferred is not None:
            return deferred
        for node in nodes_of((args, options)) if in_place else ():
            # deferred functions may read the tensor that changes now
            for function in node.run.applied:
                function.value()
        return func(*map_tensors(args, resolved), **map_tensors(options, resolved))


_METADATA = frozenset({
    "dtype", "requires_grad", "is_floating_point", "is_complex", "layout", "shape", "size", "dim", "ndim", "ndimension",
    "numel", "nelement", "__len__", "is_leaf",
})  # fmt: skip


def pending(node: Node, nest: Any) -> Any:
    """Return the pending tensors of a node for a nest of templates."""

    def defer(place: str, template: Tensor) -> Tensor:
        tensor: PendingTensor = torch.empty(0, dtype=template.dtype).as_subclass(PendingTensor)
        tensor.node, tensor.place, tensor.template, tensor.specs = node, place, template, ()
        return tensor

    return map_places(nest, defer)


def pick(nest: Any, place: str) -> Tensor:
    """Return the tensor at a place of a nest."""
    return next(tensor for tensor_place, tensor in places(nest) if tensor_place == place)


def resolved(tensor: Tensor) -> Tensor:
    """Return the values of a pending tensor; other tensors are returned unchanged."""
    return pick(tensor.node.value(), tensor.place) if isinstance(tensor, PendingTensor) else tensor


class CallContext:
    """The current modes of torch (gradients, inference, autocast), to be restored for a later call."""

    def __init__(self) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kinds = ("cpu", "cuda")
        self._casts = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}

    def __call__(self) -> AbstractContextManager[object]:
        """Return a context with the same modes."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, (enabled, dtype) in self._casts.items():
            if (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) != (enabled, dtype):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return stack


class DeferredFunction:
    """A torch function of pending tensors that is called later."""

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], run: ModelRun) -> None:
        self.func, self.args, self.kwargs, self.run = func, args, kwargs, run
        run.applied.append(self)
        self._around = CallContext()
        self._versions = [(tensor, _version(tensor)) for tensor in tensors_of((args, kwargs))]
        self._value: Any = None
        self._is_computed = False

    def value(self) -> Any:
        """The result of the function."""
        if not self._is_computed:
            # in the order of the calls, not recursively, as chains of functions may be long
            needed = {id(node) for node in nodes_of((self.args, self.kwargs))}
            for function in [*(earlier for earlier in self.run.applied if id(earlier) in needed), self]:
                function._compute()
        return self._value

    def _compute(self) -> None:
        if not self._is_computed:
            self._value, self._is_computed = self.of(resolved), True
            self._versions.clear()

    def of(self, change: Callable[[Tensor], Tensor]) -> Any:
        """Call the function with ``change(tensor)`` for each tensor in its arguments, in the modes of the call."""
        if any(_version(tensor) != version for tensor, version in self._versions):
            remedy = "Give the function a copy: it runs when the branch's output is there."
            raise InputError(name_of(self.func), "a tensor that was changed in place after the call", remedy)
        with self._around(), _without_modes():  # which have seen its call already
            return self.func(*map_tensors(self.args, change), **map_tensors(self.kwargs, change))


@contextmanager
def _without_modes() -> Iterator[None]:
    """Outside of all modes of torch functions."""
    with ExitStack() as stack:
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            stack.enter_context(_pop_mode_temporarily())
        yield


def _version(tensor: Tensor) -> int:
    """The number of in-place changes of a tensor (torch's notes on autograd document this counter)."""
    return 0 if isinstance(tensor, ShardedTensor) or tensor.is_inference() else tensor._version


def _defer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The pending results of a function; None if it returns something else than tensors, or needs values."""
    run = next(tensor.node.run for tensor in tensors_of((args, kwargs)) if isinstance(tensor, PendingTensor))
    key = (func, _signature((args, kwargs)), torch.is_grad_enabled())
    if key not in run.shapes:
        try:
            result = meta_of(func, args, kwargs, template_of)
        except Exception:
            result = None  # it needs values, or fails with values too and then raises its error
        nest = [result] if isinstance(result, Tensor) else result
        is_deferrable = isinstance(nest, (tuple, list)) and bool(nest) and all(type(item) is Tensor for item in nest)
        run.shapes[key] = result if is_deferrable else None
    result = run.shapes[key]
    return None if result is None else pending(DeferredFunction(func, args, kwargs, run), result)


def _signature(value: Any) -> object:
    """A hashable value that determines the shapes of a function's results."""
    if isinstance(value, PendingTensor):
        value = value.template
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, Mapping):
        return tuple((key, _signature(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_signature(item) for item in value)
    return repr(value)


def meta_of(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], like: Callable[[Tensor], Tensor]) -> Any:
    """Call a function on the meta device, with ``like(tensor)`` for each tensor in its arguments."""
    if name_of(func) in ("to", "cpu", "cuda"):
        args = tuple(arg for arg in args if not isinstance(arg, (str, torch.device)))
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
    return map_tensors(func(*map_tensors(args, like), **map_tensors(kwargs, like)), _bare)


def _bare(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def template_of(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype on the meta device."""
    if isinstance(tensor, PendingTensor):
        return tensor.template
    return shape_of(tensor).requires_grad_(tensor.requires_grad)


def nodes_of(value: Any) -> Iterator[Node]:
    """Yield each node that the tensors of a nest depend on once; a node comes before the nodes that it depends on."""
    waiting, seen = [value], set[int]()
    while waiting:
        for tensor in tensors_of(waiting.pop()):
            if isinstance(tensor, PendingTensor) and id(tensor.node) not in seen:
                node = tensor.node
                seen.add(id(node))
                yield node
                if isinstance(node, DeferredFunction):
                    waiting.append((node.args, node.kwargs))


@dataclass(frozen=True, slots=True)
class Template:
    """The shapes and dtypes of the output of a branch."""

    nest: Any  # tensors on the meta device, for all samples of the micro-batch
    sampled: frozenset[str]  # places of the tensors with samples along dim 0
    rows: int  # number of samples

    def resized(self, rows: int) -> Any:
        """Return the nest for another number of samples."""
        if rows == self.rows:
            return self.nest
        return map_places(self.nest, lambda place, tensor: with_rows(tensor, rows) if place in self.sampled else tensor)


def with_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return a tensor like ``tensor`` on the meta device, with ``rows`` items along dim 0."""
    shape = (rows, *tensor.shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


class OutputTemplates:
    """The templates of the outputs of a module, from runs of a copy on the meta device."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path, self._twin = path, meta_copy(module)
        self._dtype = next(
            (parameter.dtype for parameter in self._twin.parameters() if parameter.is_floating_point()), None
        )
        self._templates: dict[object, Template] = {}

    def __call__(self, args: Any, kwargs: Mapping[str, Any], rows: int, like: Like, training: bool) -> Template:
        """Return the template of a call for a micro-batch of ``rows`` samples; ``like`` returns that of an argument."""
        inputs = self._inputs(args, kwargs, rows, like)
        key = (_signature(inputs), rows, training, torch.is_grad_enabled())
        if key not in self._templates:
            self._twin.train(training)
            nest = self._run(inputs)
            sampled = {place for place, tensor in places(nest) if tensor.dim() and tensor.shape[0] == rows}
            try:  # with twice the samples, tensors with samples have twice the rows
                twice = dict(places(self._run(self._inputs(args, kwargs, 2 * rows, like))))
            except Exception:  # the code does not run with another number of samples
                twice = None
            if twice is not None:
                sampled = {place for place in sampled if place in twice and twice[place].shape[0] == 2 * rows}
            self._templates[key] = Template(nest, frozenset(sampled), rows)
        return self._templates[key]

    def _inputs(self, args: Any, kwargs: Any, rows: int, like: Like) -> Any:
        return map_tensors((args, dict(kwargs)), lambda tensor: self._cast(like(tensor, rows)))

    def _run(self, inputs: Any) -> Any:
        args, kwargs = inputs
        try:
            # autocast of the caller does not apply on the meta device
            with torch.device("meta"):
                return map_tensors(self._twin(*args, **kwargs), _bare)
        except Exception as cause:
            remedy = f"Other ranks must know the shapes of what it returns without its values: {cause}"
            raise InputError("branch", self._path, remedy) from cause

    def _cast(self, tensor: Tensor) -> Tensor:
        """Cast to the dtype of the parameters, which may differ from that of compute."""
        if self._dtype is None or not tensor.is_floating_point() or tensor.dtype == self._dtype:
            return tensor
        cast = torch.empty(tensor.shape, dtype=self._dtype, device="meta")
        return cast.requires_grad_(tensor.requires_grad)
