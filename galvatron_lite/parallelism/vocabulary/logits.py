"""Logits that are shares of the vocabulary, and losses of them: one small message a token, in forward.

Such logits are a sharded tensor whose functions know what they mean for shares (``losses``). To code that uses them
they are whole: what has no rule there is given whole logits, gathered once.

Source of the idea of the loss: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): ranks tell each other
figures of a token, not logits. Here they all go in one all-gather. Gradients are complete on every rank, as everywhere
in a tensor group and unlike those of other sharded tensors: that of the loss is the same on all, and each makes those
of its own columns from it alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, locals_only, to_local
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.functions import copy_to_group, gather_last, reduce_from_group
from galvatron_lite.parallelism.tensor.group import TensorGroup

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


FIGURES = 3
"""Of a token, that a rank tells the others: the greatest of its logits, the sum of their exponentials over that one's,
and the target's logit. With label smoothing there is one more."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The part of a vocabulary that a rank has."""

    group: TensorGroup  # ranks that share it
    extent: int  # items of the whole vocabulary; ranks have shares of it that may differ by one

    @property
    def start(self) -> int:
        """The first of this rank."""
        return share(self.extent, self.group.size, self.group.rank)[0]

    @property
    def length(self) -> int:
        """How many this rank has."""
        return share(self.extent, self.group.size, self.group.rank)[1]

    def place(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Where targets lie among this rank's columns, and whether they do; the first place where they do not."""
        local = targets - self.start
        here = (local >= 0) & (local < self.length)
        return local.masked_fill(~here, 0), here


def token_losses(
    logits: Tensor, targets: Tensor, columns: Columns, ignored: int = -100, smoothing: float = 0.0
) -> Tensor:
    """Cross entropy of each token (...), the same on every rank; in fp32 where logits are of half precision.

    Args:
        logits: (..., columns of this rank).
        targets: (...) classes of the whole vocabulary.
        columns: of this rank.
        ignored: class of targets whose loss is zero.
        smoothing: how much of the target is spread evenly over all classes.

    Raises:
        IndexError: a target that is no class (on a GPU, an assertion there).
    """
    check_classes(targets.masked_fill(targets == ignored, 0), columns.extent)
    losses: Tensor = _TokenLosses.apply(logits, targets, columns, ignored, smoothing)  # type: ignore[no-untyped-call]
    return losses


def check_classes(targets: Tensor, extent: int) -> None:
    """Let torch look whether targets are classes: an index into one item seen many times, which costs no memory."""
    targets.new_zeros(1).expand(extent).index_select(0, targets.reshape(-1))


def log_total(logits: Tensor, columns: Columns) -> Tensor:
    """Logarithm of the sum of exponentials over the whole vocabulary: (..., columns) to (...), on every rank."""
    total: Tensor = _LogTotal.apply(logits, columns)  # type: ignore[no-untyped-call]
    return total


def log_shares(logits: Tensor, columns: Columns) -> Tensor:
    """Logarithms of the softmax over the whole vocabulary: this rank's columns of it."""
    return logits - copy_to_group(log_total(logits, columns), columns.group).unsqueeze(-1)


def picked(values: Tensor, targets: Tensor, columns: Columns) -> Tensor:
    """From values (..., columns of this rank), those of classes (..., n) of the whole vocabulary, on every rank."""
    check_classes(targets, columns.extent)
    place, here = columns.place(targets)
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
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, columns: Columns, ignored: int, smoothing: float) -> Tensor:
        wide = _wide(logits)
        place, here = columns.place(targets)
        own = [wide.gather(-1, place.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)]
        own += [wide.sum(-1)] if smoothing else []
        everyone = _gather_figures([*_exponentials(wide, wide is not logits), *own], columns.group)
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
        place, here = columns.place(targets)
        likely.scatter_add_(-1, place.unsqueeze(-1), here.to(likely.dtype).mul_(smoothing - 1).unsqueeze(-1))
        likely.mul_(gradient.masked_fill(targets == ignored, 0).unsqueeze(-1))
        return likely.to(logits.dtype), None, None, None, None


class _LogTotal(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Columns) -> Tensor:
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
