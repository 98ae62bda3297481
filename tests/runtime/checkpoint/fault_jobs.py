"""What ranks run while something goes wrong with their checkpoints."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from galvatron_lite import folders
from galvatron_lite.errors import GalvatronError
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.checkpoint.manifest import check_files, checkpoints_of
from tests.runtime.checkpoint.jobs import Case, go_on, load, make_run, save

PAIR = Case([Strategy(zero=2, zero_stage=3)] * 5)
SMALL = 4096


def killed_while_saving(folder: str, asynchronous: bool) -> None:
    """Rank 1 is killed when it has written half of what it has to write of the second checkpoint."""
    run = make_run(PAIR)
    go_on(run, 1)
    save(run, Path(folder, "step-1"))
    go_on(run, 1)
    write = folders.FileSink.write

    def half(sink: folders.FileSink, data: Any) -> int:
        if dist.get_rank() == 1:
            write(sink, memoryview(data)[: memoryview(data).nbytes // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(sink, data)

    with patch.object(folders.FileSink, "write", half):
        save(run, Path(folder, "step-2"), asynchronous=asynchronous)
        run[0].finish_saving()


def full_disk(folder: str, asynchronous: bool) -> tuple[str, list[float], list[float]]:
    """Rank 1's files may not grow; what it is told, and how training goes on, beside a run that saved nothing."""
    run, other = make_run(PAIR), make_run(PAIR)
    random = rewound(run, folder)
    told = ""
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, before[1]))
    try:
        save(run, Path(folder, "step-2"), asynchronous=asynchronous)
        run[0].finish_saving()
    except GalvatronError as error:
        told = f"{type(error).__name__}: {error}"
    finally:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    losses = go_on(run, 2)
    load(other, Path(random))
    return told, losses, go_on(other, 2)


def rewound(run: Any, folder: str) -> str:
    """Two steps, and a checkpoint of them."""
    go_on(run, 2)
    place = Path(folder, "step-1")
    save(run, place, step=1)
    return str(place)


def from_the_last(folder: str) -> tuple[str, list[float]]:
    """Which checkpoint is found, and the losses after it."""
    run = make_run(PAIR, seed=4)
    parallel, optimizer, scheduler, data = run
    found = parallel.load_latest(folder, optimizer, scheduler=scheduler, data=data)
    assert found is not None
    return found.folder.name, go_on(run, 2)


def without_a_break() -> list[float]:
    return go_on(make_run(PAIR), 3)[2:]


def on_a_tiny_disk(folder: str) -> tuple[str, list[str], list[str]]:
    """Checkpoints until the disk is full: the error, the whole checkpoints then, and what else was left."""
    run = make_run(PAIR)
    go_on(run, 1)
    try:
        for number in range(20):
            save(run, Path(folder, f"step-{number}"), step=number)
    except GalvatronError as error:
        found = [place.name for place in checkpoints_of(Path(folder)) if check_files(place)]
        return str(error), found, sorted(one.name for one in Path(folder).iterdir() if one.name.startswith("."))
    return "nothing went wrong", [], []
