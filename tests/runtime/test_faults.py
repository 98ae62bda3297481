"""Steps in which something goes wrong, and ranks that are started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.monitor.notes import Note, StepPhase, message, suspects
from tests.patience import patiently
from tests.pool import WorkerPool
from tests.runtime.cyclic.launched import launch
from tests.runtime.fault_jobs import (
    DATA,
    ZERO,
    data_end_early,
    edited,
    hangs,
    interrupted,
    lost,
    lost_while,
    not_finite,
    out_of_memory,
    resumed,
    trained,
    write,
)
from tests.runtime.restarted import train

STAGES = [[Strategy()] * 2, [Strategy()] * 2]
REMEDY = r"start all processes again \(galvatron launch --max-restarts 3.*load_latest\(folder\), which fewer processes"


@pytest.mark.parametrize(
    ("where", "pipeline", "operation"),
    [
        ("forward", True, "step 2, forward of micro-batch 0"),
        ("backward", False, "step 2, backward of micro-batch 0"),
        ("optimizer", False, "step 2, optimizer"),
    ],
)
def test_a_process_that_is_killed(pool: WorkerPool, tmp_path: Path, where: str, pipeline: bool, operation: str) -> None:
    kept = where == "optimizer"
    survivor, victim = launch(2, lost, 120, where=where, pipeline=pipeline, folder=str(tmp_path) if kept else "")
    assert victim.code == -signal.SIGKILL
    said = rf"PeerError: Rank 0 waited in vain .*Rank 1 \(.*process \d+\) is gone; it was last seen in {operation}\b"
    assert re.search(said, survivor.told), survivor.told
    assert re.search(REMEDY, survivor.told), survivor.told
    if kept:
        ((name, losses),) = pool.run(1, resumed, folder=str(tmp_path))
        assert name == "step-2"
        assert losses == pytest.approx(trained()[2:], rel=1e-5), "fewer processes go on as if nothing had happened"


@pytest.mark.parametrize("doing", ["save", "asynchronous save", "load", "switch: build", "switch: carry: allocate"])
def test_a_process_that_is_killed_between_steps(tmp_path: Path, doing: str) -> None:
    survivor, victim = launch(2, lost_while, 120, doing=doing, folder=str(tmp_path))
    assert victim.code == -signal.SIGKILL
    assert re.match(r"PeerError: Rank 0 waited in vain .*Rank 1 \(.*process \d+\) is gone", survivor.told), (
        survivor.told
    )
    assert re.search(REMEDY, survivor.told), survivor.told


def test_data_that_end_early_on_one_rank(tmp_path: Path) -> None:
    """Rank 1 saves while rank 0 trains: both name the other within the time-out."""
    both = re.compile(
        r"PeerError: Rank 0 waited in vain .*Timed out.*Rank 1 \(.*\) .*saving.*"
        r"PeerError: Rank 1 waited in vain .*Rank 0 \(.*\) .*step 2",
        re.DOTALL,
    )

    def told(timeout: float) -> str:
        return "".join(one.told for one in launch(2, data_end_early, 100, folder=str(tmp_path), patience=timeout))

    said = patiently(told, lambda one: both.match(one) is not None, 3.0)
    assert both.match(said), said


@pytest.mark.parametrize(("where", "pipeline"), [("forward", False), ("backward", True)])
def test_a_rank_that_hangs(where: str, pipeline: bool) -> None:
    where_it_is = rf"runs, but has been in step 1, {where} of micro-batch 0 for (\d[\d.]*) s.*fault_jobs.py:"
    said = re.compile(rf"Timed out.*Rank 1 \(.*\) {where_it_is}")

    def told(timeout: float) -> tuple[str, float]:
        survivor, _ = launch(2, hangs, 240, hangs=1, where=where, pipeline=pipeline, patience=timeout)
        return survivor.told, timeout

    text, timeout = patiently(told, lambda one: said.search(one[0]) is not None, 2.0)
    match = said.search(text)
    assert match, text
    assert float(match[1]) >= timeout
    assert re.search(REMEDY, text), text


@pytest.mark.parametrize("strategies", [[[DATA] * 4], [[ZERO] * 4], STAGES], ids=["data", "zero", "pipeline"])
def test_a_nan_on_one_rank(pool: WorkerPool, strategies: list[list[Strategy]]) -> None:
    wanted = trained()
    for (loss, gradient), losses in pool.run(2, not_finite, strategies=strategies):
        assert loss.ranks == (1,)
        assert "The loss is not finite (loss nan): that of rank 1." in loss.said
        # FSDP shows a gradient only once it is summed; in a pipeline, it goes on to the stages before
        assert gradient.ranks == ((1,) if strategies == [[DATA] * 4] else (0, 1))
        assert "blocks.0.linear.weight" in gradient.said
        for one in (loss, gradient):
            assert one.same
            assert "parameters are unchanged, and training can go on. Look at the" in one.said
        assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("strategy", [DATA, Strategy(zero=2, zero_stage=1), ZERO], ids=["data", "zero1", "zero3"])
def test_an_interrupted_step_leaves_nothing_for_the_next(pool: WorkerPool, strategy: Strategy) -> None:
    for losses in pool.run(2, interrupted, strategies=[[strategy] * 4]):
        assert losses == pytest.approx(trained(), rel=1e-5)


def test_memory_that_runs_out_on_one_rank(pool: WorkerPool) -> None:
    """For real: the process may not have more (RLIMIT_AS)."""
    said = r"ExhaustedError: Memory of cpu ran out on rank 1 in step 1, forward.*predicts.*this process holds \d.*--mem"
    heard = r"PeerError: .*Rank 1 .*failed in step 1, forward.*Memory of cpu ran out"
    other, own = patiently(
        lambda timeout: pool.run(2, out_of_memory, timeout=240.0, patience=timeout),
        lambda both: bool(re.search(heard, both[0]) and re.search(said, both[1])),
        2.0,
    )
    assert re.search(said, own), own
    assert re.search(heard, other), other


EDITS = {
    ("devices: 2", "devices: two"): r"devices.*'two'",
    ("devices: 2", "devices: -2"): r"devices.*-2",
    ("devices: 2", "devices: 4"): r"strategy.* 4 devices",
    ("schedule: 1f1b", "schedule: sideways"): r"schedule.*'sideways'.*gpipe",
    ("first: blocks.0", "first: blocks.7"): r"blocks\.7",
    ("data: 2", "data: 3"): r"runs.0.strategy.*is 3, but each stage has 2 devices",
    ("data: 2", "dota: 2"): r"dota",
    ("stages:", "stages: none\nrest:"): r"'rest' cannot.*no such key.*stages: 'none'",
    ("version: 1", "version: 99"): r"version.*99",
    ("global_batch: 8", "global_batch: [8"): r"line 4.*make the file anew",
    ("microbatches: 1", "microbatches: 3"): r"microbatches: 3.*must divide the global batch, 8",
}


def test_a_plan_edited_into_nonsense(pool: WorkerPool, tmp_path: Path) -> None:
    write(tmp_path / "plan")
    first, second = pool.run(2, edited, path=str(tmp_path / "plan"), edits=list(EDITS))
    for edit, one, other, wanted in zip(EDITS, first, second, EDITS.values(), strict=True):
        assert re.match(r"(InputError|FileFormatError|LaunchError): ", one), edit
        assert re.search(wanted, one), one
        assert other == one.replace("plan-0-", "plan-1-")
        assert re.search(r"(cannot be used|is missing)\. \w{2}", one), "what would be right is said"


def _note(step: int, phase: StepPhase, **more: object) -> Note:
    return Note(step, phase, process="node, process 7", **{"beat": 1, **more})  # type: ignore[arg-type]


def test_who_is_behind() -> None:
    """Of those that run: the one least far; of those alike, the one whose code does not wait for others."""
    ahead = _note(5, StepPhase.GRADIENTS, error="RuntimeError: timed out", victim=True)
    waits, works = _note(5, StepPhase.FORWARD, waits=True, beat=2), _note(5, StepPhase.BACKWARD, beat=2)
    loads = _note(5, StepPhase.BETWEEN, beat=2, at="train.py:9 in load", seconds=3.0)
    before = [ahead, _note(5, StepPhase.FORWARD), _note(5, StepPhase.FORWARD)]
    assert [one.rank for one in suspects(before, [ahead, waits, works], 0)] == [2]
    (found,) = suspects([*before, loads], [ahead, waits, works, _note(5, StepPhase.BETWEEN, beat=3)], 0)
    assert (found.rank, found.operation) == (3, "between steps 4 and 5")
    gone = [ahead, waits, before[2]]
    assert [one.message.split(";")[0] for one in suspects(before, gone, 0)] == ["Rank 2 (node, process 7) is gone"]
    assert "has not come to its first step" in suspects([ahead, None], [ahead, None], 0)[0].message
    others = [ahead, _note(5, StepPhase.GRADIENTS, error="x", victim=True)]
    assert "No rank is behind: look at the network" in message(ahead, "timed out", suspects(others, others, 0), True, 0)
    assert "the process that stores them" in message(ahead, "timed out", [], False, 0)


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
