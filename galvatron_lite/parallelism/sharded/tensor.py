"""Sharded tensors: this rank holds a shard, and the tensor knows how the global tensor is sharded.

A sharded tensor has the global shape. Every torch function that is called with it goes to the handlers of its
``Rules``, by a public extension point of torch (``__torch_function__``). Autograd, saved tensors and kernels see plain
tensors of the local shape.

Gradients: the objective is the sum over ranks of what each starts backward from, and the backward of every collective
is its exact adjoint. So for a tensor or parameter that every rank of a group holds in full, each rank has a part of the
gradient, and the sum of the parts over the group is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.groups import AxisGroup, Pieces, length_of, pieces_of, shards_of


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """How one dim of a tensor is sharded."""

    dim: int  # counted from the front
    extent: int  # of the global tensor
    group: AxisGroup

    @property
    def pieces(self) -> Pieces:
        """Items of this rank, in order."""
        return pieces_of(self.extent, self.group, self.group.rank)

    @property
    def shards(self) -> tuple[Pieces, ...]:
        """Items of every rank."""
        return shards_of(self.extent, self.group)

    @property
    def start(self) -> int:
        """First item of this rank; it must hold a single piece."""
        ((start, _),) = self.pieces
        return start

    @property
    def length(self) -> int:
        """Number of items of this rank."""
        return length_of(self.pieces)

    def at_dim(self, dim: int) -> ShardSpec:
        """Return the spec for another dim."""
        return self if self.dim == dim else ShardSpec(dim, self.extent, self.group)


locals_only = torch._C.DisableTorchFunctionSubclass
"""Context in which torch treats sharded tensors as their plain local tensors.

New tensors are plain in it, and in-place functions return the sharded tensor itself. See "Extending PyTorch" for this
exit from ``__torch_function__``.
"""

ShardSpecs = tuple[ShardSpec, ...]
"""At most one for each dim, in the order of dims."""

PIXELS = 2
"""First dim of an image's pixels; the dims before are samples and channels."""


class Call(NamedTuple):
    """A call of a torch function with a sharded tensor."""

    function: Callable[..., Any]
    name: str  # of the function: ``conv2d``, ``add``, ``shape`` (of a property)
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rules: Rules  # of the first sharded tensor among the arguments
    gather_reason: str = ""  # why the tensor is gathered, if no missing rule is the reason


def in_place(call: Call) -> bool:
    """Whether a call writes to its first argument."""
    if call.name.startswith("__"):
        return call.name in _WRITING
    return call.name.endswith("_") or bool(call.kwargs.get("inplace"))


_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITING = frozenset(["__setitem__", *map("__i{}__".format, _OPERATORS)])

Handler = Callable[[Call], Any]
"""Runs a call, and returns sharded tensors, or plain ones that every rank holds in full."""


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """The handlers of torch functions for sharded tensors."""

    handlers: Mapping[str, Handler]  # by the function's name
    otherwise: Handler  # of all other functions
    pins: tuple[str, ...] = ("depth", "height", "width")  # fields of ``Strategy`` that shard such tensors
    what: str = "picture"  # what such tensors are, for messages


