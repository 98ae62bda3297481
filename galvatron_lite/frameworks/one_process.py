"""Training loops of other libraries: what they need to run unchanged around a model that is split.

Such loops share out batches and wrap the model by themselves where they see several processes. Here every process gives
the same batches, and the model is split already: each is to believe that it is alone.
"""

from __future__ import annotations

import os

from galvatron_lite.cluster.probe import HIDDEN_LOCAL
from galvatron_lite.world import join, pick_device

_SEEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE")
"""Variables by which libraries see torchrun's world."""


def as_one_process(device: str = "auto") -> None:
    """Join the launched world, and hide it from libraries that are imported or set up afterwards.

    Call it first, before anything uses a GPU: each process then sees its own GPU only. Every process must draw the same
    batches (the same seed), as one process does; what is written to disk is best written by rank 0 alone
    (``torch.distributed.get_rank()``).

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        LaunchError: there is no GPU for this process.
    """
    local = os.environ.get("LOCAL_RANK")
    if local is not None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(local)] if int(local) < len(visible) else local
        os.environ["LOCAL_RANK"] = "0"
    join(pick_device(device))
    if "LOCAL_WORLD_SIZE" in os.environ:
        os.environ[HIDDEN_LOCAL] = os.environ["LOCAL_WORLD_SIZE"]
    for name in _SEEN:
        os.environ.pop(name, None)
