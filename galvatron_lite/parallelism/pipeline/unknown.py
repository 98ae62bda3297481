"""Tensors without values, which know the outputs of layers that they are made of.

Code between layers runs on every pipeline stage, also on what another stage has and nobody here reads. It is given such
tensors: every torch function tells their shapes alone, without work and memory. In a run of the whole model they show
what a layer reads, through whatever code lies between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, locals_only, name_of


class Output(NamedTuple):
    """A tensor that a layer's module returned."""

    path: str  # of the module; a parameter that no layer holds has its own path and call -1
    call: int  # how many times it had run before in this pass
    place: str  # of the tensor in what it returned (see ``map_places``)


Sources = frozenset[Output]
_VALUES = frozenset(("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "__array__"))
"""Functions that give values of a tensor to Python."""
_FACTORIES = frozenset((
    "new_tensor", "new_empty", "new_full", "new_ones", "new_zeros", "empty_like", "full_like", "ones_like",
    "zeros_like", "rand_like", "randn_like", "randint_like",
))  # fmt: skip
"""Functions that ask a tensor for its shape, dtype and device alone."""


class UnknownTensor(ShardedTensor):
    """See the module; made by ``unknown``. A subclass of cut tensors, so that among them it is asked first."""

    sources: Sources  # what it is made of
    home: torch.device  # its ``device``

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do with the shapes what the function does with values."""
        name, kwargs = name_of(func), {} if kwargs is None else kwargs
        first = args[0] if args else None
        one = next(tensor for tensor in tensors_of((args, kwargs)) if isinstance(tensor, UnknownTensor))
        if name == "device":
            return one.home
        if name in _VALUES:
            made_of = ", ".join(sorted(source.path for source in one.sources))
            remedy = "Code between layers reads values of it to decide what runs: put all layers into one stage."
            raise InputError("stages, output of", made_of, remedy)
        if name in _FACTORIES:
            shape = shape_of(one)
            return func(torch.empty((), dtype=shape.dtype, device=one.home).expand(shape.shape), *args[1:], **kwargs)
        if name in ("to", "cpu", "cuda"):
            args = tuple(value for value in args if not isinstance(value, (str, torch.device)))
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        sources, home = sources_of((args, kwargs)), one.home
        if writes(name) and isinstance(first, Tensor):
            return _write(func, first, args[1:], kwargs, sources)
        with locals_only():
            result = func(*map_tensors(args, shape_of), **map_tensors(kwargs, shape_of))
        return map_tensors(result, lambda tensor: unknown(tensor, sources, home))


def unknown(shape: Tensor, sources: Sources, home: torch.device) -> Tensor:
    """Turn a tensor on the meta device, which nobody else holds, into an unknown one; ``home``: its ``device``."""
    tensor: UnknownTensor = shape  # type: ignore[assignment]
    tensor.__class__ = UnknownTensor
    tensor.sources, tensor.home, tensor.specs = sources, home, ()
    return tensor


def sources_of(value: Any) -> Sources:
    """What the unknown tensors in a nest are made of."""
    return frozenset().union(*(one.sources for one in tensors_of(value) if isinstance(one, UnknownTensor)))


def shape_of(tensor: Tensor) -> Tensor:
    """A plain tensor on the meta device like it; of a share as large as the whole."""
    if not isinstance(tensor, UnknownTensor):
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
    with locals_only():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def writes(name: str) -> bool:
    """Whether a function changes its first argument."""
    augmented = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name == "__setitem__" or augmented or (name.endswith("_") and not name.endswith("__"))


def _write(func: Callable[..., Any], target: Tensor, args: Any, kwargs: Any, sources: Sources) -> Any:
    """The target is unknown from now on."""
    if not isinstance(target, UnknownTensor):
        unknown(target, sources, target.device)
    target.sources = sources  # type: ignore[attr-defined]
    with locals_only():
        if target.is_meta:
            func(target, *map_tensors(args, shape_of), **map_tensors(kwargs, shape_of))
    return target
