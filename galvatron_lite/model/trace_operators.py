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
from galvatron_lite.model.trace_experts import grouped, grouped_weight  # noqa: F401  registers the operators
from galvatron_lite.model.trace_pictures import convolution_shape, window_of

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
