"""Logits that are shares of the vocabulary, and losses of them: one small message a token, in forward.

Such logits are a sharded tensor whose functions know what they mean for shares (``losses``). To code that uses them
they are whole: what has no rule there is given whole logits, gathered once.

Source of the idea of the loss: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): ranks tell each other
figures of a token, not logits. Here they all go in one all-gather. Gradients are complete on every rank, as everywhere
in a tensor group and unlike those of other sharded tensors: that of the loss is the same on all, and each makes those
of its own columns from it alone.
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
    in_place,
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
    locals_only,
    to_local,
    wrap_locals,
)
from galvatron_lite.parallelism.tensor.functions import copy_to_group, gather_last, reduce_from_group
from galvatron_lite.parallelism.tensor.group import TensorGroup

WHAT = "vocabulary"


def is_shared(value: object) -> bool:
    """Whether a value is logits that are shares."""
    # cut tensors that are yet to be brought into the layout of code between layers have no rules
    return isinstance(value, ShardedTensor) and getattr(getattr(value, "rules", None), "what", "") == WHAT


def full_logits(tensor: Tensor) -> Tensor:
    """Logits as a plain tensor, gathered where they are shares and have not been before; others as they are."""
    if not is_shared(tensor):
        return tensor
    shares = cast("ShardedTensor", tensor)
    with locals_only():
        stamp = shares._version, torch.is_grad_enabled()
    cached = getattr(shares, "gathered", None)
    if cached is None or cached[0] != stamp:
        (columns,) = shares.specs
        cached = stamp, gather_last(_columns_last(shares), columns.group, columns.extent).movedim(-1, columns.dim)
        shares.gathered = cached  # type: ignore[attr-defined]
    return cast("Tensor", cached[1])


def _columns_last(tensor: ShardedTensor) -> Tensor:
    """The share as a plain tensor whose last dim are the columns."""
    return to_local(tensor).movedim(tensor.specs[0].dim, -1)


FIGURES = 3
"""Of a token, that a rank tells the others: the greatest of its logits, the sum of their exponentials over that one's,
and the target's logit. With label smoothing there is one more."""


def _place(targets: Tensor, columns: ShardSpec) -> tuple[Tensor, Tensor]:
    """Where targets lie among this rank's columns, and whether they do; the first place where they do not."""
    local = targets - columns.start
    here = (local >= 0) & (local < columns.length)
    return local.masked_fill(~here, 0), here


def _check_classes(targets: Tensor, extent: int) -> None:
    """Let torch look whether targets are classes: an index into one item seen many times, which costs no memory.

    Raises:
        IndexError: a target that is no class (on a GPU, an assertion there).
    """
    targets.new_zeros(1).expand(extent).index_select(0, targets.reshape(-1))


def _log_total(logits: Tensor, columns: ShardSpec) -> Tensor:
    """Logarithm of the sum of exponentials over the full vocabulary: (..., columns) to (...), on every rank."""
    total: Tensor = _LogTotal.apply(logits, columns)  # type: ignore[no-untyped-call]
    return total


def _picked(values: Tensor, targets: Tensor, columns: ShardSpec) -> Tensor:
    """From values (..., columns of this rank), those of classes (..., n) of the full vocabulary, on every rank."""
    _check_classes(targets, columns.extent)
    place, here = _place(targets, columns)
    return reduce_from_group(values.gather(-1, place).masked_fill(~here, 0), columns.group)


def _wide(logits: Tensor) -> Tensor:
    """In fp32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _exponentials(wide: Tensor, is_copy: bool) -> tuple[Tensor, Tensor]:
    """The greatest logit and the sum of exponentials over it, of this rank; a copy is written over."""
    # tokens that a rank must not say anything for have -inf alone
    top = wide.amax(-1).clamp(min=torch.finfo(wide.dtype).min)
    beyond = wide.sub_(top.unsqueeze(-1)) if is_copy else wide - top.unsqueeze(-1)
    return top, beyond.exp_().sum(-1)


def _total_of(everyone: Tensor) -> Tensor:
    """The logarithm of the sum of all exponentials from every rank's figures, (ranks, figures, ...)."""
    tops, sums = everyone[:, 0], everyone[:, 1]
    top = tops.amax(0)
    return top + (sums * (tops - top).exp()).sum(0).log()


def _gather_figures(figures: list[Tensor], group: TensorGroup) -> Tensor:
    """Every rank's figures: (ranks, figures, ...)."""
    return group.all_gather(torch.stack(figures).unsqueeze(0), 0)


