"""Functions along some dims that leave the others alone: softmax, sort, split, flip and their kind; reductions.

Sums, means and norms over sharded dims are those of the shards, added over the ranks. Everything else is
gathered along the sharded dims that it works along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import Tensor

from galvatron_lite.parallelism.sharded.calls import (
    ATTENTION,
    align,
    align_all,
    argument,
    broadcast,
    common_specs,
    first_specs,
    handled_by,
    input_first,
    named_arguments,
    on_full,
    refuse_write,
    spec_at,
    tensors_among,
    warn_gathered,
    without_dims,
    wrap_like,
)
from galvatron_lite.parallelism.sharded.collectives import gather_dims, sum_over
from galvatron_lite.parallelism.sharded.groups import AxisGroup
from galvatron_lite.parallelism.sharded.pointwise import pointwise
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    ShardedTensor,
    ShardSpec,
    ShardSpecs,
    global_shape,
    locals_only,
    specs_of,
    to_local,
    wrap_locals,
)

HALF = (torch.float16, torch.bfloat16)
"""Dtypes in which nothing is summed."""


def _from_front(dims: Any, count: int) -> tuple[int, ...]:
    """Dims as they were passed (one, several; None or, of ``var``, a bool: all), counted from the front."""
    if dims is None or isinstance(dims, bool):
        return tuple(range(count))
    several = dims if isinstance(dims, (tuple, list)) else (dims,)
    return tuple(dim % count for dim in several)


def along(position: int, default: Any = None, name: str = "dim", drops: bool = False, keepdim: int = 0) -> Handler:
    """A handler of functions of one tensor that work along dims; along sharded ones the tensor is gathered first.

    Args:
        position: of the dims among the arguments.
        default: the dims where none are passed; None: all.
        name: of the argument.
        drops: whether the result lacks the dims.
        keepdim: position of the argument that keeps them nevertheless; 0: none.
    """

    def handler(call: Call) -> Any:
        call = input_first(call)
        tensor = call.args[0]
        if not isinstance(tensor, ShardedTensor) or any(isinstance(arg, ShardedTensor) for arg in call.args[1:]):
            return on_full(call)
        with locals_only():
            dims = _from_front(argument(call, position, name, default), tensor.dim())
        specs = tuple(spec for spec in tensor.specs if spec.dim not in dims)
        if len(specs) < len(tensor.specs):
            refuse_write(call)
            warn_gathered(call, tensor)
        with locals_only():
            local = gather_dims(tensor, [spec for spec in tensor.specs if spec.dim in dims])
            result = call.function(local, *call.args[1:], **call.kwargs)
        if drops and not (keepdim and argument(call, keepdim, "keepdim", False)):
            specs = without_dims(specs, dims)
        return wrap_locals(result, specs, call.rules)

    return handler


_REDUCED = along(1, drops=True, keepdim=2)
_FLIPPED = along(1, name="dims")


def _flip(call: Call) -> Any:
    """``flip(x, dims)`` and ``x.flip(2, 3)``."""
    call = input_first(call)
    return _FLIPPED(call._replace(args=(call.args[0], call.args[1:])) if len(call.args) > 2 else call)


class _Reduction(NamedTuple):
    """A reduction of a sharded tensor."""

    dims: tuple[int, ...]
    keepdim: bool
    groups: list[AxisGroup]  # that shard the dims
    specs: ShardSpecs  # of the result
    items: int  # of the global tensor in one of the result


def _reduction(tensor: ShardedTensor, dims: Any, keepdim: bool) -> _Reduction:
    shape = global_shape(tensor)
    dims = _from_front(None if dims in ((), []) else dims, len(shape))
    specs = tuple(spec for spec in tensor.specs if spec.dim not in dims)
    groups = [spec.group for spec in tensor.specs if spec.dim in dims]
    return _Reduction(
        dims, keepdim, groups, specs if keepdim else without_dims(specs, dims), prod(shape[dim] for dim in dims)
    )


def _sum_or_mean(call: Call) -> Any:
    """Ranks add in fp32 what is of half precision: one process rounds once, when everything is summed."""
    call = input_first(call)
    tensor = call.args[0]
    if not isinstance(tensor, ShardedTensor):
        return on_full(call)
    how = _reduction(tensor, argument(call, 1, "dim"), bool(argument(call, 2, "keepdim", False)))
    with locals_only():
        dtype = call.kwargs.get("dtype") or (tensor.dtype if tensor.is_floating_point() else None)
        if not how.groups or (call.name == "mean" and dtype is None):  # which torch refuses
            return wrap_locals(call.function(*call.args, **call.kwargs), how.specs, call.rules)
        wide = torch.float32 if dtype in HALF else dtype
        total = sum_over(tensor.sum(how.dims, how.keepdim, dtype=wide), how.groups)
        total = total / how.items if call.name == "mean" else total
        return wrap_locals(total if dtype is None else total.to(dtype), how.specs, call.rules)


_NORMED = along(2, drops=True, keepdim=3)


def _norm(call: Call) -> Any:
    """Norms of vectors of a finite order: the norm of the ranks' norms."""
    call = input_first(call)
    tensor, dims = call.args[0], argument(call, 2, "dim")
    order = argument(call, 1, "ord" if call.name.startswith("linalg") else "p")
    matrix = call.name == "linalg_norm" and order is not None and isinstance(dims, tuple | None)
    order = 2 if order in ("fro", None) else order
    if not isinstance(tensor, ShardedTensor) or matrix or isinstance(order, str) or not 0 < order < torch.inf:
        return _NORMED(call)
    how = _reduction(tensor, dims, bool(argument(call, 3, "keepdim", False)))
    if not how.groups:
        return _NORMED(call)
    with locals_only():
        result: Tensor = torch.linalg.vector_norm(tensor, order, how.dims, how.keepdim, dtype=call.kwargs.get("dtype"))
        for group in how.groups:
            every = gather_dims(result.unsqueeze(0), [ShardSpec(0, group.size, group)])
            result = torch.linalg.vector_norm(every, order, 0)
    return wrap_locals(result, how.specs, call.rules)


