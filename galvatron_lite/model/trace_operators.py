"""Operators below autograd: what bounds them, their FLOPs, the sizes that describe them, the bytes they move."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from galvatron_lite.model.graph import OperatorClass
from galvatron_lite.model.trace_attention import attention, attention_backward  # noqa: F401  registers the operators

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_mm", "_grouped_mm"}
_CONVOLUTIONS = {"convolution", "_convolution", "convolution_backward"}
_ATTENTIONS = {"attention", "attention_backward"}
_LOOKUPS = {"embedding", "index_select", "gather", "index", "nll_loss_forward"}
_POOLS = {"max_pool2d_with_indices", "avg_pool2d", "max_pool3d_with_indices", "avg_pool3d"}
_FIRST = {"addmm": 1, "baddbmm": 1, "addbmm": 1}


def name_of(func: Any) -> str:
    """The bare name of an operator overload (``addmm``)."""
    return str(func.overloadpacket.__name__)


def classify(func: Any) -> OperatorClass:
    """What bounds an operator: the matrix units for the three heavy classes, memory for everything else."""
    name = name_of(func)
    if func.namespace == "galvatron_lite" and name in _ATTENTIONS:
        return OperatorClass.ATTENTION
    if name in _MATMULS:
        return OperatorClass.MATMUL
    return OperatorClass.CONVOLUTION if name in _CONVOLUTIONS else OperatorClass.MEMORY


def flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> int:
    """FLOPs of one call by PyTorch's own formulas (``torch.utils.flop_counter``); 0 for memory-bound operators.

    Attention counts every query against every key, causal or not, as those formulas do. Theirs for the gradients of a
    convolution (torch 2.11 to 2.13) forgets its groups; either gradient takes what forward does.
    """
    name = name_of(func)
    if func.namespace == "galvatron_lite":
        return _attention_flops(name, args)
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
    return int(sdpa_backward_flop_count(shapes[0], *shapes))  # type: ignore[no-untyped-call]


def _flat(tensor: Tensor, heads: int) -> tuple[int, ...]:
    """(samples, heads, rows, columns), with key-value heads shared by queries counted once for each query head."""
    return (prod(tensor.shape[:-3]), heads, *tensor.shape[-2:])


def is_causal(func: Any, args: Sequence[Any]) -> bool:
    """Whether the call is attention in which a query sees no later key."""
    return classify(func) is OperatorClass.ATTENTION and name_of(func) == "attention" and bool(args[4])


def extents(func: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Sizes of one call: matmul (rows, inner, columns); attention (samples, query heads, key-value heads, queries,
    keys, head size); convolution (input channels, output channels, groups) and its sides; else (items,), of batch
    normalisation with its channels, of a pooling window with channels and sides. Sides: see ``Operator.shape``.
    """
    kind, name = classify(func), name_of(func)
    if kind is OperatorClass.MATMUL:
        first, second = args[_FIRST.get(name, 0) :][:2]
        return (prod(first.shape[:-1]), first.shape[-1], second.shape[-1])
    if kind is OperatorClass.ATTENTION and name == "attention":
        query, key = args[:2]
        heads = (query.shape[-3], key.shape[-3], query.shape[-2], key.shape[-2], query.shape[-1])
        return (prod(query.shape[:-3]), *heads)
    if kind is OperatorClass.CONVOLUTION and name != "convolution_backward":
        return _convolved(args)
    items = max((tensor.numel() for tensor in outputs), default=0)
    if "batch_norm" in name and not name.endswith("backward"):
        return (items, args[0].shape[1])
    return (items, *_pooled(name, args)) if name in _POOLS else (items,)


def _convolved(args: Sequence[Any]) -> tuple[int, ...]:
    """Channels, groups and sides of ``aten.convolution``'s arguments; strides below 0 where it is transposed."""
    taken, weight, stride, padding, dilation, transposed, groups = (args[place] for place in (0, 1, 3, 4, 5, 6, 8))
    sides = taken.dim() - 2
    steps = [-step if transposed else step for step in _each(stride, sides)]
    around = (*_each(padding, sides), *_each(dilation, sides))
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return (taken.shape[1], channels, groups, *taken.shape[2:], *weight.shape[2:], *steps, *around)


def _pooled(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    """Channels and sides of a pooling operator's arguments."""
    sides = int(name.partition("pool")[2][0])
    whole = args[0].shape[-sides - 1 :]
    padding = args[3] if len(args) > _PADDED else (0,)
    dilation = args[4] if len(args) > _DILATED and name.startswith("max") else (1,)
    kernel = _each(args[1], sides)
    stride = _each(args[2], sides) if len(args) > 2 and args[2] else kernel
    return (*whole, *kernel, *stride, *_each(padding, sides), *_each(dilation, sides))


_PADDED, _DILATED = 3, 4
"""Places of padding and dilation among the arguments of a pooling operator."""


def _each(figures: Sequence[int] | int, sides: int) -> tuple[int, ...]:
    """A figure for each side; one may stand for all."""
    told = (figures,) if isinstance(figures, int) else tuple(figures)
    return told * sides if len(told) == 1 else told


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