class _TokenLosses(Function):
    """Cross entropy of each token (...), the same on every rank; in fp32 where logits are of half precision.

    Of logits (..., columns of this rank), targets (...), the class of targets that do not count, and how much of the
    target is spread evenly over all classes.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, columns: ShardSpec, ignored: int, smoothing: float
    ) -> Tensor:
        wide = _wide(logits)
        place, here = _place(targets, columns)
        label_logits = [wide.gather(-1, place.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)]
        label_logits += [wide.sum(-1)] if smoothing else []
        everyone = _gather_figures([*_exponentials(wide, wide is not logits), *label_logits], columns.group)
        total = _total_of(everyone)
        losses = total - (1 - smoothing) * everyone[:, 2].sum(0)
        if smoothing:
            losses = losses - smoothing / columns.extent * everyone[:, 3].sum(0)
        ctx.save_for_backward(logits, total, targets)
        ctx.how = columns, ignored, smoothing
        return losses.masked_fill_(targets == ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, total, targets = ctx.saved_tensors
        columns, ignored, smoothing = ctx.how
        wide = _wide(logits)
        total = total.unsqueeze(-1)
        likely = (wide - total if wide is logits else wide.sub_(total)).exp_()
        if smoothing:
            likely.sub_(smoothing / columns.extent)
        place, here = _place(targets, columns)
        likely.scatter_add_(-1, place.unsqueeze(-1), here.to(likely.dtype).mul_(smoothing - 1).unsqueeze(-1))
        likely.mul_(gradient.masked_fill(targets == ignored, 0).unsqueeze(-1))
        return likely.to(logits.dtype), None, None, None, None


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
        likely = (_wide(logits) - total.unsqueeze(-1)).exp_()
        return likely.mul_(gradient.unsqueeze(-1)).to(logits.dtype), None


# What functions do with logits that are shares of the vocabulary; all that is not named here is given whole ones.
#
# Only Python tells where dims go: capture writes down every tensor that is made.


CLASSES = 1
"""Dim of the classes in logits (samples, classes, ...); 0 in those of one sample, (classes)."""


def _on_full_logits(call: Call) -> Any:
    """On whole logits.

    Raises:
        InputError: the function would write to them: a gathered copy is not what it means.
    """
    refuse_write(call)
    return call.function(*map_tensors(call.args, full_logits), **map_tensors(call.kwargs, full_logits))


def _with_columns_at(output: Tensor, logits: ShardedTensor, dim: int) -> Any:
    """What a function made of the share, with the columns at a dim."""
    with locals_only():
        alias = output.as_subclass(Tensor) if output is logits else output
    return wrap_locals(alias, (replace(logits.specs[0], dim=dim),), logits.rules)


def _itemwise(call: Call) -> Any:
    """A function of each logit by itself, and of numbers or other tensors that are broadcast to the logits."""
    call = input_first(call)
    operands = [one for one in (*call.args, *call.kwargs.values()) if isinstance(one, Tensor)]
    logits = next(operand for operand in operands if isinstance(operand, ShardedTensor))
    if (in_place(call) and logits is not operands[0]) or not all(_fits(operand, logits) for operand in operands):
        return _on_full_logits(call)
    with locals_only():
        args = tuple(_beside(arg, logits) for arg in call.args)
        options = {name: _beside(one, logits) for name, one in call.kwargs.items()}
        return wrap_locals(call.function(*args, **options), logits.specs, call.rules)


def _fits(other: Tensor, logits: ShardedTensor) -> bool:
    """Whether a tensor is of the same shares, or is broadcast to the whole logits without making them larger."""
    shape, other_shape = global_shape(logits), global_shape(other)
    if isinstance(other, ShardedTensor):
        return other_shape == shape and other.specs == logits.specs
    pairs = zip(other_shape[::-1], shape[::-1], strict=False)
    return len(other_shape) <= len(shape) and all(extent in (1, full) for extent, full in pairs)


def _beside(other: Any, logits: ShardedTensor) -> Any:
    """The part of an operand that meets the share; of its gradient each rank has a part, too."""
    if not isinstance(other, Tensor) or isinstance(other, ShardedTensor):
        return other
    if other.requires_grad:
        other = copy_to_group(other, logits.specs[0].group)
    (cut,) = logits.specs
    dim = cut.dim - (logits.dim() - other.dim())
    return other.narrow(dim, cut.start, cut.length) if dim >= 0 and other.shape[dim] == cut.extent > 1 else other


def _reshaped(call: Call) -> Any:
    """``view`` and ``reshape``, where the vocabulary is the last dim and stays it."""
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
    """The shape that is asked for; None where that is not told in numbers."""
    given = call.args[1:]
    sizes = list(given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given)
    if not all(isinstance(size, int) for size in sizes):
        return None
    rest = prod(size for size in sizes if size >= 0)
    return [prod(global_shape(call.args[0])) // max(rest, 1) if size < 0 else size for size in sizes]


def _flattened(call: Call) -> Any:
    """``flatten`` of dims in front of the vocabulary."""
    call = input_first(call)
    shape = global_shape(call.args[0])
    first, last = (argument(call, *one) % len(shape) for one in ((1, "start_dim", 0), (2, "end_dim", -1)))
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
        order = [one % output.dim() for one in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]
    else:
        pair = (argument(call, 1, "dim0"), argument(call, 2, "dim1")) if call.name == "transpose" else (-2, -1)
        first, second = pair
        order[first], order[second] = order[second], order[first]
    return _with_columns_at(output, logits, order.index(logits.specs[0].dim))


def _indexed(call: Call) -> Any:
    """``logits[...]`` of some tokens and all columns, which are the last dim."""
    logits, index = call.args
    parts = index if isinstance(index, tuple) else (index,)
    if not isinstance(logits, ShardedTensor) or not _keeps_last(parts, logits.specs[0].dim, len(global_shape(logits))):
        return _on_full_logits(call)
    with locals_only():
        part = logits[index]
    return _with_columns_at(part, logits, part.dim() - 1)


def _keeps_last(parts: tuple[Any, ...], columns: int, dims: int) -> bool:
    """Whether an index takes columns, which must be the last dim, as a whole and leaves them last."""
    if columns != dims - 1 or any(isinstance(part, (ShardedTensor, list, bool)) for part in parts):
        return False
    place = next((number for number, part in enumerate(parts) if part is Ellipsis), None)
    behind = parts if place is None else parts[place + 1 :]
    if place is None and sum(map(_dims_of, parts)) < dims:
        return True
    return not behind or (isinstance(behind[-1], slice) and behind[-1] == slice(None))


def _dims_of(one: Any) -> int:
    """Dims of a tensor that a part of an index is about."""
    if one is None:
        return 0
    return one.dim() if isinstance(one, Tensor) and one.dtype == torch.bool else 1


def _loss(call: Call) -> Any:
    """``cross_entropy`` and ``nll_loss`` of classes by their number; other targets (likelihoods) and weights of classes
    are for full logits."""
    options = arguments(call, getattr(functional, call.name))
    if not _is_plain(options):
        return _on_full_logits(call)
    logits, targets, ignored = options["input"], options["target"], options["ignore_index"]
    with locals_only():
        local, (columns,), uncounted = _columns_last(logits), logits.specs, targets == ignored
        counted = targets.masked_fill(uncounted, 0)
        if call.name == "nll_loss":
            likely = -_picked(local, counted.unsqueeze(-1), columns).squeeze(-1).masked_fill(uncounted, 0)
            return _reduced(likely, targets, ignored, options["reduction"])
        _check_classes(counted, columns.extent)
        how = columns, ignored, options["label_smoothing"]
        losses: Tensor = _TokenLosses.apply(local, targets, *how)  # type: ignore[no-untyped-call]
        return _narrow(_reduced(losses, targets, ignored, options["reduction"]), local)


def _is_plain(arguments: Mapping[str, Any]) -> bool:
    """Whether classes are numbers, all weigh the same, and the logits' columns are the classes."""
    logits, targets = arguments["input"], arguments["target"]
    if not isinstance(logits, ShardedTensor) or isinstance(targets, ShardedTensor) or targets.is_floating_point():
        return False
    with locals_only():
        classes = CLASSES if logits.dim() > 1 else 0
    old = arguments["weight"] is not None or arguments["size_average"] is not None or arguments["reduce"] is not None
    return not old and logits.specs[0].dim == classes