HANDLERS: Mapping[str, Handler] = {
    **handled_by(_sum_or_mean, "sum mean"),
    # ``max(x)``, ``max(x, dim)`` (with places) and ``max(x, y)``
    **handled_by(lambda call: pointwise(call) if len(tensors_among(call)) > 1 else _REDUCED(call), "max min"),
    **handled_by(_REDUCED, "amax amin argmax argmin any all count_nonzero prod median"),
    **handled_by(along(1, drops=True, keepdim=3), "var std var_mean std_mean"),
    **handled_by(_norm, "norm linalg_vector_norm linalg_norm"),
    **handled_by(along(1, -1, drops=True, keepdim=2), "logsumexp"),
    **handled_by(along(1), "softmax log_softmax softmin cumsum"),
    **handled_by(along(1, -1), "sort argsort glu"),
    **handled_by(along(2, -1), "topk"),
    **handled_by(along(2, 0), "split chunk tensor_split split_with_sizes unsafe_chunk unsafe_split"),
    **handled_by(along(1, 0), "index_select"),
    **handled_by(along(2), "repeat_interleave"),
    **handled_by(along(2, name="dims"), "roll"),
    **handled_by(along(2, 1), "normalize"),
    **handled_by(along(2, 1), "channel_shuffle native_channel_shuffle"),
    "unbind": along(1, 0, drops=True),
    "flip": _flip,
}


# Products that sum over dims: ``linear``, ``matmul``, ``einsum``, and attention.
#
# Dims are named as in Einstein's convention. A dim that is sharded in one operand is sharded alike in all that have it.
# Over a sharded dim that is summed every rank has a part of the sum, and the group adds them.


def _contract(
    call: Call, function: Callable[..., Any], operands: Sequence[Tensor], labels: Sequence[str], result: str
) -> Any:
    """A product on shards, of operands whose dims bear these letters; ``result``: the letters of what it returns."""
    letters = sorted(set("".join(labels)))
    pairs = list(zip(operands, labels, strict=True))
    specs = {
        letters[spec.dim]: spec
        for spec in first_specs(
            [spec.at_dim(letters.index(named[spec.dim])) for spec in specs_of(one)] for one, named in pairs
        )
    }
    if any(
        global_shape(one)[named.index(letter)] != spec.extent
        for letter, spec in specs.items()
        for one, named in pairs
        if letter in named
    ):
        return on_full(call)
    with locals_only():
        local = function(*(align(one, _specs_of_letters(named, specs), len(named)) for one, named in pairs))
        total = sum_over(local, [spec.group for letter, spec in specs.items() if letter not in result])
    return wrap_locals(total, _specs_of_letters(result, specs), call.rules)


