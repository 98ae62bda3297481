"""Runs training loops of other libraries unchanged around a parallel model.

In a launched world such loops shard batches and wrap the model themselves. Here the model is split already and every
process passes the same batches, so each process must look like the only one.
"""

from __future__ import annotations

import os

from galvatron_lite.cluster.probe import HIDDEN_LOCAL
from galvatron_lite.world import join, pick_device

_WORLD_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE",
)  # fmt: skip
"""Environment variables that describe torchrun's world."""


def as_one_process(device: str = "auto") -> None:
    """Join the launched world, and hide it from libraries that are imported or set up afterwards.

    Call it first, before anything uses a GPU: each process then sees a single GPU. All processes must draw the same
    batches (the same seed), as one process does. Let rank 0 (``torch.distributed.get_rank()``) write files.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        LaunchError: no GPU for this process.
    """
    local = os.environ.get("LOCAL_RANK")
    if local is not None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(local)] if int(local) < len(visible) else local
        os.environ["LOCAL_RANK"] = "0"
    join(pick_device(device))
    if "LOCAL_WORLD_SIZE" in os.environ:
        os.environ[HIDDEN_LOCAL] = os.environ["LOCAL_WORLD_SIZE"]
    for name in _WORLD_VARIABLES:
        os.environ.pop(name, None)
