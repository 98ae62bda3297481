"""DeepSpeed itself: imported late, told of the world that was joined, kept from compiling and from chatting."""

from __future__ import annotations

import logging
import os
import warnings
from types import ModuleType

import torch

from galvatron_lite.errors import LaunchError

INSTALL = "pip install 'deepspeed>=0.16'"
_SHARED_MEMORY = "deepspeed_shm_comm"


def load(device: torch.device) -> ModuleType:
    """The ``deepspeed`` module, its communication on the default process group, which must exist.

    Raises:
        LaunchError: it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
    except ImportError as error:
        remedy = f"The plan's backend is deepspeed, which is not installed here ({error}). Do: {INSTALL}"
        raise LaunchError(remedy) from error
    _quiet()
    if device.type == "cpu":
        _without_compiling()
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), dist_init_required=False)
    found: ModuleType = deepspeed
    return found


def _quiet() -> None:
    """Its notes are for its own command line; its calls of functions that torch renamed are for its authors."""
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    renamed = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)


def _without_compiling() -> None:
    """Leave out the collectives through shared memory, which DeepSpeed would compile (about 100 s, and with a compiler)
    at the first start on CPUs.

    There is no public switch: ``deepspeed.comm.torch`` asks this table, which is made when it is first read.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
