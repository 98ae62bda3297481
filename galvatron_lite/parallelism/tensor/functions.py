"""Collectives of tensor parallelism that autograd understands.

The pairs are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198).
Convention: the gradient of a replicated activation is replicated, that is, already complete on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from galvatron_lite.parallelism.recompute.sums import kept_sum
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, ShardSpec, from_local, to_local
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.group import TensorGroup

TOKENS = 1
"""Dim of the tokens in a hidden state [batch, tokens, hidden]."""


def copy_to_group(tensor: Tensor, group: TensorGroup) -> Tensor:
    """A replicated tensor enters a sharded region: identity in forward, sum over the group in backward."""
    return _apply(_Copy, tensor, group)


def reduce_from_group(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Partial sums leave a sharded region: sum over the group in forward, identity in backward."""
    return _apply(_Reduce, tensor, group)


def gather_rows(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Every device's rows (tokens, ...), as many of each: all-gather in forward, reduce-scatter in backward."""
    return _apply(_GatherRows, tensor, group)


def reduce_scatter_rows(tensor: Tensor, group: TensorGroup) -> Tensor:
    """This device's rows of the sum over the group: reduce-scatter in forward, all-gather in backward."""
    return _apply(_ReduceScatterRows, tensor, group)


Keeper = Callable[[Any, Tensor], None]
"""Is given the autograd node of a gather, which saves the shard, and the gathered tensor."""


def gather_tokens(tensor: Tensor, group: TensorGroup, keeper: Keeper | None = None) -> Tensor:
    """Token shards [batch, tokens / size, hidden] enter a sharded region whole.

    All-gather along the tokens in forward, reduce-scatter in backward.

    Args:
        tensor: this device's shard.
        group: the devices that share the tokens.
        keeper: given where autograd is to save the shard with the gather's node (``parallelism.tensor.regather``).
    """
    return _apply(_GatherTokens, tensor, group, keeper)


def reduce_scatter_tokens(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Partial sums [batch, tokens, hidden] leave a sharded region as token shards.

    Reduce-scatter along the tokens in forward, all-gather in backward.
    """
    return _apply(_ReduceScatterTokens, tensor, group)


def gather_last(tensor: Tensor, group: TensorGroup, extent: int) -> Tensor:
    """Column shards become one replicated tensor [..., extent]; the gradient's local columns flow back.

    The columns are shared out as ``share`` says: the first ``extent % size`` devices hold one more.
    """
    return _apply(_GatherLast, tensor, group, extent)


def gather_shares(local: Tensor, group: TensorGroup, extent: int, dim: int) -> Tensor:
    """The whole tensor from shares along ``dim`` that may differ by one in length. No autograd."""
    if extent % group.size == 0:
        return group.all_gather(local, dim)
    longest = share(extent, group.size, 0)[1]
    padding = [0, 0] * (local.dim() - 1 - dim % local.dim()) + [0, longest - local.shape[dim]]
    gathered = group.all_gather(torch.nn.functional.pad(local, padding), dim)
    lengths = [share(extent, group.size, rank)[1] for rank in range(group.size)]
    return torch.cat([gathered.narrow(dim, rank * longest, length) for rank, length in enumerate(lengths)], dim)


def _apply(function: type[Function], tensor: Tensor, *more: Any) -> Tensor:
    """Of a tensor whose tokens context parallelism shares: of the share, and the result is shared alike.

    What joins or splits tokens does so within the share; code that uses the result then sees as many tokens as all
    shares have.
    """
    local = to_local(tensor)
    result: Tensor = function.apply(local, *more)  # type: ignore[no-untyped-call]
    if not isinstance(tensor, ShardedTensor):
        return result
    cuts = tuple(
        ShardSpec(cut.dim, cut.extent * result.shape[cut.dim] // local.shape[cut.dim], cut.group)
        for cut in tensor.specs
    )
    return from_local(result, cuts, tensor.rules)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(gradient), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:  # noqa: ARG004
        return kept_sum(lambda: group.all_reduce(tensor))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradient, None


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, keeper: Keeper | None) -> Tensor:
        ctx.group = group
        gathered = group.all_gather(tensor, TOKENS)
        if keeper is not None:
            ctx.save_for_backward(tensor)
            keeper(ctx, gathered)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.reduce_scatter(gradient, TOKENS), None, None


class _ReduceScatterTokens(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return kept_sum(lambda: group.reduce_scatter(tensor, TOKENS))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(gradient, TOKENS), None


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.all_gather(tensor, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.reduce_scatter(gradient, 0), None


class _ReduceScatterRows(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.reduce_scatter(tensor, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(gradient, 0), None


class _GatherLast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, extent: int) -> Tensor:
        ctx.start, ctx.length = share(extent, group.size, group.rank)
        return gather_shares(tensor, group, extent, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.narrow(-1, ctx.start, ctx.length), None, None
