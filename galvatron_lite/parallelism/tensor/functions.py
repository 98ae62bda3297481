"""Collectives of tensor parallelism with gradients, in the pairs of Megatron-LM.

Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198. The gradient of a replicated
activation is replicated: it is complete on each device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from galvatron_lite.parallelism.recompute.sums import kept_sum
from galvatron_lite.parallelism.sharded.collectives import gathered
from galvatron_lite.parallelism.sharded.groups import AxisGroup
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


SaveTensor = Callable[[Any, Tensor], None]
"""Called with the autograd node of a gather, which saves the shard, and with the gathered tensor."""


def gather_tokens(tensor: Tensor, group: TensorGroup, dim: int = TOKENS, keeper: SaveTensor | None = None) -> Tensor:
    """Token shards [batch, tokens / size, hidden] become all tokens: all-gather in forward, reduce-scatter in backward.

    With a ``keeper``, the gather's node saves the shard (``GatheredInput``).
    """
    return _apply(_Gather, tensor, group, dim, keeper)


def reduce_scatter_tokens(tensor: Tensor, group: TensorGroup, dim: int = TOKENS) -> Tensor:
    """Partial sums [batch, tokens, hidden] become token shards: reduce-scatter in forward, all-gather in backward."""
    return _apply(_ReduceScatter, tensor, group, dim)


def gather_last(tensor: Tensor, group: TensorGroup, extent: int) -> Tensor:
    """Column shards (by ``share``) become a replicated tensor [..., extent]; backward takes the local columns."""
    return _apply(_GatherLast, tensor, group, extent)


def _apply(function: type[Function], tensor: Tensor, *more: Any) -> Tensor:
    """Apply a function to the local part of a tensor; the result of a ``ShardedTensor`` is sharded in the same dims.

    Functions that gather or scatter tokens do so within the local part, which changes the global extent.
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


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int, keeper: SaveTensor | None) -> Tensor:
        ctx.group, ctx.dim = group, dim
        gathered = group.all_gather(tensor, dim)
        if keeper is not None:
            ctx.save_for_backward(tensor)
            keeper(ctx, gathered)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.reduce_scatter(gradient, ctx.dim), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return kept_sum(lambda: group.reduce_scatter(tensor, dim))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.all_gather(gradient, ctx.dim), None, None


class _GatherLast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, extent: int) -> Tensor:
        ctx.start, ctx.length = share(extent, group.size, group.rank)
        # only the group's size, rank and all-gather are used
        return gathered(tensor, ShardSpec(tensor.dim() - 1, extent, cast("AxisGroup", group)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.narrow(-1, ctx.start, ctx.length), None, None


View = tuple[torch.Size, tuple[int, ...], int]
"""Shape, strides and offset of a view of the gathered input."""


class GatheredInput:
    """The gathered input of a region, of which autograd saves only the shard and which backward gathers again.

    Under sequence parallelism the columns of a region read all tokens, and need them again for the gradient of their
    weights. To save all tokens would take as much memory as without tensor parallelism, so each device saves its shard,
    for one more all-gather in backward (Korthikanti et al. 2022, arXiv:2205.05198, 4.2.2). The node of the gather saves
    the shard, so that hooks of saved tensors (offloading) see it.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._node: Any = None
        self._storage = self._uses = 0
        self._again: Tensor | None = None

    def note(self, node: Any, gathered: Tensor) -> None:
        """See ``SaveTensor``."""
        self._node, self._storage = node, _storage_of(gathered)

    def call(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Call a column without saving the gathered input."""
        with saved_tensors_hooks(self._pack, self._unpack):
            return forward(*args, **kwargs)

    def _pack(self, saved: Tensor) -> Tensor | View:
        if _storage_of(saved) != self._storage:
            return saved
        self._uses += 1
        return saved.shape, saved.stride(), int(saved.storage_offset())

    def _unpack(self, packed: Tensor | View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._again is None:
            (shard,) = self._node.saved_tensors
            self._again = self._group.all_gather(shard, TOKENS)
        view = self._again.as_strided(*packed)
        self._uses -= 1
        if self._uses <= 0:  # all columns have used the tensor that the first of them gathered
            self._again = None
        return view


def enter_region(shard: Tensor, group: TensorGroup) -> tuple[Tensor, GatheredInput | None]:
    """Gather the tokens of a region's input.

    Returns:
        All tokens, and the object that calls the columns; None if autograd saves what it saves by default: a compiler
        decides this by itself, and without a gradient of the input there is no node that could save the shard.
    """
    if not shard.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gather_tokens(shard, group), None
    kept = GatheredInput(group)
    return gather_tokens(shard, group, keeper=kept.note), kept


def _storage_of(tensor: Tensor) -> int:
    """Return an identity of a tensor's memory that holds on the meta device too, where ``data_ptr`` is 0."""
    return int(tensor.untyped_storage()._cdata)
