"""Gathered inputs that autograd keeps as shards: gathered in forward, and once more in backward.

Under sequence parallelism the columns of a region read all tokens. Their backward needs that input for the gradient of
the weights. To keep it takes as much memory on every device as without tensor parallelism; so each device keeps its own
tokens, and one more all-gather in backward brings the others (Korthikanti et al. 2022, arXiv:2205.05198, 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from galvatron_lite.parallelism.tensor.functions import TOKENS, gather_tokens
from galvatron_lite.parallelism.tensor.group import TensorGroup

View = tuple[torch.Size, tuple[int, ...], int]
"""Shape, strides and offset of a view of the gathered input."""


class GatheredInput:
    """What backward needs of the gathered input of a region, in one forward pass.

    Autograd keeps the shard with the node of the gather, so that hooks of saved tensors (offloading) see it.

    Args:
        group: the devices that share the tokens.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._node: Any = None
        self._storage = self._uses = 0
        self._again: Tensor | None = None

    def note(self, node: Any, gathered: Tensor) -> None:
        """Take the gather's node, which saves the shard, and its result; see ``gather_tokens``."""
        self._node, self._storage = node, _storage_of(gathered)

    def call(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Call a column, for which the gathered input is not kept."""
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
        if self._uses <= 0:  # the first column in backward gathers for the others
            self._again = None
        return view


def enter_region(shard: Tensor, group: TensorGroup) -> tuple[Tensor, GatheredInput | None]:
    """Gather the tokens of a region's input.

    Returns:
        All tokens, and what calls the columns; None where they keep what autograd keeps by itself: a compiler decides
        that for itself, and without a gradient of the input there is no node to keep the shard.
    """
    if not shard.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gather_tokens(shard, group), None
    kept = GatheredInput(group)
    return gather_tokens(shard, group, kept.note), kept


def _storage_of(tensor: Tensor) -> int:
    """Identity of a tensor's memory, also of tensors without data (``data_ptr`` is 0 on the meta device)."""
    return int(tensor.untyped_storage()._cdata)