def _specs_of_letters(letters: str, specs: Mapping[str, ShardSpec]) -> ShardSpecs:
    return tuple(specs[letter].at_dim(dim) for dim, letter in enumerate(letters) if letter in specs)


def _matmul(call: Call) -> Any:
    call = input_first(call)
    left, right = call.args[0], argument(call, 1, "other", argument(call, 1, "mat2"))
    if call.name == "__rmatmul__":
        left, right = right, left
    dims = len(global_shape(left)), len(global_shape(right))
    batch = ascii_letters[: max(*dims, 2) - 2]
    rows, columns = "Y" * (dims[0] > 1), "Z" * (dims[1] > 1)
    labels = (
        batch[len(batch) - max(dims[0] - 2, 0) :] + rows + "X",
        batch[len(batch) - max(dims[1] - 2, 0) :] + "X" + columns,
    )
    return _contract(call, lambda a, b: a @ b, [left, right], labels, batch + rows + columns)


def _linear(call: Call) -> Any:
    """``linear``: the bias joins where the outputs are complete sums."""
    call = input_first(call)
    tensor, weight, bias = call.args[0], argument(call, 1, "weight"), argument(call, 2, "bias")
    inner = ascii_letters[: len(global_shape(tensor)) - 1]
    if len(global_shape(weight)) != 2:
        return on_full(call)
    plain = not specs_of(weight) and (bias is None or not specs_of(bias))
    if plain and isinstance(tensor, ShardedTensor) and spec_at(tensor.specs, len(inner)) is None:
        return wrap_like(call, call.function(to_local(tensor), weight, bias), tensor)
    product = _contract(call, call.function, [tensor, weight], [f"{inner}Y", "ZY"], f"{inner}Z")
    return product if bias is None else product + bias


def _einsum(call: Call) -> Any:
    """``einsum`` with letters for all dims."""
    equation, operands = call.args[0], call.args[1:]
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or "." in equation:
        return on_full(call)
    left, arrow, result = equation.replace(" ", "").partition("->")
    labels = left.split(",")
    if not arrow:
        letters = left.replace(",", "")
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if any(len(set(label)) < len(label) for label in labels):
        return on_full(call)
    return _contract(call, lambda *shards: call.function(f"{left}->{result}", *shards), operands, labels, result)


def _attention(call: Call) -> Any:
    """``scaled_dot_product_attention``: every rank its queries, with the keys and values of all."""
    options = named_arguments(call, ATTENTION)
    query, key, value, mask = (options.pop(name) for name in ("query", "key", "value", "attn_mask"))
    dims = len(global_shape(query))
    specs = tuple(spec for spec in specs_of(query) if spec.dim < dims - 1)
    # where the pattern depends on the query's place, or on chance
    if not specs or options["is_causal"] or options["dropout_p"] or options["enable_gqa"]:
        return on_full(call)
    samples = tuple(spec for spec in specs if spec.dim < dims - 2)
    with locals_only():
        shards = [align(query, specs, dims), align(key, samples, dims), align(value, samples, dims)]
        mask = None if mask is None else align(mask, specs, dims)
        result = call.function(*shards, attn_mask=mask, **options)
    return wrap_locals(result, specs, call.rules)


PRODUCTS: Mapping[str, Handler] = {
    **handled_by(_matmul, "matmul __matmul__ __rmatmul__ bmm mm mv"),
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
}


# Losses of sharded predictions: sums over the shards, added over the ranks; every rank has the reduced loss.


CLASSES = 1
"""Dim of the classes in logits (samples, classes, ...)."""
IGNORED = -100
"""Class of targets that do not count, by torch's default."""

