"""Logits that are shares of the vocabulary: a cut tensor whose functions know what they mean for shares.

To code that uses them they are whole: what has no rule here is given whole logits, gathered once. Gradients are
complete on every rank, unlike those of other cut tensors (``cuts.tensor``): that of a share is that of its columns.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from galvatron_lite.parallelism.sharded.tensor import Call, ShardedTensor, locals_only, to_local
from galvatron_lite.parallelism.tensor.functions import gather_last
from galvatron_lite.parallelism.vocabulary.loss import Columns

WHAT = "vocabulary"


def is_shared(value: object) -> bool:
    """Whether a value is logits that are shares."""
    # cut tensors that are yet to be brought into the layout of code between layers have no rules
    return isinstance(value, ShardedTensor) and getattr(getattr(value, "rules", None), "what", "") == WHAT


def whole_logits(tensor: Tensor) -> Tensor:
    """Logits as a plain tensor, gathered where they are shares and have not been before; others as they are."""
    if not is_shared(tensor):
        return tensor
    shares = cast("ShardedTensor", tensor)
    with locals_only():
        stamp = shares._version, torch.is_grad_enabled()
    known = getattr(shares, "gathered", None)
    if known is None or known[0] != stamp:
        (cut,) = shares.specs
        last = to_local(shares).movedim(cut.dim, -1)
        known = stamp, gather_last(last, cut.group, cut.extent).movedim(-1, cut.dim)
        shares.gathered = known  # type: ignore[attr-defined]
    return cast("Tensor", known[1])


def columns_of(tensor: ShardedTensor) -> Columns:
    """Which columns a share has."""
    return Columns(tensor.specs[0].group, tensor.specs[0].extent)


def columns_last(tensor: ShardedTensor) -> Tensor:
    """The share as a plain tensor whose last dim are the columns."""
    return to_local(tensor).movedim(tensor.specs[0].dim, -1)


def everything_whole(call: Call) -> Any:
    """The call with whole logits for shares."""
    return call.function(*_with_whole_logits(call.args), **_with_whole_logits(call.kwargs))


def _with_whole_logits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return whole_logits(value)
    if isinstance(value, dict):
        return {name: _with_whole_logits(one) for name, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)([_with_whole_logits(one) for one in value])
    return value
