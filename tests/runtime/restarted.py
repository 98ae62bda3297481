"""A training script that a launcher starts again after one of its ranks was killed.

Arguments: whether it makes the process group itself (``self``), the folder, steps, and the phases of its deaths.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from galvatron_lite import folders
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.world import join, leave
from tests.runtime.fault_jobs import DATA, ZERO, at_fault, killed, make_batch, make_run

PLANS = {1: [[Strategy()] * 4], 2: [[ZERO] * 4], 4: [[ZERO, DATA], [DATA, ZERO]]}
"""The strategies of each stage, by the number of processes."""


def train(folder: str, steps: int, kills: list[str]) -> list[float]:
    """Go on from the newest checkpoint, save after every step; attempt N dies in phase ``kills[N]`` of its second step.

    Every rank leaves the loss of each step in a file; returns those of this attempt.
    """
    world = dist.get_world_size()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    parallel, optimizer = make_run(PLANS[world], microbatches=2)
    parallel.load_latest(folder, optimizer)
    first, losses = parallel.step, []
    while (step := parallel.step) < steps:
        where = kills[attempt] if attempt < len(kills) and step == first + 1 and dist.get_rank() == world - 1 else ""
        if where and where != "save":
            at_fault(parallel, optimizer, where, lambda: _die(folder, attempt, parallel))
        losses.append(float(parallel.train_step(make_batch(step), optimizer)))
        Path(f"{folder}-loss-{step}-{dist.get_rank()}").write_text(str(losses[-1]))
        half = patch.object(folders.FileSink, "write", lambda *_: _die(folder, attempt))
        with half if where == "save" else nullcontext():
            parallel.save(Path(folder, f"step-{step + 1}"), optimizer, keep=2)
    return losses


def _die(folder: str, attempt: int, parallel: ParallelModel | None = None) -> None:
    """Leave a file that says so, and be killed."""
    Path(f"{folder}-killed-{attempt}").touch()
    if parallel is not None:
        killed(parallel.watch)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "self":
        dist.init_process_group("gloo")
    else:
        join(torch.device("cpu"))
    train(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    leave()
