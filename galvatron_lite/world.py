"""Joining and leaving the world of processes that a launcher started."""

from __future__ import annotations

import os
import sys
import threading
from time import monotonic, sleep
from uuid import uuid4

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from galvatron_lite.errors import LaunchError

DRY_BACKEND = "galvatron_dry"
"""Backend of dry runs, whose messages carry no data."""
SAVER = "galvatron-save"
"""Name of threads that write checkpoints: no process ends before them."""


class Finishing(threading.Thread):
    """A thread that goes on until it is told to end; no process ends (``leave``) before it has."""

    def finish(self) -> None:
        """End, once all is written."""
        raise NotImplementedError


def messages_carry_data() -> bool:
    """Whether ranks can compare values: not in dry runs."""
    return dist.get_backend() != DRY_BACKEND


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
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank, size, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), dist.default_pg_timeout
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=timeout)
        attempt = PrefixStore(agree_on_attempt(store, rank, size, timeout.total_seconds()), store)
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=size)
    elif "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)


def agree_on_attempt(store: Store, rank: int, size: int, timeout: float) -> str:
    """A new name that all ranks of this start share; each rank calls it once.

    torchrun keeps its store when it starts workers again, with the keys by which those before them met, and its restart
    count differs between nodes. So rank 0 makes up a name and answers tickets, which are as new as the workers that
    draw them, until every rank has confirmed that name.

    Args:
        store: of the launcher.
        rank: of this process.
        size: processes in the world.
        timeout: seconds.

    Raises:
        LaunchError: not all ranks came.
    """
    if rank:
        ticket = uuid4().hex
        store.set(f"galvatron/ticket/{rank}", ticket)
        name = store.get(f"galvatron/{ticket}").decode()
        store.set(f"{name}/{rank}", "here")
        return name
    name, missing, end = f"galvatron/{uuid4().hex}", list(range(1, size)), monotonic() + timeout
    while missing:
        for other in missing:
            if store.check([f"galvatron/ticket/{other}"]):
                store.set(f"galvatron/{store.get(f'galvatron/ticket/{other}').decode()}", name)
        missing = [other for other in missing if not store.check([f"{name}/{other}"])]
        if missing and monotonic() > end:
            raise LaunchError(f"Rank {', '.join(map(str, missing))} did not start in {timeout:g} s. Look at its log.")
        sleep(0.01)
    return name


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
