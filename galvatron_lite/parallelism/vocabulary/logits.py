"""Logits whose vocabulary is sharded, and losses of them, with one small message for each token in forward.

The logits are a sharded tensor with the full shape. Functions without a rule here get full logits, gathered once.

The loss follows Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): ranks exchange a few figures of each
token, not logits; here in one all-gather. Gradients are complete on every rank, as in all of a tensor group and unlike
those of other sharded tensors: every rank has the gradient of the loss, and computes those of its columns from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from galvatron_lite.model.batch import map_tensors
from galvatron_lite.parallelism.sharded import metadata, pointwise
from galvatron_lite.parallelism.sharded.calls import (
    argument,
    arguments,
    handled_by,
    input_first,
    refuse_write,
)
from galvatron_lite.parallelism.sharded.groups import AxisGroup
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Rules,
    ShardedTensor,
    ShardSpec,
    from_local,
    global_shape,
    in_place,
    locals_only,
    to_local,
    wrap_locals,
)
from galvatron_lite.parallelism.tensor.functions import copy_to_group, gather_last, reduce_from_group
from galvatron_lite.parallelism.tensor.group import TensorGroup

WHAT = "vocabulary"


def is_shared(value: object) -> bool:
    """Whether a value is sharded logits."""
    # tensors that have not been redistributed for code between layers have no rules
    return isinstance(value, ShardedTensor) and getattr(getattr(value, "rules", None), "what", "") == WHAT


def full_logits(tensor: Tensor) -> Tensor:
    """Gather sharded logits, once for each version of them; return other tensors unchanged."""
    if not is_shared(tensor):
        return tensor
    logits = cast("ShardedTensor", tensor)
    with locals_only():
        version = logits._version, torch.is_grad_enabled()
    cached = getattr(logits, "gathered", None)
    if cached is None or cached[0] != version:
        (columns,) = logits.specs
        cached = version, gather_last(_columns_last(logits), columns.group, columns.extent).movedim(-1, columns.dim)
        logits.gathered = cached  # type: ignore[attr-defined]
    return cast("Tensor", cached[1])


def _columns_last(tensor: ShardedTensor) -> Tensor:
    """The shard as a plain tensor, with the columns in the last dim."""
    return to_local(tensor).movedim(tensor.specs[0].dim, -1)


FIGURES = 3
"""Figures of a token that ranks exchange: the largest of its logits, the sum of exponentials relative to that, and the
logit of the target. With label smoothing there is one more."""


def _local_index(targets: Tensor, columns: ShardSpec) -> tuple[Tensor, Tensor]:
    """The index of targets among this rank's columns (0 for others), and whether they are among them."""
    index = targets - columns.start
    is_local = (index >= 0) & (index < columns.length)
    return index.masked_fill(~is_local, 0), is_local


def _check_classes(targets: Tensor, extent: int) -> None:
    """Check that targets are classes, by an index into an expanded tensor, which needs no memory.

    Raises:
        IndexError: a target is no class (on a GPU, an assertion there).
    """
    targets.new_zeros(1).expand(extent).index_select(0, targets.reshape(-1))


def _log_total(logits: Tensor, columns: ShardSpec) -> Tensor:
    """Log of the sum of exponentials over the full vocabulary: (..., columns) to (...), on every rank."""
    total: Tensor = _LogTotal.apply(logits, columns)  # type: ignore[no-untyped-call]
    return total


def _picked(values: Tensor, targets: Tensor, columns: ShardSpec) -> Tensor:
    """Select values (..., columns of this rank) of classes (..., n) of the full vocabulary, on every rank."""
    _check_classes(targets, columns.extent)
    index, is_local = _local_index(targets, columns)
    return reduce_from_group(values.gather(-1, index).masked_fill(~is_local, 0), columns.group)


def _wide(logits: Tensor) -> Tensor:
    """Cast to at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _exponentials(wide: Tensor, is_copy: bool) -> tuple[Tensor, Tensor]:
    """The largest logit of this rank, and the sum of exponentials relative to it; ``wide`` is overwritten if a copy."""
    # all logits of a token may be -inf
    top = wide.amax(-1).clamp(min=torch.finfo(wide.dtype).min)
    beyond = wide.sub_(top.unsqueeze(-1)) if is_copy else wide - top.unsqueeze(-1)
    return top, beyond.exp_().sum(-1)


def _total_of(figures: Tensor) -> Tensor:
    """The log of the sum of all exponentials, from every rank's figures (ranks, figures, ...)."""
    tops, sums = figures[:, 0], figures[:, 1]
    top = tops.amax(0)
    return top + (sums * (tops - top).exp()).sum(0).log()


