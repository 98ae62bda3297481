"""Launching processes of a test's own, some of which it kills."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from galvatron_lite.errors import GalvatronError
from tests.pool import HOST, PRELOADED


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int | None  # exit code; below 0 the signal that killed it; None: it was still running and was killed
    seconds: float  # from the common start of all ranks until it ended by itself
    told: str  # the error of this package that it raised; "" if none
    result: Any  # returned by its function; None if it raised


def launch(
    world: int, function: Callable[..., Any], timeout: float, hangs: int | None = None, **kwargs: Any
) -> list[Ended]:
    """Call ``function(**kwargs)`` on every rank of a world of gloo processes; wait for all but the rank ``hangs``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="galvatron-launched-") as folder:
        from torch.distributed import TCPStore

        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        started = [
            context.Process(target=_rank, args=(rank, world, store.port, folder, function, kwargs), daemon=True)
            for rank in range(world)
        ]
        for one in started:
            one.start()
        end = time.monotonic() + timeout
        for rank, one in enumerate(started):
            if rank != hangs:
                one.join(max(0.0, end - time.monotonic()))
        ended = [_ended(one.exitcode, Path(folder, str(rank))) for rank, one in enumerate(started)]
        for one in started:
            if one.is_alive():
                one.kill()
                one.join()
        return ended


def _ended(code: int | None, said: Path) -> Ended:
    return Ended(code, *(pickle.loads(said.read_bytes()) if said.exists() else (0.0, "", None)))


def _rank(rank: int, world: int, port: int, folder: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    begin, told, result = time.monotonic(), "", None
    try:
        result = function(**kwargs)
    except GalvatronError as error:
        told = f"{type(error).__name__}: {error}"
    Path(folder, str(rank)).write_bytes(pickle.dumps((time.monotonic() - begin, told, result)))
    os._exit(0)  # gloo's threads may abort a normal exit