class ShardedTensor(torch.Tensor):
    """See the module. ``from_local`` makes one, ``to_local`` returns its shard."""

    specs: ShardSpecs  # not empty
    rules: Rules
    # of a slice of a sharded tensor, which may be a copy: writes it back to that tensor; None: it is no slice
    write_back: Callable[[Any], None] | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the handler of the first sharded tensor among the arguments."""
        named = {} if kwargs is None else kwargs
        first = args[0] if args else None
        rules = first.rules if isinstance(first, ShardedTensor) else next(sharded_tensors((args, named))).rules
        name = name_of(func)
        call = Call(func, name, args, named, rules)
        result = rules.handlers.get(name, rules.otherwise)(call)
        if isinstance(first, ShardedTensor) and first.write_back is not None:
            if in_place(call):
                first.write_back(first)
            elif isinstance(result, ShardedTensor) and result.write_back is None and share_memory(first, result):
                result.write_back = refuse_write_back
        return result


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors, sharded or not, have one storage."""
    with locals_only():
        return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def refuse_write_back(_: Tensor) -> None:
    """Raise InputError: a view of a copy was written to."""
    remedy = "Under this plan it is a copy: write to the tensor itself (x[:, 1:] = ...), or to a slice of it."
    raise InputError("model", "that writes to a view of a slice of split tokens or pixels", remedy)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a torch function, or of the property whose getter it is (``Tensor.shape.__get__``)."""
    name: str = getattr(function, "__name__", type(function).__name__)
    return str(function.__self__.__name__) if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


def sharded_tensors(value: Any) -> Iterator[ShardedTensor]:
    """Yield all sharded tensors in nested tuples, lists and mappings."""
    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, Mapping):
        yield from sharded_tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from sharded_tensors(item)


def from_local(local: Tensor, specs: Sequence[ShardSpec], rules: Rules) -> Tensor:
    """Turn this rank's shard into a sharded tensor; without specs, return it unchanged.

    Args:
        local: a plain tensor without other references; it becomes the sharded tensor.
        specs: of the global tensor.
        rules: of the sharded tensor.

    Raises:
        InputError: the length of the shard is not that of its spec.
    """
    if not specs:
        return local
    for spec in specs:
        if local.shape[spec.dim] != spec.length:
            held = f"Rank {spec.group.rank} of {spec.group.size} holds {spec.length} of {spec.extent} items"
            raise InputError("shape of a shard", tuple(local.shape), f"{held} of dim {spec.dim}.")
    # As torch does with its uninitialized parameters. ``as_subclass`` would make a view, and in-place functions on a
    # view cost a copy in backward.
    result: ShardedTensor = local  # type: ignore[assignment]
    result.__class__ = _sharded_kind(type(local))
    result.specs, result.rules = tuple(sorted(specs, key=lambda spec: spec.dim)), rules
    return result


def wrap_locals(result: Any, specs: ShardSpecs, rules: Rules) -> Any:
    """Turn the result of a function of shards into sharded tensors: ``from_local`` for tuples and lists too, unchecked.

    Other values, and tensors that are sharded already (an in-place function returns its argument), stay unchanged.
    """
    if _is_plain(result):
        if specs:
            kind: type[Tensor] = type(result)
            result.__class__ = _sharded_kind(kind)
            result.specs, result.rules = specs, rules
        return result
    if isinstance(result, (tuple, list)):
        return type(result)([wrap_locals(_alias(item), specs, rules) for item in result])
    return result


def _alias(value: Any) -> Any:
    """Alias a tensor of indices (of ``topk``): autograd saves it, and recomputation compares its shape."""
    return value.view_as(value) if _is_plain(value) and not value.is_floating_point() else value


def _is_plain(value: Any) -> bool:
    """Whether a value is a plain tensor, or a tensor of a dispatch mode (such as tensors without data)."""
    kind = type(value)
    if kind is Tensor or not isinstance(value, Tensor) or isinstance(value, ShardedTensor):
        return kind is Tensor
    return "__torch_dispatch__" in vars(kind)


@cache
def _sharded_kind(kind: type[Tensor]) -> type[ShardedTensor]:
    return ShardedTensor if kind is Tensor else type(f"Sharded{kind.__name__}", (ShardedTensor, kind), {})


def unwrap(tensor: Tensor) -> Tensor:
    """Turn a sharded tensor back into a plain tensor of the local shape, in place."""
    if isinstance(tensor, ShardedTensor):
        tensor.__class__ = type(tensor).__mro__[1 if type(tensor) is ShardedTensor else 2]
        del tensor.specs, tensor.rules
        vars(tensor).pop("write_back", None)
    return tensor


def to_local(tensor: Tensor) -> Tensor:
    """Return the shard of a tensor as a plain tensor (a view); return plain tensors unchanged."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    with locals_only():
        if type(tensor) is ShardedTensor:
            return tensor.as_subclass(Tensor)
        local: Tensor = torch.ops.aten.alias(tensor)  # ``as_subclass`` leaves out the mode that knows the tensor best
        return local


def specs_of(tensor: Tensor) -> ShardSpecs:
    """Return how a tensor is sharded; empty for plain tensors."""
    return tensor.specs if isinstance(tensor, ShardedTensor) else ()


def global_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the global tensor."""
    if not isinstance(tensor, ShardedTensor):
        return tuple(tensor.shape)
    with locals_only():
        shape = list(tensor.shape)
    for spec in tensor.specs:
        shape[spec.dim] = spec.extent
    return tuple(shape)


def image_specs(shape: Sequence[int], groups: Sequence[AxisGroup | None]) -> ShardSpecs:
    """Return how an image (samples, channels, [[depth,] height,] width) is sharded.

    Args:
        shape: global shape of the image.
        groups: along depth, height and width; None for a side that is not sharded.
    """
    groups = groups[len(groups) - len(shape) + PIXELS :]
    sides = enumerate(zip(shape[PIXELS:], groups, strict=True), PIXELS)
    return tuple(ShardSpec(dim, extent, group) for dim, (extent, group) in sides if group is not None)