def _gather_figures(figures: list[Tensor], group: TensorGroup) -> Tensor:
    """Every rank's figures: (ranks, figures, ...)."""
    return group.all_gather(torch.stack(figures).unsqueeze(0), 0)


class _TokenLosses(Function):
    """Cross entropy of each token (...), equal on every rank; in float32 for logits of half precision.

    Arguments are logits (..., columns of this rank), targets (...), their spec, the class of targets that do not count,
    and label smoothing.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, columns: ShardSpec, ignored: int, smoothing: float
    ) -> Tensor:
        wide = _wide(logits)
        index, is_local = _local_index(targets, columns)
        label_logits = [wide.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~is_local, 0)]
        label_logits += [wide.sum(-1)] if smoothing else []
        figures = _gather_figures([*_exponentials(wide, wide is not logits), *label_logits], columns.group)
        total = _total_of(figures)
        losses = total - (1 - smoothing) * figures[:, 2].sum(0)
        if smoothing:
            losses = losses - smoothing / columns.extent * figures[:, 3].sum(0)
        ctx.save_for_backward(logits, total, targets)
        ctx.settings = columns, ignored, smoothing
        return losses.masked_fill_(targets == ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, total, targets = ctx.saved_tensors
        columns, ignored, smoothing = ctx.settings
        wide = _wide(logits)
        total = total.unsqueeze(-1)
        # probabilities, less those of the targets: the gradient
        result = (wide - total if wide is logits else wide.sub_(total)).exp_()
        if smoothing:
            result.sub_(smoothing / columns.extent)
        index, is_local = _local_index(targets, columns)
        result.scatter_add_(-1, index.unsqueeze(-1), is_local.to(result.dtype).mul_(smoothing - 1).unsqueeze(-1))
        result.mul_(gradient.masked_fill(targets == ignored, 0).unsqueeze(-1))
        return result.to(logits.dtype), None, None, None, None


class _LogTotal(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: ShardSpec) -> Tensor:
        wide = _wide(logits)
        total = _total_of(_gather_figures(list(_exponentials(wide, wide is not logits)), columns.group))
        ctx.save_for_backward(logits, total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, total = ctx.saved_tensors
        probabilities = (_wide(logits) - total.unsqueeze(-1)).exp_()
        return probabilities.mul_(gradient.unsqueeze(-1)).to(logits.dtype), None


# The rules of sharded logits. Dims are followed in Python, without tensors: capture records every tensor that is made.


CLASSES = 1
"""Dim of the classes in logits (samples, classes, ...); it is 0 in logits (classes) of one sample."""


def _on_full_logits(call: Call) -> Any:
    """Call the function with full logits.

    Raises:
        InputError: the function would write to the logits.
    """
    refuse_write(call)
    return call.function(*map_tensors(call.args, full_logits), **map_tensors(call.kwargs, full_logits))


def _with_columns_at(output: Tensor, logits: ShardedTensor, dim: int) -> Any:
    """Turn the result of a function of the shard into logits with the columns at ``dim``."""
    with locals_only():
        alias = output.as_subclass(Tensor) if output is logits else output
    return wrap_locals(alias, (replace(logits.specs[0], dim=dim),), logits.rules)


def _itemwise(call: Call) -> Any:
    """Run a pointwise function of logits, and of numbers or tensors that are broadcast to them."""
    call = input_first(call)
    operands = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
    logits = next(operand for operand in operands if isinstance(operand, ShardedTensor))
    if (in_place(call) and logits is not operands[0]) or not all(_fits(operand, logits) for operand in operands):
        return _on_full_logits(call)
    with locals_only():
        args = tuple(_local_operand(arg, logits) for arg in call.args)
        options = {name: _local_operand(arg, logits) for name, arg in call.kwargs.items()}
        return wrap_locals(call.function(*args, **options), logits.specs, call.rules)


def _fits(other: Tensor, logits: ShardedTensor) -> bool:
    """Whether a tensor is sharded in the same way, or can be broadcast to the shape of the logits."""
    shape, other_shape = global_shape(logits), global_shape(other)
    if isinstance(other, ShardedTensor):
        return other_shape == shape and other.specs == logits.specs
    pairs = zip(other_shape[::-1], shape[::-1], strict=False)
    return len(other_shape) <= len(shape) and all(extent in (1, full) for extent, full in pairs)


def _local_operand(other: Any, logits: ShardedTensor) -> Any:
    """The part of an operand for this rank's shard; the ranks' gradients of it are summed."""
    if not isinstance(other, Tensor) or isinstance(other, ShardedTensor):
        return other
    if other.requires_grad:
        other = copy_to_group(other, logits.specs[0].group)
    (cut,) = logits.specs
    dim = cut.dim - (logits.dim() - other.dim())
    return other.narrow(dim, cut.start, cut.length) if dim >= 0 and other.shape[dim] == cut.extent > 1 else other


def _reshaped(call: Call) -> Any:
    """``view`` and ``reshape``; the vocabulary must be the last dim before and after."""
    call = input_first(call)
    logits = call.args[0]
    after = _sizes(call) if isinstance(logits, ShardedTensor) and not call.kwargs else None
    if after is None:
        return _on_full_logits(call)
    return _as_shape(call, logits, after)


def _as_shape(call: Call, logits: ShardedTensor, after: list[int]) -> Any:
    (cut,), before = logits.specs, global_shape(logits)
    if cut.dim != len(before) - 1 or not after or after[-1] != cut.extent or prod(after) != prod(before):
        return _on_full_logits(call)
    local = [*after[:-1], cut.length]
    with locals_only():
        reshaped = logits.view(local) if call.name == "view" else logits.reshape(local)
    return _with_columns_at(reshaped, logits, len(after) - 1)


def _sizes(call: Call) -> list[int] | None:
    """The shape among the arguments; None if it is not all numbers."""
    shape = call.args[1:]
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
    if not all(isinstance(size, int) for size in sizes):
        return None
    rest = prod(size for size in sizes if size >= 0)
    return [prod(global_shape(call.args[0])) // max(rest, 1) if size < 0 else size for size in sizes]


def _flattened(call: Call) -> Any:
    """``flatten`` of dims before the vocabulary."""
    call = input_first(call)
    shape = global_shape(call.args[0])
    first, last = argument(call, 1, "start_dim", 0) % len(shape), argument(call, 2, "end_dim", -1) % len(shape)
    merged = [*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :]]
    return _as_shape(call, call.args[0], merged)


def _permuted(call: Call) -> Any:
    """``permute(dims)`` or ``permute(*dims)``, ``transpose`` and ``mT``."""
    call = input_first(call)
    logits = call.args[0]
    with locals_only():
        output = call.function(*call.args, **call.kwargs)
    order = list(range(output.dim()))
    if call.name == "permute":
        dims = call.args[1:] or (call.kwargs["dims"],)
        order = [dim % output.dim() for dim in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]
    else:
        pair = (argument(call, 1, "dim0"), argument(call, 2, "dim1")) if call.name == "transpose" else (-2, -1)
        first, second = pair
        order[first], order[second] = order[second], order[first]
    return _with_columns_at(output, logits, order.index(logits.specs[0].dim))


def _indexed(call: Call) -> Any:
    """``logits[...]`` of some tokens and all columns, which must be the last dim."""
    logits, index = call.args
    parts = index if isinstance(index, tuple) else (index,)
    if not isinstance(logits, ShardedTensor) or not _keeps_last(parts, logits.specs[0].dim, len(global_shape(logits))):
        return _on_full_logits(call)
    with locals_only():
        part = logits[index]
    return _with_columns_at(part, logits, part.dim() - 1)


def _keeps_last(parts: tuple[Any, ...], columns: int, dims: int) -> bool:
    """Whether an index takes all columns, which must be the last dim, and leaves them last."""
    if columns != dims - 1 or any(isinstance(part, (ShardedTensor, list, bool)) for part in parts):
        return False
    dots = next((number for number, part in enumerate(parts) if part is Ellipsis), None)
    after = parts if dots is None else parts[dots + 1 :]
    if dots is None and sum(map(_dims_of, parts)) < dims:
        return True
    return not after or (isinstance(after[-1], slice) and after[-1] == slice(None))


def _dims_of(part: Any) -> int:
    """How many dims of a tensor a part of an index is for."""
    if part is None:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _loss(call: Call) -> Any:
    """``cross_entropy`` and ``nll_loss`` of class indices; other targets and class weights need full logits."""
    options = arguments(call, getattr(functional, call.name))
    if not _has_class_indices(options):
        return _on_full_logits(call)
    logits, targets, ignored = options["input"], options["target"], options["ignore_index"]
    with locals_only():
        local, (columns,), is_ignored = _columns_last(logits), logits.specs, targets == ignored
        classes = targets.masked_fill(is_ignored, 0)
        if call.name == "nll_loss":
            losses = -_picked(local, classes.unsqueeze(-1), columns).squeeze(-1).masked_fill(is_ignored, 0)
            return _reduced(losses, targets, ignored, options["reduction"])
        _check_classes(classes, columns.extent)
        settings = columns, ignored, options["label_smoothing"]
        losses = _TokenLosses.apply(local, targets, *settings)  # type: ignore[no-untyped-call]
        return _narrow(_reduced(losses, targets, ignored, options["reduction"]), local)


def _has_class_indices(arguments: Mapping[str, Any]) -> bool:
    """Whether targets are class indices, classes have no weights, and the logits' columns are the classes."""
    logits, targets = arguments["input"], arguments["target"]
    if not isinstance(logits, ShardedTensor) or isinstance(targets, ShardedTensor) or targets.is_floating_point():
        return False
    with locals_only():
        classes = CLASSES if logits.dim() > 1 else 0
    old = arguments["weight"] is not None or arguments["size_average"] is not None or arguments["reduce"] is not None
    return not old and logits.specs[0].dim == classes


