"""Joining and leaving the world of processes that a launcher started."""

from __future__ import annotations

import os
import sys
import threading

import torch
from torch import distributed as dist

from galvatron_lite.errors import LaunchError

SAVER = "galvatron-save"
"""Name of threads that write checkpoints: no process ends before them."""


class Finishing(threading.Thread):
    """A thread that goes on until it is told to end; no process ends (``leave``) before it has."""

    def finish(self) -> None:
        """End, once all is written."""
        raise NotImplementedError


def pick_device(name: str = "auto") -> torch.device:
    """The device of this process: its own GPU where there is one, else the CPU.

    Args:
        name: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        LaunchError: a GPU was asked for, or more processes than GPUs were launched on this node.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError("device 'cuda' was asked for, but torch sees no GPU here. Use device='cpu', or a CUDA build.")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise LaunchError(f"Local rank {local} has no GPU: this node has {count}. Launch {count} processes a node.")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def join(device: torch.device) -> None:
    """Make sure there is a default process group: the launcher's world, or a world of this process alone."""
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)


def rank() -> int:
    """This process's rank; 0 where no world was joined."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Processes in the world; 1 where none was joined."""
    return dist.get_world_size() if dist.is_initialized() else 1


def leave() -> None:
    """End this process after its work is done and written; does not return where a world was joined.

    A gloo thread may still hold a tensor when the interpreter shuts down, which aborts the process although its work is
    done (pytorch issue 117762). So a script's last line is this: wait for the others, close the group, flush, exit.
    """
    if not dist.is_initialized():
        return
    for thread in threading.enumerate():
        if thread.name == SAVER:
            thread.join()
        elif isinstance(thread, Finishing):
            thread.finish()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
