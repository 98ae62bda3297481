"""Running statistics of which a rank keeps those of its own channels, made whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from galvatron_lite.parallelism.sharded.groups import AxisGroup
from galvatron_lite.parallelism.sharded.tensor import ShardSpec
from galvatron_lite.parallelism.tensor.functions import gather_shares


def gather_running(layer: nn.Module, line: AxisGroup) -> None:
    """Make running statistics right in all channels; all ranks of the line call it."""
    for module in layer.modules():
        with torch.no_grad():
            for buffer in (getattr(module, "running_mean", None), getattr(module, "running_var", None)):
                if isinstance(buffer, Tensor):
                    cut = ShardSpec(0, buffer.shape[0], line)
                    own = buffer.narrow(0, cut.start, cut.length).contiguous()
                    buffer.copy_(gather_shares(own, line, cut.extent, 0))
