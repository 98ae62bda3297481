"""Metadata of sharded tensors, as of the global tensor, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.calls import align, argument, handled_by, input_first, keep_full, on_locals
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    ShardedTensor,
    global_shape,
    locals_only,
    sharded_tensors,
    specs_of,
    to_local,
    wrap_locals,
)


def _size(call: Call) -> Any:
    shape, dim = global_shape(call.args[0]), argument(call, 1, "dim")
    return torch.Size(shape) if dim is None else shape[dim]


def _strides(call: Call) -> Any:
    """Strides of a contiguous full tensor whose dims have the order of the shard's in memory."""
    tensor, dim = call.args[0], argument(call, 1, "dim")
    with locals_only():
        order = sorted(range(tensor.dim()), key=lambda axis: (tensor.stride(axis), -axis))
    shape, strides, step = global_shape(tensor), [0] * len(order), 1
    for axis in order:
        strides[axis], step = step, step * max(shape[axis], 1)
    return tuple(strides) if dim is None else strides[dim]


def _count(call: Call) -> int:
    return prod(global_shape(call.args[0]))


def _text(call: Call) -> str:
    tensor = call.args[0]
    specs = ", ".join(
        f"dim {spec.dim}: {' and '.join(f'{start}..{stop}' for start, stop in spec.pieces)} of {spec.extent}"
        for spec in specs_of(tensor)
    )
    with locals_only():
        return f"ShardedTensor({global_shape(tensor)}, {specs}, shard={tensor.detach()!r})"


_SAME = """
dtype device layout requires_grad grad_fn output_nr retains_grad names itemsize dim ndim ndimension get_device
element_size data_ptr storage_offset untyped_storage
_version _base __hash__ retain_grad has_names result_type can_cast promote_types _is_view
_has_compatible_shallow_copy_type register_post_accumulate_grad_hook volatile _backward_hooks is_tensor
"""
_READS_ITEMS = ("is_nonzero", "is_same_size", "is_set_to")
"""Functions named like metadata that look at items, or at two tensors."""

METADATA: Mapping[str, Handler] = {
    **handled_by(on_locals, _SAME),
    **handled_by(
        on_locals, " ".join(name for name in dir(Tensor) if name.startswith("is_") and name not in _READS_ITEMS)
    ),
    **handled_by(lambda call: on_locals(input_first(call)), "new_zeros new_ones new_empty new_full new_tensor"),
    **handled_by(_size, "size shape"),
    **handled_by(_count, "numel nelement"),
    "stride": _strides,
    "__len__": lambda call: global_shape(call.args[0])[0],
    "nbytes": lambda call: _count(call) * call.args[0].element_size(),
    "__repr__": _text,
}


def _gradient(call: Call) -> Any:
    """Read or write ``x.grad``, or call ``torch.autograd.grad``."""
    if call.function is torch.autograd.grad:
        return _gradients(call)
    tensor = call.args[0]
    with locals_only():
        if len(call.args) > 1:
            tensor.grad = call.args[1]
            return None
        # an alias, as autograd adds to the gradient in place
        return None if tensor.grad is None else wrap_locals(tensor.grad.view_as(tensor.grad), tensor.specs, call.rules)


def _hook(call: Call) -> Any:
    """``register_hook``: call the hook with a sharded gradient."""
    tensor, hook = call.args[0], argument(call, 1, "hook")
    specs, rules = tensor.specs, tensor.rules

    def run(gradient: Tensor) -> Any:
        with locals_only():
            alias = wrap_locals(gradient.view_as(gradient), specs, rules)
        result = hook(alias)
        return to_local(result) if isinstance(result, Tensor) else result

    with locals_only():
        return call.function(tensor, run)


def _backward(call: Call) -> Any:
    """``torch.autograd.backward`` and ``x.backward``: gradients may be sharded or full, or shards from autograd."""
    _refuse_create_graph(call, 3)
    names = ("tensor", "gradient") if call.function is Tensor.backward else ("tensors", "grad_tensors")
    tensors, gradients = (argument(call, position, name) for position, name in enumerate(names))
    with locals_only():
        start, keep = _local_starts(tensors, gradients), argument(call, 2, "retain_graph")
        torch.autograd.backward(tensors, start, retain_graph=keep, inputs=call.kwargs.get("inputs"))


def _gradients(call: Call) -> Any:
    """``torch.autograd.grad``: sharded gradients of sharded inputs; of full inputs, a part on each rank."""
    _refuse_create_graph(call, 4)
    names = ("outputs", "inputs", "grad_outputs")
    outputs, inputs, start = (argument(call, position, name) for position, name in enumerate(names))
    options = {name: value for name, value in call.kwargs.items() if name not in names}
    with locals_only():
        results = torch.autograd.grad(outputs, inputs, _local_starts(outputs, start), *call.args[3:], **options)
        pairs = zip(results, _sequence(inputs), strict=True)
        return tuple(wrap_locals(gradient, specs_of(tensor), call.rules) for gradient, tensor in pairs)


def _refuse_create_graph(call: Call, position: int) -> None:
    if argument(call, position, "create_graph"):
        remedy = keep_full(next(sharded_tensors((call.args, call.kwargs))))
        raise InputError(f"create_graph of {call.name}", True, f"Gradients of split pictures have none: {remedy}")


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _local_starts(tensors: Any, gradients: Any) -> Any:
    """Shard the gradients that a backward pass starts from."""

    def local(tensor: Tensor, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or (not isinstance(gradient, ShardedTensor) and gradient.shape == tensor.shape):
            return gradient
        return align(gradient, specs_of(tensor), tensor.dim())

    return None if gradients is None else tuple(map(local, _sequence(tensors), _sequence(gradients)))


GRADIENTS: Mapping[str, Handler] = {"grad": _gradient, "register_hook": _hook, "backward": _backward}
