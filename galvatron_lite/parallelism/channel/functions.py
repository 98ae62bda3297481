"""Collectives along shared channels.

By filters, whatever is whole is computed alike on every rank and its gradient is complete there, as in Megatron's
regions: the sum that closes a pair costs nothing in backward, and neither does a gather. By channels everything is cut,
and the adjoints of ``cuts.functions`` hold.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from galvatron_lite.parallelism.cuts.functions import scatter_sum, unviewed
from galvatron_lite.parallelism.cuts.tensor import Cut, Rules, cut_tensor, cuts_of, local_of
from galvatron_lite.parallelism.tensor.functions import gather_shares


def gather_complete(tensor: Tensor) -> Tensor:
    """The whole tensor from shares; of its gradient, which is complete on every rank, each takes its share."""
    gathered = local_of(tensor)
    for cut in cuts_of(tensor):
        gathered = _apply(_GatherComplete, gathered, cut)
    return gathered


def scatter_sums(partial: Tensor, cut: Cut, rules: Rules) -> Tensor:
    """Shares of the sum over the ranks of ``partial``, which has the whole shape; gradients are gathered."""
    return cut_tensor(_apply(_Scatter, partial, cut), (cut,), rules)


def _apply(function: type[Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


class _GatherComplete(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return unviewed(gather_shares(local.contiguous(), cut.line, cut.extent, cut.dim))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(ctx.cut.dim, ctx.cut.start, ctx.cut.length), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return unviewed(scatter_sum(partial, cut.line, cut.extent, cut.dim))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        cut = ctx.cut
        return gather_shares(gradient.contiguous(), cut.line, cut.extent, cut.dim), None
