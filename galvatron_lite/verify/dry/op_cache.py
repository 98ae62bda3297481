"""What operations on tensors without data make, remembered: thousands of layers and micro-batches do the same.

``FakeTensorMode`` has a memory of its own, which takes several times as long to ask (it also knows symbolic sizes,
sparse tensors and devices of all kinds). What is not plain here is left to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

# FakeTensorMode has no public name, though torch documents it (docs.pytorch.org, "Fake tensor")
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN_VALUES = frozenset({
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """A tensor that an operation returns."""

    source: int  # place among the operation's tensors of that which is returned as it is, or is looked at; -1: none
    same: bool  # it is returned as it is
    shape: tuple[int, ...] = ()  # shape, stride, offset, dtype, device: of anything else
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None


@dataclass(frozen=True, slots=True)
class CachedOutputs:
    """All that an operation returns, and the sequence that it comes in; None: one tensor, or none."""

    made: tuple[OutputSpec, ...]
    sequence: type | None


class OpCache:
    """Operations that were run, and what they returned.

    Args:
        fake: who runs what is not known.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._answers: dict[Any, CachedOutputs | None] = {}
        self._dresses: dict[torch.device | None, dict[str, Any]] = {}

    def run(self, func: Any, args: Any, kwargs: Any, compute: Callable[..., Any]) -> Any:
        """What the operation returns; ``compute`` runs it where that is not known."""
        tensors: list[Tensor] = []
        key = [func]
        if not (_is_plain(func) and _add_key(key, tensors, args) and _add_key(key, tensors, tuple(kwargs.items()))):
            return compute(*args, **kwargs)
        full_key = tuple(key)
        answer = self._answers.get(full_key)
        if answer is not None:
            # private, as in torch's own fake tensors: what is made here is no operation of the model's
            with torch._C._DisableTorchDispatch():
                return self._repeat(answer, tensors)
        found = compute(*args, **kwargs)
        if full_key not in self._answers:
            self._answers[full_key] = _outputs_of(found, tensors)
        return found

    def _repeat(self, answer: CachedOutputs, tensors: list[Tensor]) -> Any:
        if answer.sequence is None:
            return self._make(answer.made[0], tensors) if answer.made else None
        return answer.sequence([self._make(one, tensors) for one in answer.made])

    def _make(self, one: OutputSpec, tensors: list[Tensor]) -> Tensor:
        if one.same:
            return tensors[one.source]
        if one.source < 0:
            bare = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta")
        else:
            bare = _empty(one.dtype)
            bare.set_(tensors[one.source].untyped_storage(), one.offset, one.shape, one.stride)
        return self._dress(bare, one.device)

    def _dress(self, bare: Tensor, device: torch.device | None) -> Tensor:
        """What ``FakeTensor(mode, bare, device)`` gives, which checks and sets for longer than an operation takes."""
        known = self._dresses.get(device)
        if known is None:
            known = self._dresses[device] = vars(FakeTensor(self._fake, _empty(torch.float32), device)).copy()
        made = Tensor._make_subclass(FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=device)
        vars(made).update(known)
        return made


def _empty(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device="meta")


def _add_key(key: list[Any], tensors: list[Tensor], values: Any) -> bool:
    """Add some values to a key; whether they are plain."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN_VALUES:
            key.append(kind)
            key.append(value)
        elif issubclass(kind, FakeTensor):
            if value.constant is not None or value.dtype.is_complex:
                return False
            tensors.append(value)
            key += (
                _number(tensors, value), value.dtype, value.shape, value.stride(), value.storage_offset(),
                value.fake_device,
            )  # fmt: skip
        elif kind is list or kind is tuple:
            key.append(len(value))
            if not _add_key(key, tensors, value):
                return False
        else:
            return False
    return True


def _number(tensors: list[Tensor], value: Tensor) -> int:
    """Which of the tensors so far it is."""
    return next(number for number, one in enumerate(tensors) if one is value)


@cache
def _is_plain(func: Any) -> bool:
    """Whether what an operation returns is told by the shapes it is given, and it changes none of them."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return False
    changes = torch.Tag.inplace_view in func.tags or func.overloadpacket in _CHANGING
    return func.namespace in ("aten", "fsdp") and not changes


_CHANGING = frozenset({
    torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_, torch.ops.aten.lift_fresh,
    torch.ops.aten.lift, torch.ops.aten.lift_fresh_copy, torch.ops.aten.scalar_tensor,
})  # fmt: skip
"""Operations that change what shape a tensor has, or whose values torch keeps beside the tensor."""


def _outputs_of(outputs: Any, tensors: list[Tensor]) -> CachedOutputs | None:
    """What was returned, if it can be made again."""
    if outputs is None:
        return CachedOutputs((), None)
    if isinstance(outputs, Tensor):
        made = _spec_of(outputs, tensors)
        return None if made is None else CachedOutputs((made,), None)
    if type(outputs) not in (list, tuple):
        return None
    every = [_spec_of(one, tensors) for one in outputs]
    fresh = [id(one.untyped_storage()) for one, made in zip(outputs, every, strict=True) if made and made.source < 0]
    if any(one is None for one in every) or len(set(fresh)) < len(fresh):
        return None
    return CachedOutputs(tuple(one for one in every if one is not None), type(outputs))


def _spec_of(outputs: Any, tensors: list[Tensor]) -> OutputSpec | None:
    if type(outputs) is not FakeTensor or outputs.constant is not None or outputs.dtype.is_complex:
        return None
    for number, one in enumerate(tensors):
        if one is outputs:
            return OutputSpec(number, same=True)
    shape, stride, offset = tuple(outputs.shape), outputs.stride(), int(outputs.storage_offset())
    storages = [id(one.untyped_storage()) for one in tensors]
    own = id(outputs.untyped_storage())
    if own in storages:
        return OutputSpec(storages.index(own), False, shape, stride, offset, outputs.dtype, outputs.fake_device)
    if offset or outputs.untyped_storage().nbytes() != _room(shape, stride) * outputs.itemsize:
        return None
    return OutputSpec(-1, False, shape, stride, 0, outputs.dtype, outputs.fake_device)


def _room(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Items of the storage of such a tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