_NAMES = {
    "cross_entropy": "input target weight size_average ignore_index reduce reduction label_smoothing",
    "nll_loss": "input target weight size_average ignore_index reduce reduction",
    "mse_loss": "input target size_average reduce reduction weight",
    "l1_loss": "input target size_average reduce reduction weight",
    "smooth_l1_loss": "input target size_average reduce reduction beta",
    "huber_loss": "input target reduction delta weight",
    "binary_cross_entropy": "input target weight size_average reduce reduction",
    "binary_cross_entropy_with_logits": "input target weight size_average reduce reduction pos_weight",
    "kl_div": "input target size_average reduce reduction log_target",
    "soft_margin_loss": "input target size_average reduce reduction",
    "poisson_nll_loss": "input target log_input full size_average eps reduce reduction",
}


def _parsed(call: Call) -> tuple[Call, str]:
    """The call with everything behind prediction and target by name, without its reduction; and the reduction."""
    call = input_first(call)
    names = _NAMES[call.name].split()[2 : len(call.args)]
    options = {**dict(zip(names, call.args[2:], strict=False)), **call.kwargs}
    operands = [*call.args[:2], *(options.pop(name) for name in ("input", "target") if name in options)]
    average, reduce = options.pop("size_average", None), options.pop("reduce", None)
    reduction = str(options.pop("reduction", "mean"))
    if average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if average is False else "mean"
    return call._replace(args=tuple(operands), kwargs=options), reduction


def _itemwise(call: Call) -> Any:
    """Losses of each item by itself, which are then averaged or summed over all."""
    call, reduction = _parsed(call)
    if reduction == "none":
        return pointwise(call._replace(kwargs={**call.kwargs, "reduction": "none"}))
    tensors = tensors_among(call)
    with locals_only():
        shape = broadcast(*map(global_shape, tensors))
        specs = common_specs(tensors)
        local = align_all(call, specs, len(shape))
        held = prod(broadcast(*(arg.shape for arg in local.args)))
        # the mean of a shard, weighed by its items: sums of half precision might overflow
        average = reduction != "sum" and held > 0
        part = call.function(*local.args, **local.kwargs, reduction="mean" if average else "sum")
        count = {"sum": 1, "batchmean": shape[0] if shape else 1}.get(reduction, prod(shape))
        return sum_over(part * (held / count) if average else part / count, [spec.group for spec in specs])


def _classified(call: Call) -> Any:
    """``cross_entropy`` and ``nll_loss`` of logits (samples, classes, ...) not sharded along the classes."""
    call, reduction = _parsed(call)
    logits, target = call.args
    shape, likely = global_shape(logits), global_shape(logits) == global_shape(target)
    of_target = specs_of(target)
    if not likely:  # classes (samples, ...)
        of_target = tuple(spec.at_dim(spec.dim + (spec.dim >= CLASSES)) for spec in of_target)
    specs = first_specs([specs_of(logits), of_target])
    if len(shape) < 2 or spec_at(specs, CLASSES) is not None or isinstance(call.kwargs.get("weight"), ShardedTensor):
        return on_full(call._replace(kwargs={**call.kwargs, "reduction": reduction}))
    fewer, groups = without_dims(specs, [CLASSES]), [spec.group for spec in specs]
    with locals_only():
        local = align(logits, specs, len(shape))
        classes = align(target, specs, len(shape)) if likely else align(target, fewer, len(shape) - 1)
        each: Tensor = call.function(local, classes, **call.kwargs, reduction="none")
        if reduction == "none":
            return wrap_locals(each, fewer, call.rules)
        # sums of half precision might overflow
        total = sum_over(each.sum(dtype=torch.promote_types(each.dtype, torch.float32)), groups)
        if reduction == "mean":
            count = prod(shape) // shape[CLASSES] if likely else _weight(call, classes).to(total.dtype)
            total = total / (sum_over(count, groups) if isinstance(count, Tensor) else count)
        return total.to(each.dtype)


def _weight(call: Call, target: Tensor) -> Tensor:
    """What the classes of the targets that count weigh together."""
    weight, counted = call.kwargs.get("weight"), target != call.kwargs.get("ignore_index", IGNORED)
    if weight is None:
        return torch.sum(counted)
    weighed: Tensor = weight.detach()[target.clamp(0, len(weight) - 1)] * counted
    return torch.sum(weighed)


LOSSES: Mapping[str, Handler] = {
    name: _classified if name in ("cross_entropy", "nll_loss") else _itemwise for name in _NAMES
}
