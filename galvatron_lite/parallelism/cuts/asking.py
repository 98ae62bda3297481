"""What code asks of a tensor, answered as the whole one would. No communication."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.parallelism.cuts.calls import argument, fronted, handled_by
from galvatron_lite.parallelism.cuts.tensor import Call, Handler, cuts_of, shares_only, whole_shape


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
    cuts = ", ".join(
        f"dim {cut.dim}: {' and '.join(f'{start}..{stop}' for start, stop in cut.pieces)} of {cut.extent}"
        for cut in cuts_of(tensor)
    )
    with shares_only():
        return f"CutTensor({tuple(whole_shape(tensor))}, {cuts}, share={tensor.detach()!r})"


def _new(call: Call) -> Any:
    """``new_zeros`` and its kind: of the size that is asked for, not cut."""
    return _of_share(fronted(call))


_SAME = """
dtype device layout requires_grad grad_fn output_nr retains_grad names itemsize dim ndim ndimension get_device
element_size data_ptr storage_offset untyped_storage
_version _base __hash__ retain_grad has_names result_type can_cast promote_types _is_view
_has_compatible_shallow_copy_type register_post_accumulate_grad_hook volatile _backward_hooks is_tensor
"""

_OF_ITEMS = ("is_nonzero", "is_same_size", "is_set_to")
"""What sounds like a question about a tensor, but is one about its items or about two."""

HANDLERS: Mapping[str, Handler] = {
    **handled_by(_of_share, _SAME),
    **handled_by(_of_share, " ".join(one for one in dir(Tensor) if one.startswith("is_") and one not in _OF_ITEMS)),
    **handled_by(_new, "new_zeros new_ones new_empty new_full new_tensor"),
    **handled_by(_size, "size shape"),
    **handled_by(_count, "numel nelement"),
    "stride": _strides,
    "__len__": lambda call: whole_shape(call.args[0])[0],
    "nbytes": lambda call: _count(call) * call.args[0].element_size(),
    "__repr__": _text,
}