def _reduced(losses: Tensor, targets: Tensor, ignored: int, reduction: str) -> Tensor:
    """Reduce the losses of tokens; the mean is over those that count."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != ignored).sum()


def _narrow(result: Tensor, logits: Tensor) -> Tensor:
    """Cast to the dtype that torch returns: that of the logits, or float32 under autocast."""
    device = logits.device.type
    widened = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return result if widened else result.to(logits.dtype)


def _softmax(call: Call) -> Any:
    """``softmax`` and ``log_softmax`` over the vocabulary."""
    call = input_first(call)
    logits, dim, dtype = call.args[0], argument(call, 1, "dim"), call.kwargs.get("dtype")
    if not _is_over_columns(logits, dim):
        return _on_full_logits(call)
    with locals_only():
        local, (columns,) = _columns_last(logits), logits.specs
        local = local if dtype is None else local.to(dtype)
        result = _narrow(local - copy_to_group(_log_total(local, columns), columns.group).unsqueeze(-1), local)
        result = (result if call.name == "log_softmax" else result.exp()).movedim(-1, columns.dim)
        return wrap_locals(result, logits.specs, call.rules)


def _is_over_columns(logits: Any, dim: Any) -> bool:
    """Whether ``dim`` is that of the columns."""
    if not isinstance(logits, ShardedTensor):
        return False
    single = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    with locals_only():
        return isinstance(single, int) and single % logits.dim() == logits.specs[0].dim


def _logsumexp(call: Call) -> Any:
    """``logsumexp`` over the vocabulary."""
    call = input_first(call)
    logits, dim = call.args[0], argument(call, 1, "dim")
    if not _is_over_columns(logits, dim):
        return _on_full_logits(call)
    with locals_only():
        local, (columns,) = _columns_last(logits), logits.specs
        total = _narrow(_log_total(local, columns), local)
        return total.unsqueeze(columns.dim) if argument(call, 2, "keepdim", False) else total


def _gather(call: Call) -> Any:
    """``gather`` along the vocabulary, for all tokens."""
    call = input_first(call)
    values, dim, index = call.args[0], argument(call, 1, "dim"), argument(call, 2, "index")
    if not _is_over_columns(values, dim) or isinstance(index, ShardedTensor):
        return _on_full_logits(call)
    (columns,) = values.specs
    with locals_only():
        picked = _picked(_columns_last(values), index.movedim(columns.dim, -1), columns)
        return picked.movedim(-1, columns.dim)


LOGITS = Rules(
    {
        **metadata.METADATA,
        **metadata.GRADIENTS,
        **{name: handler for name, handler in pointwise.HANDLERS.items() if handler is pointwise.cast},
        **{name: _itemwise for name, handler in pointwise.HANDLERS.items() if handler is pointwise.pointwise},
        **handled_by(_reshaped, "view reshape"),
        **handled_by(_permuted, "transpose mT permute"),
        "flatten": _flattened,
        "__getitem__": _indexed,
        **handled_by(_softmax, "softmax log_softmax"),
        **handled_by(_loss, "cross_entropy nll_loss"),
        "logsumexp": _logsumexp,
        "gather": _gather,
    },
    _on_full_logits,
    pins=("tensor",),
    what=WHAT,
)
"""The rules of sharded logits."""


def shared_logits(local: Tensor, group: TensorGroup, extent: int) -> Tensor:
    """Turn this rank's columns (..., columns) of a head's output into logits (..., extent) of the full vocabulary."""
    # only the size, rank and all-gathers of the group are used
    return from_local(local, (ShardSpec(local.dim() - 1, extent, cast("AxisGroup", group)),), LOGITS)
