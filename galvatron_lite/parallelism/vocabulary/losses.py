"""Losses of logits that are shares of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from galvatron_lite.parallelism.sharded.calls import argument, arguments, handled_by, input_first
from galvatron_lite.parallelism.sharded.groups import AxisGroup
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Rules,
    ShardedTensor,
    ShardSpec,
    from_local,
    locals_only,
    wrap_locals,
)
from galvatron_lite.parallelism.tensor.group import TensorGroup
from galvatron_lite.parallelism.vocabulary.logits import WHAT, columns_last, columns_of
from galvatron_lite.parallelism.vocabulary.loss import log_shares, log_total, picked, token_losses
from galvatron_lite.parallelism.vocabulary.rules import SHAPES, otherwise

CLASSES = 1
"""Dim of the classes in logits (samples, classes, ...); 0 in those of one sample, (classes)."""


def _cross_entropy(call: Call) -> Any:
    """Of classes by their number; other targets (likelihoods) and weights of classes are for whole logits."""
    given = arguments(call, functional.cross_entropy)
    if not _is_plain(given):
        return otherwise(call)
    logits, targets = given["input"], given["target"]
    with locals_only():
        own, ignored = columns_last(logits), given["ignore_index"]
        losses = token_losses(own, targets, columns_of(logits), ignored, given["label_smoothing"])
        return _narrow(_reduced(losses, targets, ignored, given["reduction"]), own)


def _nll_loss(call: Call) -> Any:
    """Of logarithms of likelihoods."""
    given = arguments(call, functional.nll_loss)
    if not _is_plain(given):
        return otherwise(call)
    likely, targets, ignored = given["input"], given["target"], given["ignore_index"]
    with locals_only():
        counted = targets.masked_fill(targets == ignored, 0).unsqueeze(-1)
        losses = -picked(columns_last(likely), counted, columns_of(likely)).squeeze(-1)
        return _reduced(losses.masked_fill(targets == ignored, 0), targets, ignored, given["reduction"])


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
        return otherwise(call)
    with locals_only():
        own = columns_last(logits) if dtype is None else columns_last(logits).to(dtype)
        made = _narrow(log_shares(own, columns_of(logits)), own)
        made = (made if call.name == "log_softmax" else made.exp()).movedim(-1, logits.specs[0].dim)
        return wrap_locals(made, logits.specs, call.rules)


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
        return otherwise(call)
    with locals_only():
        own = columns_last(logits)
        total = _narrow(log_total(own, columns_of(logits)), own)
        return total.unsqueeze(logits.specs[0].dim) if argument(call, 2, "keepdim", False) else total


def _gather(call: Call) -> Any:
    """Values of classes by their number, as many tokens as there are."""
    call = input_first(call)
    values, dim, index = call.args[0], argument(call, 1, "dim"), argument(call, 2, "index")
    if not _is_over_columns(values, dim) or isinstance(index, ShardedTensor):
        return otherwise(call)
    place = values.specs[0].dim
    with locals_only():
        found = picked(columns_last(values), index.movedim(place, -1), columns_of(values))
        return found.movedim(-1, place)


LOGITS = Rules(
    {
        **SHAPES,
        **handled_by(_softmax, "softmax log_softmax"),
        "cross_entropy": _cross_entropy,
        "nll_loss": _nll_loss,
        "logsumexp": _logsumexp,
        "gather": _gather,
    },
    otherwise,
    pins=("tensor",),
    what=WHAT,
)
"""What functions do with a head's logits."""


def shared_logits(local: Tensor, group: TensorGroup, extent: int) -> Tensor:
    """A head's own columns (..., columns) as logits (..., extent) of the whole vocabulary.

    Args:
        local: that nobody else holds.
        group: ranks with one share each.
        extent: of the vocabulary.
    """
    # of a line of ranks only their number, the own place and all-gathers are asked for
    return from_local(local, (ShardSpec(local.dim() - 1, extent, cast("AxisGroup", group)),), LOGITS)
