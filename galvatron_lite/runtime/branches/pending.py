"""Tensors that are not here yet: what a branch returned, and what code between layers makes of it.

Where a branch is called, it does not run at once, and where it runs on other ranks, its output is not awaited. The
caller gets pending tensors, which tell shape and type. Torch functions of pending tensors are pending too. Values are
computed when something cannot do without: code that looks at them, a layer of the trunk, the end of the model.
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
"""Gives an argument's stand-in on the meta device for so many samples."""


class ModelRun(Protocol):
    """One run of the model."""

    device: torch.device  # of the values
    applied: list[DeferredFunction]  # functions that were deferred in it, in order
    shapes: dict[object, Any]  # results of functions of shapes, from this run and earlier ones


class Node(Protocol):
    """The origin of pending tensors."""

    @property
    def run(self) -> ModelRun:
        """The run that it is of."""

    def value(self) -> Any:
        """The nest of tensors itself."""


class PendingTensor(ShardedTensor):
    """See the module; created by ``pending``. A subclass of cut tensors, so that among them it is asked first."""

    node: Node  # that gives it
    place: str  # of it in the node's value (see ``map_places``)
    template: Tensor  # like it, on the meta device

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer from the template, defer functions that give tensors, and compute the rest with the values."""
        name, first, options = name_of(func), args[0] if args else None, kwargs or {}
        sets = getattr(func, "__name__", "") == "__set__"
        if isinstance(first, PendingTensor):
            if name == "device":
                return first.node.run.device
            if name in _METADATA and not sets:
                return func(first.template, *args[1:], **options)
        changes = writes(name) or sets or "out" in options
        deferred = None if changes else _defer(func, args, options)
        if deferred is not None:
            return deferred
        for node in nodes_of((args, options)) if changes else ():
            # deferred functions may read what is changed now
            for one in node.run.applied:
                one.value()
        return func(*map_tensors(args, resolved), **map_tensors(options, resolved))


_METADATA = frozenset({
    "dtype", "requires_grad", "is_floating_point", "is_complex", "layout", "shape", "size", "dim", "ndim", "ndimension",
    "numel", "nelement", "__len__", "is_leaf",
})  # fmt: skip


def pending(node: Node, nest: Any) -> Any:
    """A nest of templates as pending tensors of a node."""
    at = {id(tensor): place for place, tensor in places(nest)}

    def defer(template: Tensor) -> Tensor:
        tensor: PendingTensor = torch.empty(0, dtype=template.dtype).as_subclass(PendingTensor)
        tensor.node, tensor.place, tensor.template, tensor.specs = node, at[id(template)], template, ()
        return tensor

    return map_tensors(nest, defer)


def pick(nest: Any, place: str) -> Tensor:
    """The tensor at a place of a nest."""
    return next(tensor for tensor_place, tensor in places(nest) if tensor_place == place)


def resolved(tensor: Tensor) -> Tensor:
    """The tensor itself, once it is here; other tensors as they are."""
    return pick(tensor.node.value(), tensor.place) if isinstance(tensor, PendingTensor) else tensor


class CallContext:
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


class DeferredFunction:
    """A torch function of pending tensors, deferred."""

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], run: ModelRun) -> None:
        self.func, self.args, self.kwargs, self.run = func, args, kwargs, run
        run.applied.append(self)
        self._around = CallContext()
        self._versions = [(tensor, _version(tensor)) for tensor in tensors_of((args, kwargs))]
        self._value: Any = None
        self._is_computed = False

    def value(self) -> Any:
        """The function's result."""
        if not self._is_computed:
            needed = {id(node) for node in nodes_of((self.args, self.kwargs))}
            for one in [*(earlier for earlier in self.run.applied if id(earlier) in needed), self]:
                one._compute()
        return self._value

    def _compute(self) -> None:
        if not self._is_computed:
            self._value, self._is_computed = self.of(resolved), True
            self._versions.clear()

    def of(self, change: Callable[[Tensor], Tensor]) -> Any:
        """Its result of other tensors in the place of its arguments; the modes are those of the call."""
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
    """How often a tensor was changed in place (torch's notes on autograd tell of this counter)."""
    return 0 if isinstance(tensor, ShardedTensor) or tensor.is_inference() else tensor._version


