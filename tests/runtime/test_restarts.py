"""A launcher starts all ranks again after one was killed: training goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.pool import WorkerPool
from tests.runtime.cyclic.launched import launch
from tests.runtime.fault_jobs import trained
from tests.runtime.restarted import train

GALVATRON = ["-m", "galvatron_lite", "launch", "--gpus", "2", "--no-check", "--max-restarts", "2", "--"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--max-restarts", "1"]


@pytest.mark.parametrize(
    ("launcher", "who", "kills"),
    [
        pytest.param(GALVATRON, "self", ["save"], id="galvatron"),
        pytest.param(TORCHRUN, "join", ["backward"], id="torchrun", marks=pytest.mark.study),
    ],
)
def test_ranks_that_are_started_again(tmp_path: Path, launcher: list[str], who: str, kills: list[str]) -> None:
    folder, steps = str(tmp_path / "checkpoints"), 4
    command = [sys.executable, *launcher, "-m", "tests.runtime.restarted", who, folder, str(steps), *kills]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as job:
        try:
            said = job.communicate(timeout=150)[0]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGTERM)
    assert job.returncode == 0, said
    assert [Path(f"{folder}-killed-{attempt}").exists() for attempt in range(3)] == [at < len(kills) for at in range(3)]
    found = [float(Path(f"{folder}-loss-{step}-0").read_text()) for step in range(steps)]
    assert found == pytest.approx(trained(steps), rel=1e-5)


@pytest.mark.parametrize(
    ("world", "where"),
    [(2, "backward")] + [pytest.param(4, where, marks=pytest.mark.study) for where in ("save", "forward", "optimizer")],
)
def test_as_many_ranks_go_on_and_then_fewer(pool: WorkerPool, tmp_path: Path, world: int, where: str) -> None:
    """Fewer ranks have another plan."""
    folder = str(tmp_path / "checkpoints")
    *survivors, victim = launch(world, train, 120, folder=folder, steps=2, kills=[where])
    assert victim.code == -signal.SIGKILL
    assert all(re.match(r"(Peer|Launch)Error: ", one.told) for one in survivors), [one.told for one in survivors]
    second = pool.run(world, train, folder=folder, steps=2, kills=[])
    third = pool.run(world // 2, train, folder=folder, steps=3, kills=[])
    assert [*second[0], *third[0]] == pytest.approx(trained()[1:], rel=1e-5)
