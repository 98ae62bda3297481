"""Functions along some dims (softmax, sort, split, flip, reductions), products that sum over dims, and losses.

Sums, means and norms over sharded dims are computed on shards and combined over the ranks. For all other functions the
tensor is gathered along the dims that they work along.
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
"""Dtypes whose sums are computed in float32."""


def _from_front(dims: Any, count: int) -> tuple[int, ...]:
    """Count dims from the front; None or, for ``var``, a bool means all dims."""
    if dims is None or isinstance(dims, bool):
        return tuple(range(count))
    listed = dims if isinstance(dims, (tuple, list)) else (dims,)
    return tuple(dim % count for dim in listed)


def along(position: int, default: Any = None, name: str = "dim", drops: bool = False, keepdim: int = 0) -> Handler:
    """Return a handler of functions that work along some dims of a tensor; sharded ones among these are gathered first.

    Args:
        position: of the argument with the dims.
        default: of that argument; None means all dims.
        name: of that argument.
        drops: whether the result lacks the dims.
        keepdim: position of the argument that keeps them nevertheless; 0 if there is none.
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
    items: int  # of the global tensor that one item of the result combines


def _reduction(tensor: ShardedTensor, dims: Any, keepdim: bool) -> _Reduction:
    shape = global_shape(tensor)
    dims = _from_front(None if dims in ((), []) else dims, len(shape))
    specs = tuple(spec for spec in tensor.specs if spec.dim not in dims)
    groups = [spec.group for spec in tensor.specs if spec.dim in dims]
    return _Reduction(
        dims, keepdim, groups, specs if keepdim else without_dims(specs, dims), prod(shape[dim] for dim in dims)
    )


def _sum_or_mean(call: Call) -> Any:
    """Sum tensors of half precision in float32 over the ranks: one process rounds only the total, too."""
    call = input_first(call)
    tensor = call.args[0]
    if not isinstance(tensor, ShardedTensor):
        return on_full(call)
    reduction = _reduction(tensor, argument(call, 1, "dim"), bool(argument(call, 2, "keepdim", False)))
    with locals_only():
        dtype = call.kwargs.get("dtype") or (tensor.dtype if tensor.is_floating_point() else None)
        if not reduction.groups or (call.name == "mean" and dtype is None):  # which torch refuses
            return wrap_locals(call.function(*call.args, **call.kwargs), reduction.specs, call.rules)
        wide = torch.float32 if dtype in HALF else dtype
        total = sum_over(tensor.sum(reduction.dims, reduction.keepdim, dtype=wide), reduction.groups)
        total = total / reduction.items if call.name == "mean" else total
        return wrap_locals(total if dtype is None else total.to(dtype), reduction.specs, call.rules)


_NORMED = along(2, drops=True, keepdim=3)


def _norm(call: Call) -> Any:
    """A vector norm of a finite order is the norm of the ranks' norms; other norms are computed on gathered tensors."""
    call = input_first(call)
    tensor, dims = call.args[0], argument(call, 2, "dim")
    order = argument(call, 1, "ord" if call.name.startswith("linalg") else "p")
    matrix = call.name == "linalg_norm" and order is not None and isinstance(dims, tuple | None)
    order = 2 if order in ("fro", None) else order
    if not isinstance(tensor, ShardedTensor) or matrix or isinstance(order, str) or not 0 < order < torch.inf:
        return _NORMED(call)
    reduction = _reduction(tensor, dims, bool(argument(call, 3, "keepdim", False)))
    if not reduction.groups:
        return _NORMED(call)
    with locals_only():
        result: Tensor = torch.linalg.vector_norm(
            tensor, order, reduction.dims, reduction.keepdim, dtype=call.kwargs.get("dtype")
        )
        for group in reduction.groups:
            norms = gather_dims(result.unsqueeze(0), [ShardSpec(0, group.size, group)])
            result = torch.linalg.vector_norm(norms, order, 0)
    return wrap_locals(result, reduction.specs, call.rules)


