"""Operators of torch as the planner sees them: classes, FLOPs, shapes; and fused kernels for tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.model.graph import OperatorClass

_ATTENTION = F.scaled_dot_product_attention

LIBRARY = torch.library.Library("galvatron_lite", "DEF")  # type: ignore[no-untyped-call]
"""Fused operators as accelerators have them, implemented for the meta device only."""


def _operator(schema: str, shapes: Callable[..., Any]) -> Any:
    """Define an operator by its results on the meta device."""
    name = LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, shapes, "Meta")  # type: ignore[no-untyped-call]
    return getattr(torch.ops.galvatron_lite, name)


def _differentiable(name: str, backward: Callable[..., Any], keep: Callable[..., None]) -> None:
    torch.library.register_autograd(f"galvatron_lite::{name}", backward, setup_context=keep, lib=LIBRARY)


def _attention_shapes(
    query: Tensor, _key: Tensor, value: Tensor, _mask: Tensor | None, _causal: bool
) -> tuple[Tensor, Tensor]:
    """Output (..., heads, queries, value size) and logarithms (..., heads, queries) in float32."""
    return attention_output(query, value), query.new_empty(query.shape[:-1], dtype=torch.float32)


def attention_output(query: Tensor, value: Tensor) -> Tensor:
    """An empty output of attention; fused kernels lay it out as the query, so that joining heads may copy it."""
    order = sorted(range(query.dim()), key=query.stride, reverse=True)
    shape = (*query.shape[:-1], value.shape[-1])
    return torch.empty_permuted(shape, order, dtype=query.dtype, device=query.device)


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.mark_non_differentiable(output[1])


def _attention_backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    return *attention_backward(gradient, *ctx.saved_tensors), None, None


attention = _operator(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal) -> (Tensor, Tensor)",
    _attention_shapes,
)
attention_backward = _operator(
    "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor output, "
    "Tensor logs) -> (Tensor, Tensor, Tensor)",
    lambda _, query, key, value, *__: tuple(map(torch.empty_like, (query, key, value))),
)
_differentiable("attention", _attention_backward, _keep_attention)


def _keep_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    rows, weight, ends = inputs
    ctx.needs = rows.requires_grad, weight.requires_grad
    ctx.save_for_backward(rows if weight.requires_grad else None, weight, ends)


def _grouped_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    to_rows = grouped(gradient, weight.transpose(-2, -1), ends) if ctx.needs[0] else None
    return to_rows, grouped_weight(rows, gradient, ends, weight) if ctx.needs[1] else None, None


# (rows, inner) by (experts, inner, columns): (rows, columns); and the gradient of the weight
grouped = _operator(
    "grouped(Tensor rows, Tensor weight, Tensor ends) -> Tensor",
    lambda rows, weight, _: rows.new_empty(rows.shape[0], weight.shape[-1]),
)
grouped_weight = _operator(
    "grouped_weight(Tensor rows, Tensor gradient, Tensor ends, Tensor weight) -> Tensor",
    lambda _, __, ___, weight: torch.empty_like(weight),
)
_differentiable("grouped", _grouped_backward, _keep_grouped)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.mark_non_differentiable(output[1])


def _norm_backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None]:
    to_value, to_weight = rms_norm_backward(gradient, *ctx.saved_tensors)
    return to_value, to_weight if ctx.needs_input_grad[1] else None, None


# output, and reciprocal roots (rows) in float32; gradients of the input and of the weight (empty without one)
rms_norm = _operator(
    "rms_norm(Tensor value, Tensor? weight, int rows) -> (Tensor, Tensor)",
    lambda value, _, rows: (torch.empty_like(value), value.new_empty(rows, dtype=torch.float32)),
)
rms_norm_backward = _operator(
    "rms_norm_backward(Tensor gradient, Tensor value, Tensor? weight, Tensor roots) -> (Tensor, Tensor)",
    lambda _, value, weight, __: (
        torch.empty_like(value), value.new_empty(0) if weight is None else torch.empty_like(weight)
    ),
)  # fmt: skip
_differentiable("rms_norm", _norm_backward, _keep_norm)


_LOSSES = frozenset({
    F.binary_cross_entropy_with_logits, F.cross_entropy, F.huber_loss, F.kl_div, F.l1_loss, F.mse_loss, F.nll_loss,
    F.smooth_l1_loss,
})  # fmt: skip
"""Functions that autocast runs in float32 on all devices (``AT_FORALL_FP32`` in ATen's autocast_mode.h)."""


class ShapesOnly(TorchFunctionMode):
    """Replaces ``scaled_dot_product_attention``, ``rms_norm`` and ``grouped_mm`` on meta tensors by the fused operators
    above, and ``ctc_loss``, which torch lacks for meta tensors, by a sum. Losses compute in float32, as under autocast,
    which torch lacks for meta tensors, too.

    A mode does not see calls inside a function that it handles, so inside ``multi_head_attention_forward``
    (``nn.MultiheadAttention``) attention is replaced by name.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace these calls and run all others; constants of the user (weights of a loss) move to the meta device."""
        kwargs = kwargs or {}
        if len({tensor.is_meta for tensor in tensors_of((args, kwargs))}) > 1:
            args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to("meta"))
        if func in _LOSSES:
            args, kwargs = map_tensors((args, kwargs), lambda one: one.float() if one.is_floating_point() else one)
        if func is F.scaled_dot_product_attention:
            return _fused(*args, **kwargs)
        if func is F.rms_norm:
            return _normed(func, *args, **kwargs)
        if func is F.ctc_loss or func is torch.ctc_loss:
            return _sums_of_paths(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            F.scaled_dot_product_attention = _fused  # type: ignore[assignment]
            try:
                return func(*args, **kwargs)
            finally:
                F.scaled_dot_product_attention = _ATTENTION
        # what torch.nn.functional.grouped_mm calls; modes are not asked about that function itself
        if getattr(func, "__name__", "") == "_grouped_mm":
            return _shaped(func, *args, **kwargs)
        return func(*args, **kwargs)


def _sums_of_paths(log_probs: Tensor, *others: Any, **options: Any) -> Tensor:
    """A value of the shape of ``ctc_loss`` that depends on all inputs."""
    each = log_probs.sum((0, -1))
    reduction = options.get("reduction", others[4] if len(others) > 4 else "mean")
    return each if reduction in ("none", 0) else each.mean()


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001  fused kernels draw the same numbers again in backward
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    if query.dim() == 3:
        lifted = _fused(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), is_causal=is_causal)
        return lifted.squeeze(1)
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # kernels add numbers, and each call keeps its copy
        attn_mask = attn_mask.to(query.dtype)
    output: Tensor = attention(query, key, value, attn_mask, is_causal)[0]
    return output


