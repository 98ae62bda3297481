"""What code asks of a tensor, answered as the whole one would. No communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cuts.calls import argument, fronted, handled_by
from galvatron_lite.parallelism.cuts.fallback import keep_whole
from galvatron_lite.parallelism.cuts.tensor import (
    Call,
    CutTensor,
    Handler,
    cut_like,
    cut_tensors,
    cuts_of,
    shares_only,
    whole_shape,
)


def _of_share(call: Call) -> Any:
    """What is the same for a share and the whole: dtype, device, how it was made."""
    with shares_only():
        return call.function(*call.args, **call.kwargs)


def _size(call: Call) -> Any:
    shape, dim = whole_shape(call.args[0]), argument(call, 1, "dim")
    return torch.Size(shape) if dim is None else shape[dim]


def _strides(call: Call) -> Any:
    """Of a whole tensor whose dims lie in memory in the order of the share's."""
    tensor, dim = call.args[0], argument(call, 1, "dim")
    with shares_only():
        order = sorted(range(tensor.dim()), key=lambda one: (tensor.stride(one), -one))
    shape, strides, step = whole_shape(tensor), [0] * len(order), 1
    for one in order:
        strides[one], step = step, step * max(shape[one], 1)
    return tuple(strides) if dim is None else strides[dim]


def _count(call: Call) -> int:
    return prod(whole_shape(call.args[0]))


def _text(call: Call) -> str:
    tensor = call.args[0]
    cuts = ", ".join(f"dim {one.dim}: {one.start}..{one.start + one.length} of {one.extent}" for one in cuts_of(tensor))
    with shares_only():
        return f"CutTensor({tuple(whole_shape(tensor))}, {cuts}, share={tensor.detach()!r})"


def _gradient(call: Call) -> Any:
    """``grad``: read as a cut tensor, written as one or as None."""
    tensor = call.args[0]
    if call.function is torch.autograd.grad:
        cuts = next(cut_tensors((call.args, call.kwargs))).cuts
        raise InputError(
            "torch.autograd.grad", "of a split picture", f"Call backward() on a loss instead, or {keep_whole(cuts)}"
        )
    with shares_only():
        if len(call.args) > 1:
            tensor.grad = call.args[1]
            return None
        # an alias: autograd adds to the gradient itself
        return None if tensor.grad is None else cut_like(tensor.grad.view_as(tensor.grad), tensor.cuts, call.rules)


def _hook(call: Call) -> Any:
    """The hook is called with the gradient as a cut tensor, too."""
    tensor, hook = call.args[0], argument(call, 1, "hook")
    with shares_only():
        return call.function(tensor, _on_shares(hook, tensor))


def _on_shares(hook: Callable[[Tensor], Any], tensor: CutTensor) -> Callable[[Tensor], Any]:
    cuts, rules = tensor.cuts, tensor.rules

    def run(gradient: Tensor) -> Any:
        with shares_only():
            alias = cut_like(gradient.view_as(gradient), cuts, rules)
        result = hook(alias)
        with shares_only():
            return result.as_subclass(Tensor) if isinstance(result, CutTensor) else result

    return run


def _new(call: Call) -> Any:
    """``new_zeros`` and its kind: of the size that is asked for, not cut."""
    return _of_share(fronted(call))


_SAME = """
dtype device layout requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_xpu is_mps
is_nested output_nr retains_grad names itemsize dim ndim ndimension is_floating_point is_complex is_signed is_contiguous
is_pinned is_inference is_conj is_neg is_same_size get_device element_size data_ptr storage_offset untyped_storage
_version __hash__ retain_grad has_names is_set_to result_type can_cast promote_types is_shared __get_device__ _is_view
_has_compatible_shallow_copy_type register_post_accumulate_grad_hook volatile _backward_hooks is_tensor is_nonzero_
"""

HANDLERS: Mapping[str, Handler] = {
    **handled_by(_of_share, _SAME),
    **handled_by(_new, "new_zeros new_ones new_empty new_full new_tensor"),
    **handled_by(_size, "size shape"),
    **handled_by(_count, "numel nelement"),
    "stride": _strides,
    "__len__": lambda call: whole_shape(call.args[0])[0],
    "nbytes": lambda call: _count(call) * call.args[0].element_size(),
    "__repr__": _text,
    "grad": _gradient,
    "register_hook": _hook,
}
