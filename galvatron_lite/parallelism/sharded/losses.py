"""Losses of sharded predictions: sums over the shards, added over the ranks; every rank has the reduced loss."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.parallelism.sharded.calls import (
    align,
    align_all,
    broadcast,
    common_specs,
    first_specs,
    input_first,
    on_full,
    spec_at,
    tensors_among,
    without_dims,
)
from galvatron_lite.parallelism.sharded.collectives import sum_over
from galvatron_lite.parallelism.sharded.pointwise import pointwise
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    ShardedTensor,
    global_shape,
    locals_only,
    specs_of,
    wrap_locals,
)

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
        held = prod(broadcast(*(one.shape for one in local.args)))
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


HANDLERS: Mapping[str, Handler] = {
    name: _classified if name in ("cross_entropy", "nll_loss") else _itemwise for name in _NAMES
}