def _reduced(losses: Tensor, targets: Tensor, ignored: int, reduction: str) -> Tensor:
    """The losses of tokens, their sum, or their mean over those that count."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != ignored).sum()


def _narrow(result: Tensor, logits: Tensor) -> Tensor:
    """In the precision that torch gives: that of the logits, but fp32 under autocast."""
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
    """Whether a function of a dim is one of the columns."""
    if not isinstance(logits, ShardedTensor):
        return False
    only = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    with locals_only():
        return isinstance(only, int) and only % logits.dim() == logits.specs[0].dim


def _logsumexp(call: Call) -> Any:
    """Over the vocabulary."""
    call = input_first(call)
    logits, dim = call.args[0], argument(call, 1, "dim")
    if not _is_over_columns(logits, dim):
        return _on_full_logits(call)
    with locals_only():
        local, (columns,) = _columns_last(logits), logits.specs
        total = _narrow(_log_total(local, columns), local)
        return total.unsqueeze(columns.dim) if argument(call, 2, "keepdim", False) else total


def _gather(call: Call) -> Any:
    """Values of classes by their number, as many tokens as there are."""
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
        **{name: one for name, one in pointwise.HANDLERS.items() if one is pointwise.cast},
        **dict.fromkeys([name for name, one in pointwise.HANDLERS.items() if one is pointwise.pointwise], _itemwise),
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
"""What functions do with a head's logits."""


def shared_logits(local: Tensor, group: TensorGroup, extent: int) -> Tensor:
    """A head's own columns (..., columns), which nobody else holds, as logits (..., extent) of the whole vocabulary."""
    # of a line of ranks only their number, the own place and all-gathers are asked for
    return from_local(local, (ShardSpec(local.dim() - 1, extent, cast("AxisGroup", group)),), LOGITS)