def _defer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pending results; None where the function gives something else than tensors, or needs values."""
    run = next(tensor.node.run for tensor in tensors_of((args, kwargs)) if isinstance(tensor, PendingTensor))
    key = (func, _signature((args, kwargs)), torch.is_grad_enabled())
    if key not in run.shapes:
        try:
            result = meta_of(func, args, kwargs, template_of)
        except Exception:
            result = None  # it needs values, or is wrong: called with values it says so itself
        nest = [result] if isinstance(result, Tensor) else result
        tensors = isinstance(nest, (tuple, list)) and bool(nest) and all(type(one) is Tensor for one in nest)
        run.shapes[key] = result if tensors else None
    result = run.shapes[key]
    return None if result is None else pending(DeferredFunction(func, args, kwargs, run), result)


def _signature(value: Any) -> object:
    """What the shape of a function's result depends on."""
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
    """A function's result on the meta device."""
    if name_of(func) in ("to", "cpu", "cuda"):
        args = tuple(arg for arg in args if not isinstance(arg, (str, torch.device)))
        kwargs = {key: one for key, one in kwargs.items() if key != "device"}
    return map_tensors(func(*map_tensors(args, like), **map_tensors(kwargs, like)), _bare)


def _bare(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def template_of(tensor: Tensor) -> Tensor:
    """Like a tensor, on the meta device."""
    if isinstance(tensor, PendingTensor):
        return tensor.template
    return shape_of(tensor).requires_grad_(tensor.requires_grad)


def nodes_of(value: Any) -> Iterator[Node]:
    """Every node that the tensors of a nest come from, each once, the later ones first."""
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
    """The output of a call of a branch."""

    nest: Any  # tensors on the meta device, for all samples of the micro-batch
    sampled: frozenset[str]  # places of those that hold the samples along dim 0
    rows: int  # the samples

    def resized(self, rows: int) -> Any:
        """The nest for another number of samples."""
        if rows == self.rows:
            return self.nest
        return map_places(self.nest, lambda place, one: with_rows(one, rows) if place in self.sampled else one)


def with_rows(tensor: Tensor, rows: int) -> Tensor:
    """Like a tensor on the meta device, with so many items along dim 0."""
    shape = (rows, *tensor.shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


class Foreseen:
    """Templates of what one module returns: shapes, types, and which tensors hold samples, without its parameters."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path, self._twin = path, meta_copy(module)
        self._dtype = next(
            (parameter.dtype for parameter in self._twin.parameters() if parameter.is_floating_point()), None
        )
        self._known: dict[object, Template] = {}

    def __call__(self, args: Any, kwargs: Mapping[str, Any], rows: int, like: Like, training: bool) -> Template:
        """The template of a call."""
        inputs = self._inputs(args, kwargs, rows, like)
        key = (_signature(inputs), rows, training, torch.is_grad_enabled())
        if key not in self._known:
            self._twin.train(training)
            nest = self._run(inputs)
            sampled = {place for place, tensor in places(nest) if tensor.dim() and tensor.shape[0] == rows}
            try:  # which of them hold more samples where there are more
                twice = dict(places(self._run(self._inputs(args, kwargs, 2 * rows, like))))
            except Exception:  # the code cannot be run with other numbers
                twice = None
            if twice is not None:
                sampled = {place for place in sampled if place in twice and twice[place].shape[0] == 2 * rows}
            self._known[key] = Template(nest, frozenset(sampled), rows)
        return self._known[key]

    def _inputs(self, args: Any, kwargs: Any, rows: int, like: Like) -> Any:
        return map_tensors((args, dict(kwargs)), lambda tensor: self._cast(like(tensor, rows)))

    def _run(self, inputs: Any) -> Any:
        args, kwargs = inputs
        try:
            # an autocast of the caller would not reach the meta device
            with torch.device("meta"):
                return map_tensors(self._twin(*args, **kwargs), _bare)
        except Exception as cause:
            remedy = f"Other ranks must know the shapes of what it returns without its values: {cause}"
            raise InputError("branch", self._path, remedy) from cause

    def _cast(self, tensor: Tensor) -> Tensor:
        """In the precision of the parameters, whatever that of compute."""
        if self._dtype is None or not tensor.is_floating_point() or tensor.dtype == self._dtype:
            return tensor
        cast = torch.empty(tensor.shape, dtype=self._dtype, device="meta")
        return cast.requires_grad_(tensor.requires_grad)
