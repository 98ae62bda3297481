"""Cache of the results of operations on tensors without data, which layers, samples and micro-batches repeat.

torch computes most shapes in Python code, which takes about a hundred times as long as to look them up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

MOST = 20_000
"""Operations in the cache at most."""
Traits = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, torch.device | None]
"""Type, shape, stride, offset and device of a tensor."""


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """A tensor that an operation returns."""

    source: int  # index of the input tensor that is returned, or that the output is a view of; -1: none
    same: bool  # whether that input is returned itself
    traits: Traits  # of an output that is no input


@dataclass(frozen=True, slots=True)
class CachedOutputs:
    """All outputs of an operation, and the type of the sequence they are in; None for one tensor, or none."""

    outputs: tuple[OutputSpec, ...]
    sequence: type | None


class OpCache:
    """Results of operations on the meta device.

    Symbolic sizes, complex or sparse tensors, and operators of other packages are not cached.
    """

    def __init__(self) -> None:
        self._answers: dict[Any, CachedOutputs | None] = {}

    def run(self, func: Any, args: Any, kwargs: Any, compute: Callable[..., Any]) -> Any:
        """Return the result of an operation; ``compute`` runs it if it is not in the cache."""
        tensors: list[Tensor] = []
        # operators live as long as torch; hashing them runs Python code
        key: list[Any] = [id(func), torch.get_default_dtype()]
        if not (
            _is_plain(func)
            and self._add_key(key, tensors, args)
            and (not kwargs or self._add_key(key, tensors, tuple(kwargs.items())))
        ):
            return compute(*args, **kwargs)
        full_key = tuple(key)
        answer = self._answers.get(full_key)
        if answer is not None:
            # private, as in torch's own fake tensors: what is made here is no operation of the model's
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                if answer.sequence is None:
                    return self._make(answer.outputs[0], tensors) if answer.outputs else None
                return answer.sequence([self._make(spec, tensors) for spec in answer.outputs])
        outputs = compute(*args, **kwargs)
        if full_key not in self._answers:
            if len(self._answers) >= MOST:
                self._answers.clear()
            self._answers[full_key] = self._outputs_of(outputs, tensors)
        return outputs

    def traits_of(self, tensor: Any) -> Traits | None:
        """Return all properties of a tensor that results depend on; None if there may be others, or it is no tensor."""
        if type(tensor) not in _KINDS or not tensor.is_meta or tensor.layout is not torch.strided:
            return None
        if tensor.dtype.is_complex:
            return None
        return tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), None

    def dress(self, bare: Tensor, device: torch.device | None) -> Tensor:  # noqa: ARG002 - for those that have another
        """Make a result of a tensor on the meta device."""
        return bare

    def _make(self, one: OutputSpec, tensors: list[Tensor]) -> Tensor:
        if one.same:
            return tensors[one.source]
        dtype, shape, stride, offset, device = one.traits
        if one.source < 0:
            bare = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
        else:
            bare = torch.empty(0, dtype=dtype, device=_META)
            bare.set_(tensors[one.source].untyped_storage(), offset, shape, stride)
        return self.dress(bare, device)

    def _add_key(self, key: list[Any], tensors: list[Tensor], values: Any) -> bool:
        for value in values:
            kind = type(value)
            if kind in _PLAIN_VALUES:
                key.append(kind)
                key.append(value)
            elif kind is list or kind is tuple:
                key.append(len(value))
                if not self._add_key(key, tensors, value):
                    return False
            elif (traits := self.traits_of(value)) is not None:
                tensors.append(value)
                for number, tensor in enumerate(tensors):
                    if tensor is value:
                        key.append(number)
                        break
                key.append(traits)
            else:
                return False
        return True

    def _outputs_of(self, outputs: Any, tensors: list[Tensor]) -> CachedOutputs | None:
        sequence = type(outputs) if type(outputs) in (list, tuple) else None
        every = outputs if sequence else () if outputs is None else (outputs,)
        specs = [self._spec_of(output, tensors) for output in every]
        plain = tuple(spec for spec in specs if spec is not None)
        fresh = [id(output.untyped_storage()) for output, spec in zip(every, specs, strict=True) if spec and
                 spec.source < 0]  # fmt: skip
        if len(plain) < len(specs) or len(set(fresh)) < len(fresh):
            return None
        return CachedOutputs(plain, sequence)

    def _spec_of(self, output: Any, tensors: list[Tensor]) -> OutputSpec | None:
        traits = self.traits_of(output)
        if traits is None:
            return None
        for number, tensor in enumerate(tensors):
            if tensor is output:
                return OutputSpec(number, True, traits)
        storages = [id(tensor.untyped_storage()) for tensor in tensors]
        storage = id(output.untyped_storage())
        if storage in storages:
            return OutputSpec(storages.index(storage), False, traits)
        _, shape, stride, offset, _ = traits
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if offset or output.untyped_storage().nbytes() != (0 if 0 in shape else last + 1) * output.itemsize:
            return None
        return OutputSpec(-1, False, traits)


_META = torch.device("meta")
_KINDS = (Tensor, nn.Parameter)
_PLAIN_VALUES = frozenset({
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip


@cache
def _is_plain(func: Any) -> bool:
    """Whether the result of an operation depends only on its inputs' shapes, and no shape changes."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return False
    changes = torch.Tag.inplace_view in func.tags or func.overloadpacket in _CHANGING
    changes = changes or any(argument.is_out for argument in func._schema.arguments)
    return func.namespace in ("aten", "fsdp", "galvatron_lite") and not changes


_CHANGING = frozenset({
    torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_, torch.ops.aten.lift_fresh,
    torch.ops.aten.lift, torch.ops.aten.lift_fresh_copy, torch.ops.aten.scalar_tensor,
})  # fmt: skip
"""Operations that change the shape of a tensor, or whose values torch keeps beside the tensor."""
