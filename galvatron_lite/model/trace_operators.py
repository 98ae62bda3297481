"""Operators below autograd: what bounds them, their FLOPs, the sizes that describe them, the bytes they move."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from galvatron_lite.model.fused_kernels import attention, attention_backward, grouped, grouped_weight  # noqa: F401  registers the operators  # noqa: F401  registers the operators
from galvatron_lite.model.graph import OperatorClass

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_mm", "_grouped_mm"}
_CONVOLUTIONS = {"convolution", "_convolution", "convolution_backward"}
_ATTENTIONS = {"attention", "attention_backward"}
_GROUPED = {"grouped", "grouped_weight"}
_LOOKUPS = {"embedding", "index_select", "gather", "index", "nll_loss_forward"}
_FIRST = {"addmm": 1, "baddbmm": 1, "addbmm": 1}


def name_of(func: Any) -> str:
    """The bare name of an operator overload (``addmm``)."""
    return str(func.overloadpacket.__name__)


def classify(func: Any) -> OperatorClass:
    """What bounds an operator: the matrix units for the three heavy classes, memory for everything else."""
    name = name_of(func)
    if func.namespace == "galvatron_lite" and name in _ATTENTIONS:
        return OperatorClass.ATTENTION
    if name in _MATMULS or (func.namespace == "galvatron_lite" and name in _GROUPED):
        return OperatorClass.MATMUL
    return OperatorClass.CONVOLUTION if name in _CONVOLUTIONS else OperatorClass.MEMORY


def flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> int:
    """FLOPs of one call by PyTorch's own formulas (``torch.utils.flop_counter``); 0 for memory-bound operators.

    Attention counts every query against every key, causal or not, as those formulas do. Theirs for the gradients of a
    convolution (torch 2.11 to 2.13) forgets its groups; either gradient takes what forward does.
    """
    name = name_of(func)
    if func.namespace == "galvatron_lite":
        return 2 * prod(_rows(args)) if name in _GROUPED else _attention_flops(name, args)
    if name == "_grouped_mm":
        return int(2 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1])
    if name == "convolution_backward":
        made, taken, weight, transposed, wanted = (args[place] for place in (0, 1, 2, 7, 10))
        pixels = prod((taken if transposed else made).shape[2:])
        return int(2 * taken.shape[0] * pixels * weight.numel() * sum(wanted[:2]))
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


def _attention_flops(name: str, args: Sequence[Any]) -> int:
    query, key, value = args[:3] if name == "attention" else args[1:4]
    heads = query.shape[-3]
    shapes = [_flat(t, heads) for t in (query, key, value)]
    if name == "attention":
        return int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
    made = (*shapes[0][:-1], shapes[2][-1])
    return int(sdpa_backward_flop_count(made, *shapes))  # type: ignore[no-untyped-call]


def _flat(tensor: Tensor, heads: int) -> tuple[int, ...]:
    """(samples, heads, rows, columns), with key-value heads shared by queries counted once for each query head."""
    return (prod(tensor.shape[:-3]), heads, *tensor.shape[-2:])


def _rows(args: Sequence[Any]) -> tuple[int, int, int]:
    """Rows, inner and columns of a grouped matmul, its rows those of all experts."""
    rows, other = args[:2]
    return (rows.shape[0], rows.shape[1], other.shape[-1])


def groups(func: Any, args: Sequence[Any]) -> int:
    """Matmuls that one call runs side by side: one an expert of a mixture; else 1."""
    weights = {"grouped": 1, "grouped_weight": 3}
    name = name_of(func)
    return args[weights[name]].shape[0] if func.namespace == "galvatron_lite" and name in weights else 1


def is_causal(func: Any, args: Sequence[Any]) -> bool:
    """Whether the call is attention in which a query sees no later key."""
    return classify(func) is OperatorClass.ATTENTION and name_of(func) == "attention" and bool(args[4])


def extents(func: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Sizes of one call: matmul (rows, inner, columns); attention (samples, query heads, key-value heads, queries,
    keys, head size); convolution (input channels, output channels, groups) and its sides; else (items,), of what passes
    a window over a picture with channels and sides. Sides: see ``Operator.shape``.
    """
    kind, name = classify(func), name_of(func)
    if kind is OperatorClass.MATMUL and name in _GROUPED:
        rows, inner, columns = _rows(args)
        return (max(1, rows // groups(func, args)), inner, columns)
    if kind is OperatorClass.MATMUL:
        first, second = args[_FIRST.get(name, 0) :][:2]
        return (prod(first.shape[:-1]), first.shape[-1], second.shape[-1])
    if kind is OperatorClass.ATTENTION and name == "attention":
        query, key = args[:2]
        heads = (query.shape[-3], key.shape[-3], query.shape[-2], key.shape[-2], query.shape[-1])
        return (prod(query.shape[:-3]), *heads)
    if kind is OperatorClass.CONVOLUTION and name != "convolution_backward":
        return convolution_shape(args)
    items = max((tensor.numel() for tensor in outputs), default=0)
    return (items, *window_of(name, args))


def moved(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Bytes one call reads and writes: its inputs and outputs once each; a lookup reads only what it gives."""
    name = name_of(func)
    read = sum(_traffic(tensor) for tensor in inputs)
    written = sum(_traffic(tensor) for tensor in outputs)
    if name == "embedding_dense_backward":
        return 2 * read
    if name in _LOOKUPS:
        return 2 * written + sum(_traffic(tensor) for tensor in inputs if tensor.dtype is torch.int64)
    return read + written


def _traffic(tensor: Tensor) -> int:
    """Bytes of a tensor, those repeated by a stride of zero once."""
    repeated = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride == 0)
    return tensor.numel() * tensor.element_size() // max(repeated, 1)


_POOLS = {
    "max_pool2d_with_indices": 2, "avg_pool2d": 2, "max_pool3d_with_indices": 3, "avg_pool3d": 3,
}  # fmt: skip
"""Pooling windows, and over how many sides they pass."""
_ADAPTIVE = {
    "_adaptive_avg_pool2d": 2, "adaptive_max_pool2d": 2, "_adaptive_avg_pool3d": 3, "adaptive_max_pool3d": 3,
}  # fmt: skip
_COPIES = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
"""Interpolations that read one pixel for each of theirs."""
_BLENDS = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
"""Those that read the two nearest along each side."""
_PADDED, _DILATED = 3, 4
"""Places of padding and dilation among the arguments of a pooling operator."""
_LINES = 3
"""Of a batch of lines."""


def convolution_shape(args: Sequence[Any]) -> tuple[int, ...]:
    """Channels, groups and sides of ``aten.convolution``'s arguments; strides below 0 where it is transposed."""
    taken, weight, stride, padding, dilation, transposed, groups = (args[place] for place in (0, 1, 3, 4, 5, 6, 8))
    sides = taken.dim() - 2
    steps = [-step if transposed else step for step in _each(stride, sides)]
    around = (*_each(padding, sides), *_each(dilation, sides))
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return (taken.shape[1], channels, groups, *taken.shape[2:], *weight.shape[2:], *steps, *around)


def window_of(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    """Channels and sides of what passes a window over a picture; empty: nothing such.

    An adaptive pooling's window is that of the pooling with equal outputs and no padding. Interpolation to f times the
    size is a transposed convolution: of kernel f where it copies, of kernel 2 f - f % 2 and padding f // 2 where it
    blends (Long et al. 2015, arXiv:1411.4038, section 3.3).
    """
    if name in _POOLS:
        return _pooled(name, args)
    if name in _ADAPTIVE:
        return _adapted(args[0].shape[-_ADAPTIVE[name] - 1 :], _each(args[1], _ADAPTIVE[name]))
    if name in _COPIES or name in _BLENDS:
        return _enlarged(args[0].shape[1:], args[1], blends=name in _BLENDS)
    return ()


def _pooled(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    sides = _POOLS[name]
    whole = args[0].shape[-sides - 1 :]
    padding = args[_PADDED] if len(args) > _PADDED else (0,)
    dilation = args[_DILATED] if len(args) > _DILATED and name.startswith("max") else (1,)
    kernel = _each(args[1], sides)
    stride = _each(args[2], sides) if len(args) > 2 and args[2] else kernel
    return (*whole, *kernel, *stride, *_each(padding, sides), *_each(dilation, sides))


def _adapted(whole: Sequence[int], left: Sequence[int]) -> tuple[int, ...]:
    stride = [max(extent // output, 1) for extent, output in zip(whole[1:], left, strict=True)]
    kernel = [
        max(extent - (output - 1) * step, 1) for extent, output, step in zip(whole[1:], left, stride, strict=True)
    ]
    return (*whole, *kernel, *stride, *(0 for _ in left), *(1 for _ in left))


def _enlarged(whole: Sequence[int], after: Sequence[int], *, blends: bool) -> tuple[int, ...]:
    """Where a side is not enlarged by a whole number, a window that reads one pixel on either end."""
    rows = [_enlarging(extent, output, blends) for extent, output in zip(whole[1:], after, strict=True)]
    return (*whole, *(figure for place in range(3) for figure in (row[place] for row in rows)), *(1 for _ in rows))


def _enlarging(extent: int, output: int, blends: bool) -> tuple[int, int, int]:
    """Kernel, stride and padding of interpolation along one side."""
    times, rest = divmod(output, extent)
    if rest or not times:
        return 3, 1, 1
    return (2 * times - times % 2, -times, times // 2) if blends else (times, -times, 0)


def _each(figures: Sequence[int] | int, sides: int) -> tuple[int, ...]:
    """A figure for each side; one may stand for all."""
    told = (figures,) if isinstance(figures, int) else tuple(figures)
    return told * sides if len(told) == 1 else told


def statistics_of(name: str, args: Sequence[Any]) -> int:
    """Items that are summed over all pixels of a picture before the call's result is known.

    Sum and square sum of every channel (batch normalisation) or group of channels of a sample (group normalisation),
    and one sum a channel of a sample where the mean of all pixels is taken.
    """
    if name.endswith("backward"):
        return 0
    if "batch_norm" in name:
        return 2 * int(args[0].shape[1])
    if name == "native_group_norm":
        return 2 * int(args[6])
    dims = args[0].dim() if name == "mean" and len(args) > 1 else 0
    if dims > _LINES and args[1] is not None and sorted(dim % dims for dim in args[1]) == [*range(2, dims)]:
        return int(args[0].shape[1])
    return 0