def _normed(
    func: Any, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None  # noqa: A002
) -> Tensor:  # fmt: skip
    """RMSNorm; step by step if input and weight have different precisions."""
    if not input.is_meta or (weight is not None and weight.dtype != input.dtype):
        plain: Tensor = func(input, normalized_shape, weight, eps)
        return plain
    normed: Tensor = rms_norm(input, weight, input.numel() // prod(normalized_shape))[0]
    return normed


def _shaped(func: Any, mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, **options: Any) -> Tensor:
    if offs is None or not mat_a.is_meta or mat_a.dim() != 2 or mat_b.dim() != 3:
        plain: Tensor = func(mat_a, mat_b, offs=offs, **options)
        return plain
    output: Tensor = grouped(mat_a, mat_b, offs)
    return output


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

    Attention counts all pairs of queries and keys, causal or not, as those formulas do. The formula for the gradients
    of a convolution (torch 2.11 to 2.13) ignores groups, so here each gradient takes as many FLOPs as forward.
    """
    name = name_of(func)
    if func.namespace == "galvatron_lite":
        if name in _ATTENTIONS:
            return _attention_flops(name, args)
        return 2 * prod(_rows(args)) if name in _GROUPED else 0
    if name == "_grouped_mm":
        return int(2 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1])
    if name == "convolution_backward":
        gradient, taken, weight, transposed, wanted = (args[place] for place in (0, 1, 2, 7, 10))
        pixels = prod((taken if transposed else gradient).shape[2:])
        return int(2 * taken.shape[0] * pixels * weight.numel() * sum(wanted[:2]))
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


def _attention_flops(name: str, args: Sequence[Any]) -> int:
    query, key, value = args[:3] if name == "attention" else args[1:4]
    heads = query.shape[-3]
    # (samples, heads, rows, columns), with key-value heads shared by queries counted once for each query head
    shapes = [(prod(one.shape[:-3]), heads, *one.shape[-2:]) for one in (query, key, value)]
    if name == "attention":
        return int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
    output = (*shapes[0][:-1], shapes[2][-1])
    return int(sdpa_backward_flop_count(output, *shapes))  # type: ignore[no-untyped-call]


def _rows(args: Sequence[Any]) -> tuple[int, int, int]:
    """Rows, inner and columns of a grouped matmul, its rows those of all experts."""
    rows, other = args[:2]
    return (rows.shape[0], rows.shape[1], other.shape[-1])


def groups(func: Any, args: Sequence[Any]) -> int:
    """Number of matmuls in one call: one per expert of a mixture; else 1."""
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
    """Bytes that one call reads and writes: inputs and outputs once each; a lookup reads only the rows it returns."""
    name = name_of(func)
    read = sum(_traffic(tensor) for tensor in inputs)
    written = sum(_traffic(tensor) for tensor in outputs)
    if name == "embedding_dense_backward":
        return 2 * read
    if name in _LOOKUPS:
        return 2 * written + sum(_traffic(tensor) for tensor in inputs if tensor.dtype is torch.int64)
    return read + written


def _traffic(tensor: Tensor) -> int:
    """Bytes of a tensor; items repeated by a stride of zero count once."""
    repeated = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride == 0)
    return tensor.numel() * tensor.element_size() // max(repeated, 1)


_POOLS = {"max_pool2d_with_indices": 2, "avg_pool2d": 2, "max_pool3d_with_indices": 3, "avg_pool3d": 3}
"""Pooling windows, and over how many sides they pass."""
_ADAPTIVE = {
    "_adaptive_avg_pool2d": 2, "adaptive_max_pool2d": 2, "_adaptive_avg_pool3d": 3, "adaptive_max_pool3d": 3,
}  # fmt: skip
_COPIES = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
"""Interpolations that read one input pixel for each output pixel."""
_BLENDS = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
"""Interpolations that read the two nearest pixels along each side."""
_LINES = 3  # dims of a batch of lines


def convolution_shape(args: Sequence[Any]) -> tuple[int, ...]:
    """Channels, groups and sides of ``aten.convolution``'s arguments; strides are negative if it is transposed."""
    taken, weight, stride, padding, dilation, transposed, groups = (args[place] for place in (0, 1, 3, 4, 5, 6, 8))
    sides = taken.dim() - 2
    steps = [-step if transposed else step for step in _each(stride, sides)]
    around = (*_each(padding, sides), *_each(dilation, sides))
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return (taken.shape[1], channels, groups, *taken.shape[2:], *weight.shape[2:], *steps, *around)


def window_of(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    """Channels and sides of a window that passes over a picture; empty for other operators.

    An adaptive pooling's window is that of the pooling with equal outputs and no padding. Interpolation to f times the
    size is a transposed convolution: of kernel f where it copies, of kernel 2 f - f % 2 and padding f // 2 where it
    blends (Long et al. 2015, arXiv:1411.4038, section 3.3); where a side is not enlarged by a whole number, a window
    that reads one pixel on either end.
    """
    if name in _POOLS:
        sides = _POOLS[name]
        stride, padding, dilation = (args[place] if len(args) > place else () for place in (2, 3, 4))
        dilation = dilation if name.startswith("max") else ()
        figures = (args[1], stride or args[1], padding or 0, dilation or 1)
        return (*args[0].shape[-sides - 1 :], *(side for figure in figures for side in _each(figure, sides)))
    if name in _ADAPTIVE:
        picture = args[0].shape[-_ADAPTIVE[name] - 1 :]
        windows = [_adapted(*side) for side in zip(picture[1:], _each(args[1], _ADAPTIVE[name]), strict=True)]
    elif name in _COPIES or name in _BLENDS:
        picture = args[0].shape[1:]
        windows = [_enlarged(*side, name in _BLENDS) for side in zip(picture[1:], args[1], strict=True)]
    else:
        return ()
    return (*picture, *(figure for figures in zip(*windows, strict=True) for figure in figures), *(1 for _ in windows))


def _adapted(extent: int, output: int) -> tuple[int, int, int]:
    """Kernel, stride and padding of adaptive pooling along one side."""
    stride = max(extent // output, 1)
    return max(extent - (output - 1) * stride, 1), stride, 0


def _enlarged(extent: int, output: int, blends: bool) -> tuple[int, int, int]:
    """Kernel, stride and padding of interpolation along one side."""
    times, rest = divmod(output, extent)
    if rest or not times:
        return 3, 1, 1
    return (2 * times - times % 2, -times, times // 2) if blends else (times, -times, 0)


def _each(figures: Sequence[int] | int, sides: int) -> tuple[int, ...]:
    """A number for each side, from one for each or one for all."""
    figures = (figures,) if isinstance(figures, int) else tuple(figures)
    return figures * sides if len(figures) == 1 else figures


def statistics_of(name: str, args: Sequence[Any]) -> int:
    """Return the items that are summed over all pixels of a picture before the result is known.

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