HANDLERS: Mapping[str, Handler] = {
    **handled_by(_sum_or_mean, "sum mean"),
    # ``max(x)``, ``max(x, dim)`` (with indices) and ``max(x, y)``
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
# Dims have letters as in Einstein's convention. A dim that is sharded in one operand is sharded equally in all operands
# with its letter. If it is summed over, every rank has a part of the sum, and the group adds the parts.


def _contract(
    call: Call, function: Callable[..., Any], operands: Sequence[Tensor], labels: Sequence[str], result: str
) -> Any:
    """Compute a product on shards.

    Args:
        call: of the product.
        function: of the operands' shards.
        operands: tensors.
        labels: letters of the dims of each operand.
        result: letters of the dims of the result.
    """
    letters = sorted(set("".join(labels)))
    pairs = list(zip(operands, labels, strict=True))
    specs = {
        letters[spec.dim]: spec
        for spec in first_specs(
            [spec.at_dim(letters.index(label[spec.dim])) for spec in specs_of(operand)] for operand, label in pairs
        )
    }
    if any(
        global_shape(operand)[label.index(letter)] != spec.extent
        for letter, spec in specs.items()
        for operand, label in pairs
        if letter in label
    ):
        return on_full(call)
    with locals_only():
        aligned = (align(operand, _specs_of_letters(label, specs), len(label)) for operand, label in pairs)
        local = function(*aligned)
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
    """``linear``: the bias is added to complete sums."""
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
    """``scaled_dot_product_attention``: each rank has its queries, and the keys and values of all ranks."""
    options = named_arguments(call, ATTENTION)
    query, key, value, mask = (options.pop(name) for name in ("query", "key", "value", "attn_mask"))
    dims = len(global_shape(query))
    specs = tuple(spec for spec in specs_of(query) if spec.dim < dims - 1)
    # the pattern of masks and dropout depends on the position of queries
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


# Losses of sharded predictions: every rank sums over its shard, and ranks add the sums. All have the reduced loss.


CLASSES = 1
"""Dim of the classes in logits (samples, classes, ...)."""
IGNORED = -100
"""Class of targets that do not count, torch's default."""

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
    """Name all arguments after prediction and target, and take the reduction out of them."""
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
    """Losses of single items, which are averaged or summed."""
    call, reduction = _parsed(call)
    if reduction == "none":
        return pointwise(call._replace(kwargs={**call.kwargs, "reduction": "none"}))
    tensors = tensors_among(call)
    with locals_only():
        shape = broadcast(*map(global_shape, tensors))
        specs = common_specs(tensors)
        local = align_all(call, specs, len(shape))
        held = prod(broadcast(*(arg.shape for arg in local.args)))
        # the mean of a shard, weighted by its items: sums of half precision might overflow
        average = reduction != "sum" and held > 0
        part = call.function(*local.args, **local.kwargs, reduction="mean" if average else "sum")
        count = {"sum": 1, "batchmean": shape[0] if shape else 1}.get(reduction, prod(shape))
        return sum_over(part * (held / count) if average else part / count, [spec.group for spec in specs])


def _classified(call: Call) -> Any:
    """``cross_entropy`` and ``nll_loss`` of logits (samples, classes, ...) not sharded along the classes."""
    call, reduction = _parsed(call)
    logits, target = call.args
    shape = global_shape(logits)
    probabilities = shape == global_shape(target)  # of all classes; else the target has class indices (samples, ...)
    target_specs = specs_of(target)
    if not probabilities:
        target_specs = tuple(spec.at_dim(spec.dim + (spec.dim >= CLASSES)) for spec in target_specs)
    specs = first_specs([specs_of(logits), target_specs])
    if len(shape) < 2 or spec_at(specs, CLASSES) is not None or isinstance(call.kwargs.get("weight"), ShardedTensor):
        return on_full(call._replace(kwargs={**call.kwargs, "reduction": reduction}))
    loss_specs, groups = without_dims(specs, [CLASSES]), [spec.group for spec in specs]
    with locals_only():
        local = align(logits, specs, len(shape))
        local_target = align(target, specs if probabilities else loss_specs, len(shape) - (not probabilities))
        losses: Tensor = call.function(local, local_target, **call.kwargs, reduction="none")
        if reduction == "none":
            return wrap_locals(losses, loss_specs, call.rules)
        # sums of half precision might overflow
        total = sum_over(losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)), groups)
        if reduction == "mean":
            count = prod(shape) // shape[CLASSES] if probabilities else _weight(call, local_target).to(total.dtype)
            total = total / (sum_over(count, groups) if isinstance(count, Tensor) else count)
        return total.to(losses.dtype)


def _weight(call: Call, target: Tensor) -> Tensor:
    """The total weight of the targets that count."""
    weight, counted = call.kwargs.get("weight"), target != call.kwargs.get("ignore_index", IGNORED)
    if weight is None:
        return torch.sum(counted)
    weights: Tensor = weight.detach()[target.clamp(0, len(weight) - 1)] * counted
    return torch.sum(weights)


LOSSES: Mapping[str, Handler] = {
    name: _classified if name in ("cross_entropy", "nll_loss") else _itemwise for name in _NAMES
}
