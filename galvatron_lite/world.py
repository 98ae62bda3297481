"""Join and leave the world of processes that a launcher started."""

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

DRY_BACKEND = "galvatron_dry"  # of dry runs, whose messages have no data
SAVER = "galvatron-save"  # name of threads that write checkpoints, for which processes wait at their end


class Finishing(threading.Thread):
    """A thread that runs until ``finish``; ``leave`` waits for it."""

    def finish(self) -> None:
        """End the thread, once everything is written."""
        raise NotImplementedError


def messages_carry_data() -> bool:
    """Whether ranks can compare values; not in dry runs."""
    return dist.get_backend() != DRY_BACKEND


def pick_device(name: str = "auto") -> torch.device:
    """The device of this process: a GPU of its own, or the CPU.

    Args:
        name: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        LaunchError: there is no GPU, or this node has more processes than GPUs.
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
    """Make a default process group, unless there is one: the launcher's world, or this process alone."""
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
    """Agree on a name for this start of the workers; each rank calls it once.

    torchrun keeps its store, with the keys of earlier workers, when it restarts workers, and its restart count differs
    between nodes. So rank 0 makes a new name and sends it in answer to tickets, which only the current workers draw,
    until every rank has confirmed it.

    Args:
        store: of the launcher.
        rank: of this process.
        size: number of processes.
        timeout: seconds.

    Raises:
        LaunchError: not all ranks answered in time.
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
    """The rank of this process; 0 without a world."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of processes; 1 without a world."""
    return dist.get_world_size() if dist.is_initialized() else 1


def leave() -> None:
    """End this process, as the last line of a script; returns only without a world.

    It waits for the other ranks, closes the process group, flushes output, and exits. Otherwise a gloo thread that
    still holds a tensor at interpreter shutdown could abort the process after its work is done (pytorch issue 117762).
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
