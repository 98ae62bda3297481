"""A tensor of which this rank holds a shard, and which knows how the global tensor is sharded.

Code that uses it sees the global tensor: it has the global shape, and every torch function called with it goes to the
``Rules`` it carries, which say what the function means for shards. Only public extension points of torch are used
(``__torch_function__``). Autograd, saved tensors and kernels see plain tensors of the local shape.

Gradients: the objective is the sum over ranks of what each starts its backward pass from, and the backward of every
collective is its exact adjoint. So the gradient of a tensor or parameter that every rank of a group holds in full is a
part on each rank; the sum of the parts over the group is the gradient.
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
        """The items that this rank holds, in order."""
        return pieces_of(self.extent, self.group, self.group.rank)

    @property
    def shards(self) -> tuple[Pieces, ...]:
        """The items of every rank."""
        return shards_of(self.extent, self.group)

    @property
    def start(self) -> int:
        """The first item of this rank's only piece."""
        ((start, _),) = self.pieces
        return start

    @property
    def length(self) -> int:
        """Items that this rank holds."""
        return length_of(self.pieces)

    def at_dim(self, dim: int) -> ShardSpec:
        """The same for another dim."""
        return self if self.dim == dim else ShardSpec(dim, self.extent, self.group)


locals_only = torch._C.DisableTorchFunctionSubclass
"""Context in which torch treats sharded tensors as the plain local tensors that they hold.

New tensors are then plain, and in-place functions return the sharded tensor itself. Documented in "Extending PyTorch"
as the way out of ``__torch_function__``.
"""

ShardSpecs = tuple[ShardSpec, ...]
"""At most one a dim, in the order of dims."""

PIXELS = 2
"""Dim of an image (samples, channels, ...) where its pixels begin."""


class Call(NamedTuple):
    """A call of a torch function with a sharded tensor."""

    function: Callable[..., Any]
    name: str  # of the function: ``conv2d``, ``add``, ``shape`` (of a property)
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rules: Rules  # of the first sharded tensor among the arguments
    because: str = ""  # why the tensor is gathered, where that is by design


Handler = Callable[[Call], Any]
"""Carries out a call: returns sharded tensors, and plain ones that every rank holds in full."""


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """What functions do with sharded tensors."""

    handlers: Mapping[str, Handler]  # by the function's name
    otherwise: Handler  # of every other function
    pins: tuple[str, ...] = ("depth", "height", "width")  # degrees of a plan that shard such tensors
    what: str = "picture"  # what the tensors are, for messages


class ShardedTensor(torch.Tensor):
    """See the module. Made by ``from_local``; read by ``to_local``."""

    specs: ShardSpecs  # never empty
    rules: Rules

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hand the call to the rules of the first sharded tensor among the arguments."""
        named = {} if kwargs is None else kwargs
        first = args[0] if args else None
        rules = first.rules if isinstance(first, ShardedTensor) else next(sharded_tensors((args, named))).rules
        name = name_of(func)
        return rules.handlers.get(name, rules.otherwise)(Call(func, name, args, named, rules))


def name_of(function: Callable[..., Any]) -> str:
    """The name of a torch function; of a property (``Tensor.shape.__get__``) the property's."""
    name: str = getattr(function, "__name__", type(function).__name__)
    return str(function.__self__.__name__) if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


def sharded_tensors(value: Any) -> Iterator[ShardedTensor]:
    """Every sharded tensor in a nest of tuples, lists and mappings."""
    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, Mapping):
        yield from sharded_tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from sharded_tensors(item)


def from_local(local: Tensor, specs: Sequence[ShardSpec], rules: Rules) -> Tensor:
    """This rank's shard as a sharded tensor; the tensor itself where there are no specs.

    Args:
        local: a plain tensor that nobody else refers to; it becomes the sharded tensor.
        specs: how the dims of the global tensor are sharded.
        rules: what functions do with it.

    Raises:
        InputError: the shard has another length than its spec says.
    """
    if not specs:
        return local
    for spec in specs:
        if local.shape[spec.dim] != spec.length:
            held = f"Rank {spec.group.rank} of {spec.group.size} holds {spec.length} of {spec.extent} items"
            raise InputError("shape of a shard", tuple(local.shape), f"{held} of dim {spec.dim}.")
    # As torch's own parameters of unknown shape do when they take shape. `as_subclass` would make a view, and in-place
    # functions on a view cost a copy in backward.
    result: ShardedTensor = local  # type: ignore[assignment]
    result.__class__ = _sharded_kind(type(local))
    result.specs, result.rules = tuple(sorted(specs, key=lambda spec: spec.dim)), rules
    return result


def wrap_locals(result: Any, specs: ShardSpecs, rules: Rules) -> Any:
    """What a function made of shards, as sharded tensors: ``from_local`` without the check, for tuples and lists too.

    Tensors that are sharded already (an in-place function returns its argument) and other values stay as they are.
    """
    if _is_plain(result):
        if specs:
            kind: type[Tensor] = type(result)
            result.__class__ = _sharded_kind(kind)
            result.specs, result.rules = specs, rules
        return result
    if isinstance(result, (tuple, list)):
        return type(result)([wrap_locals(_alias(one), specs, rules) for one in result])
    return result


def _alias(value: Any) -> Any:
    """Indices (of ``topk``) as another tensor: autograd saves the first, and recomputation compares its shape."""
    return value.view_as(value) if _is_plain(value) and not value.is_floating_point() else value


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor of torch's own, or of a mode that runs operations in another way (without data)."""
    kind = type(value)
    if kind is Tensor or not isinstance(value, Tensor) or isinstance(value, ShardedTensor):
        return kind is Tensor
    return "__torch_dispatch__" in vars(kind)


@cache
def _sharded_kind(kind: type[Tensor]) -> type[ShardedTensor]:
    return ShardedTensor if kind is Tensor else type(f"Sharded{kind.__name__}", (ShardedTensor, kind), {})


def unwrap(tensor: Tensor) -> Tensor:
    """The same tensor, from now on a plain one of the local shape; for code that nobody else shares it with."""
    if isinstance(tensor, ShardedTensor):
        tensor.__class__ = type(tensor).__mro__[1 if type(tensor) is ShardedTensor else 2]
        del tensor.specs, tensor.rules
    return tensor


def to_local(tensor: Tensor) -> Tensor:
    """The shard as a plain tensor (a view); plain tensors as they are."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    with locals_only():
        if type(tensor) is ShardedTensor:
            return tensor.as_subclass(Tensor)
        local: Tensor = torch.ops.aten.alias(tensor)  # ``as_subclass`` leaves out the mode that knows the tensor best
        return local


def specs_of(tensor: Tensor) -> ShardSpecs:
    """How a tensor is sharded; nothing for a plain one."""
    return tensor.specs if isinstance(tensor, ShardedTensor) else ()


def global_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the global tensor."""
    if not isinstance(tensor, ShardedTensor):
        return tuple(tensor.shape)
    with locals_only():
        shape = list(tensor.shape)
    for spec in tensor.specs:
        shape[spec.dim] = spec.extent
    return tuple(shape)


def image_specs(shape: Sequence[int], groups: Sequence[AxisGroup | None]) -> ShardSpecs:
    """How an image (samples, channels, [[depth,] height,] width) of that global shape is sharded.

    Args:
        shape: of the image.
        groups: along depth, height and width; None where a side is not sharded.
    """
    groups = groups[len(groups) - len(shape) + PIXELS :]
    sides = enumerate(zip(shape[PIXELS:], groups, strict=True), PIXELS)
    return tuple(ShardSpec(dim, extent, group) for dim, (extent, group) in sides if group is not None)
