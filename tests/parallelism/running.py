"""Parameters and running statistics of which every rank has a share, made whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from galvatron_lite.parallelism.sharded.collectives import gathered
from galvatron_lite.parallelism.sharded.groups import AxisGroup
from galvatron_lite.parallelism.sharded.tensor import ShardSpec
from galvatron_lite.parallelism.tensor.group import TensorGroup
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement


def gather_running(layer: nn.Module, line: AxisGroup) -> None:
    """Make running statistics right in all channels; all ranks of the line call it."""
    for module in layer.modules():
        with torch.no_grad():
            for buffer in (getattr(module, "running_mean", None), getattr(module, "running_var", None)):
                if isinstance(buffer, Tensor):
                    cut = ShardSpec(0, buffer.shape[0], line)
                    own = buffer.narrow(0, cut.start, cut.length).contiguous()
                    buffer.copy_(gather_shares(own, line, cut.extent, 0))


def gather_shares(local: Tensor, group: TensorGroup, extent: int, dim: int) -> Tensor:
    """The whole tensor from shares along a dim."""
    return gathered(local, ShardSpec(dim % local.dim(), extent, group))  # type: ignore[arg-type]


def gather_full(local: Tensor, shard: ParameterShard, group: TensorGroup) -> Tensor:
    """The whole tensor from every device's part; all devices of the group must call it.

    Replicated and partial tensors come back as they are: sum a partial gradient over the group first.
    """
    if shard.placement is not Placement.SHARDED:
        return local
    pieces = torch.split(local, [length for _, length in shard.ranges], shard.dim)
    gathered = [gather_shares(piece, group, n, shard.dim) for piece, n in zip(pieces, shard.parts, strict=True)]
    return torch.cat(gathered, shard.dim)
