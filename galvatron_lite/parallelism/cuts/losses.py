"""Losses of cut predictions: sums over the shares, added over the lines. What is reduced is whole on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.parallelism.cuts.alignment import at, broadcast, brought, common_cuts, first_cuts, moved
from galvatron_lite.parallelism.cuts.along import without
from galvatron_lite.parallelism.cuts.calls import fronted, handled_by, tensors_of
from galvatron_lite.parallelism.cuts.fallback import on_whole
from galvatron_lite.parallelism.cuts.functions import sum_over
from galvatron_lite.parallelism.cuts.line import Line
from galvatron_lite.parallelism.cuts.pointwise import pointwise
from galvatron_lite.parallelism.cuts.tensor import (
    Call,
    Cuts,
    CutTensor,
    Handler,
    cut_like,
    cuts_of,
    shares_only,
    whole_shape,
)

CLASSES = 1
"""Dim of the classes in logits (samples, classes, ...)."""

_LEGACY = ("size_average", "reduce", "reduction")


def _reduction(call: Call) -> str:
    """``reduction``, or what the older ``size_average`` and ``reduce`` said."""
    average, reduce = call.kwargs.get("size_average"), call.kwargs.get("reduce")
    if average is None and reduce is None:
        return str(call.kwargs.get("reduction", "mean"))
    if reduce is False:
        return "none"
    return "sum" if average is False else "mean"


def _named(call: Call) -> Call:
    """The call with everything behind prediction and target given by name."""
    call = fronted(call)
    names = _NAMES[call.name].split()[2 : len(call.args)]
    given = {**dict(zip(names, call.args[2:], strict=False)), **call.kwargs}
    first = [*call.args[:2], *(given.pop(name) for name in ("input", "target") if name in given)]
    return call._replace(args=tuple(first), kwargs=given)


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


def _itemwise(call: Call) -> Any:
    """Losses of each item by itself, which are then averaged or summed over all."""
    call = _named(call)
    reduction = _reduction(call)
    more = {name: one for name, one in call.kwargs.items() if name not in _LEGACY}
    if reduction == "none":
        return pointwise(call._replace(kwargs={**more, "reduction": "none"}))
    tensors = tensors_of(call)
    with shares_only():
        shape = broadcast(*map(whole_shape, tensors))
        cuts = common_cuts(tensors)
        args = [brought(one, cuts, len(shape)) for one in call.args]
        given = {n: brought(one, cuts, len(shape)) if isinstance(one, Tensor) else one for n, one in more.items()}
        held, everything = prod(broadcast(*(one.shape for one in args))), prod(shape)
        # the mean of a share, weighed by its items: sums of half precision might overflow
        average = reduction != "sum" and held > 0
        part = call.function(*args, **given, reduction="mean" if average else "sum")
        count = {"sum": 1, "batchmean": shape[0] if shape else 1}.get(reduction, everything)
        return sum_over(part * (held / count) if average else part / count, [cut.line for cut in cuts])


def _classified(call: Call) -> Any:
    """``cross_entropy`` and ``nll_loss`` of logits (samples, classes, ...) cut along other dims than the classes."""
    call = _named(call)
    logits, target = call.args
    shape, likely = whole_shape(logits), whole_shape(logits) == whole_shape(target)
    cuts = first_cuts([cuts_of(logits), cuts_of(target) if likely else _with_classes(cuts_of(target))])
    if len(shape) < 2 or at(cuts, CLASSES) is not None or isinstance(call.kwargs.get("weight"), CutTensor):
        return on_whole(call)
    fewer = without(cuts, [CLASSES])
    with shares_only():
        own = brought(logits, cuts, len(shape))
        wanted = brought(target, cuts, len(shape)) if likely else brought(target, fewer, len(shape) - 1)
        more = {name: one for name, one in call.kwargs.items() if name not in _LEGACY}
        each = call.function(own, wanted, **more, reduction="none")
        if _reduction(call) == "none":
            return cut_like(each, fewer, call.rules)
        samples = prod(shape) // shape[CLASSES] if likely else _weight(call, wanted)
        return _reduced(each, samples, [cut.line for cut in cuts], _reduction(call))


def _with_classes(cuts: Cuts) -> Cuts:
    """Cuts of classes (samples, ...) as those of logits (samples, classes, ...)."""
    return tuple(moved(cut, cut.dim + (cut.dim >= CLASSES)) for cut in cuts)


def _reduced(each: Tensor, samples: int | Tensor, lines: list[Line], reduction: str) -> Tensor:
    """The sum or mean of losses; samples are counted in all (a number) or on this rank (a tensor)."""
    # sums of half precision might overflow
    total = sum_over(each.sum(dtype=torch.promote_types(each.dtype, torch.float32)), lines)
    if reduction == "mean":
        total = total / (sum_over(samples.to(total.dtype), lines) if isinstance(samples, Tensor) else samples)
    return total.to(each.dtype)


def _weight(call: Call, target: Tensor) -> Tensor:
    """What the classes of targets weigh together, but those that are ignored."""
    weight, counted = call.kwargs.get("weight"), target != call.kwargs.get("ignore_index", IGNORED)
    if weight is None:
        return torch.sum(counted)
    weighed: Tensor = weight.detach()[target.clamp(0, len(weight) - 1)] * counted
    return torch.sum(weighed)


IGNORED = -100
"""Class of targets that do not count, by torch's default."""

HANDLERS: Mapping[str, Handler] = {
    **handled_by(_classified, "cross_entropy nll_loss"),
    **dict.fromkeys([name for name in _NAMES if name not in ("cross_entropy", "nll_loss")], _itemwise),
}
