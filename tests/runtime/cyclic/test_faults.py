"""Lost processes: the others stop with an error that names the rank, and the last checkpoint continues the same run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite import folders
from galvatron_lite.parallelism.cyclic.rules import CyclicSetting, device_count
from galvatron_lite.runtime.cyclic.model import CyclicModel
from tests.parallelism.cyclic.models import WIDTH, blocks_case, make_batches, make_plan
from tests.patience import patiently
from tests.pool import WorkerPool
from tests.runtime.cyclic.launched import Ended, launch
from tests.runtime.cyclic.saving import ADAM

STEPS, EVERY, LOST_AT = 6, 2, 5
Kept = tuple[list[float], dict[str, Tensor]]
"""Losses of training steps, and the full state."""


def make(count: int, setting: str, seed: int = 7, timeout: float = 60.0) -> CyclicModel:
    """A model with one block a stage, with dropout and running statistics."""
    torch.manual_seed(seed)
    model, layers, stages = blocks_case(count)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = nn.Sequential(block, nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
    return CyclicModel(model.double(), make_plan(stages, "cdp-v2", setting, rows=4), layers, timeout=timeout)


def go_on(model: CyclicModel, end: int, before: Callable[[int], Any] = lambda _: None) -> list[float]:
    """Train up to a step on batches chosen by the generator of the process; ``before`` is called with each step."""
    known, losses = batches_of(len(model.plan.stages)), []
    optimizer = model._optimizer
    assert optimizer is not None
    for step in range(model.step, end):
        before(step)
        losses.append(float(model.train_step(known[int(torch.randint(len(known), ()))], optimizer)))
    return losses


def batches_of(count: int) -> list[dict[str, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = make_batches(8, count, rows=4)
    return [{key: value.double() for key, value in batch.items()} for batch in made]


def ended(model: CyclicModel, losses: list[float]) -> Kept:
    """Flush the model; the losses include the mean of the micro-batches that ended in the flush."""
    last = model.flush()
    return [*losses, *([] if last is None else [float(last)])], model.full_state_dict()


def whole(count: int, setting: str) -> Kept:
    """An uninterrupted run."""
    model = make(count, setting)
    model.optimizer(ADAM)
    return ended(model, go_on(model, STEPS))


def saved_and_resumed(count: int, setting: str, folder: str) -> dict[str, Kept]:
    """Runs that write checkpoints, go back to one, and resume from the last; and an uninterrupted run."""
    saving = make(count, setting)
    saving.optimizer(ADAM)

    def save(step: int) -> None:
        if step and step % EVERY == 0:
            saving.save(Path(folder, f"step-{step}"))

    written = ended(saving, go_on(saving, STEPS, save))
    saving.load(Path(folder, "step-2"))
    back = ended(saving, go_on(saving, STEPS))
    resumed = make(count, setting, seed=99)
    resumed.optimizer(ADAM)
    assert resumed.load_latest(folder) == Path(folder, "step-4")
    assert resumed.step == 4
    after = ended(resumed, go_on(resumed, STEPS))
    return {"written": written, "back": back, "resumed": after, "whole": whole(count, setting)}


def lost_in_a_pass(
    count: int, setting: str, folder: str, lost: int, how: int, patience: float, at: int = LOST_AT
) -> None:
    """Train and write checkpoints; a rank gets the signal ``how`` during the passes of a training step."""
    model = make(count, setting, timeout=patience)
    model.optimizer(ADAM)

    def watch(step: int) -> None:
        if step and step % EVERY == 0:
            model.save(Path(folder, f"step-{step}"))
        if step == at and dist.get_rank() == lost:
            for part in model.runtime.parts.values():
                part.model.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), how))

    ended(model, go_on(model, STEPS, watch))


def lost_while_saving(count: int, setting: str, folder: str, lost: int) -> None:
    """A rank is killed after it has written half of its first file."""
    model = make(count, setting)
    model.optimizer(ADAM)
    go_on(model, 1)
    model.save(Path(folder, "step-1"))
    go_on(model, 2)
    write = folders.FileSink.write

    def half(sink: folders.FileSink, data: Any) -> int:
        if dist.get_rank() == lost:
            write(sink, memoryview(data)[: memoryview(data).nbytes // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(sink, data)

    with patch.object(folders.FileSink, "write", half):
        model.save(Path(folder, "step-2"))


def from_the_last(count: int, setting: str, folder: str) -> dict[str, Any]:
    """The last intact checkpoint, the run that resumes from it, and an uninterrupted run."""
    model = make(count, setting, seed=99)
    model.optimizer(ADAM)
    found = model.load_latest(folder)
    resumed = ended(model, go_on(model, STEPS))
    return {"found": found, "resumed": resumed, "whole": whole(count, setting)}


TOLD = re.compile(
    r"LaunchError: Worker \d, stage \d, training step \d: .+ rank (\d), which is gone or was silent for \d+ s "
    r"\(.+\)\. Training has stopped\. Start all processes again and resume from the last checkpoint \(load_latest\)\.",
    re.DOTALL,
)


def same(resumed: Kept, whole: Kept) -> bool:
    """Whether a resumed run has the same losses and state, bit for bit."""
    (losses, state), (all_losses, all_state) = resumed, whole
    equal = all(torch.equal(value, all_state[name]) for name, value in state.items())
    return equal and losses == all_losses[-len(losses) :] and state.keys() == all_state.keys()


def is_told(ended: list[Ended], lost: int) -> bool:
    """Whether the errors of all others name the rank that they waited for, and one names the lost rank."""
    matches = [TOLD.match(one.told) for rank, one in enumerate(ended) if rank != lost]
    return all(matches) and str(lost) in {match[1] for match in matches if match is not None}


def check_told(ended: list[Ended], lost: int, seconds: float) -> None:
    """All others stopped in time with an error that names a rank."""
    others = [one for rank, one in enumerate(ended) if rank != lost]
    assert is_told(ended, lost), [one.told for one in others]
    assert all(one.code == 0 and one.seconds < seconds for one in others)


def test_a_killed_process_and_the_run_from_the_last_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    """With dropout, running statistics, and batches chosen by the processes' generators."""
    job = {"count": 3, "setting": "data", "folder": str(tmp_path)}
    ended = launch(3, lost_in_a_pass, 240, lost=1, how=signal.SIGKILL, patience=120.0, **job)
    assert ended[1].code == -signal.SIGKILL
    check_told(ended, 1, 100)
    for one in pool.run(3, from_the_last, **job):
        assert one["found"] == tmp_path / f"step-{LOST_AT - LOST_AT % EVERY}"
        assert same(one["resumed"], one["whole"])


def test_a_process_lost_in_its_first_pass(tmp_path: Path) -> None:
    """Before the shapes of messages are exchanged."""
    job = {"count": 2, "setting": "stages", "folder": str(tmp_path), "lost": 0, "patience": 120.0, "at": 0}
    ended = launch(3, lost_in_a_pass, 240, how=signal.SIGKILL, **job)
    assert ended[0].code == -signal.SIGKILL
    check_told(ended, 0, 100)


def test_a_process_that_hangs_is_named_after_the_time_that_was_set(tmp_path: Path) -> None:
    def ended(patience: float) -> tuple[list[Ended], float]:
        folder = tmp_path / str(patience)
        folder.mkdir()
        job = {"count": 2, "setting": "stages", "folder": str(folder), "lost": 2, "how": signal.SIGSTOP}
        return launch(3, lost_in_a_pass, 240, hangs=2, patience=patience, **job), patience

    found, patience = patiently(ended, lambda made: is_told(made[0], 2), 3.0)
    assert found[2].code is None
    check_told(found, 2, patience + 100)
    assert any(f"silent for {patience:g} s" in one.told for one in found)


def test_a_process_lost_while_a_checkpoint_is_written(pool: WorkerPool, tmp_path: Path) -> None:
    """The checkpoint before stays intact, and is the latest."""
    job = {"count": 2, "setting": "data", "folder": str(tmp_path)}
    lost, other = launch(2, lost_while_saving, 240, lost=0, **job)
    assert lost.code == -signal.SIGKILL
    assert other.told.startswith("LaunchError: Checkpoint: rank 1 did not hear of all other ranks")
    assert "resume from the last checkpoint" in other.told
    for one in pool.run(2, from_the_last, **job):
        assert one["found"] == tmp_path / "step-1"
        assert same(one["resumed"], one["whole"])


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Kept:
    """An uninterrupted run on one process."""
    kept: Kept = pool.run(1, whole, count=2, setting="single")[0]
    return kept


@pytest.mark.parametrize("setting", ["single", "data", "stages"])
def test_dropout_goes_on_where_it_was(pool: WorkerPool, tmp_path: Path, alone: Kept, setting: str) -> None:
    """Resumed runs continue bit for bit, in a new model and in one that goes back; all settings drop the same items."""
    world = device_count(CyclicSetting(setting), 2)
    for one in pool.run(world, saved_and_resumed, count=2, setting=setting, folder=str(tmp_path)):
        assert same(one["resumed"], one["whole"])
        assert same(one["back"], one["whole"])
        assert same((one["written"][0][-1:], one["written"][1]), (one["whole"][0][-1:], one["whole"][1]))
        for name, value in one["whole"][1].items():
            if name.endswith(("weight", "bias")):
                torch.testing.assert_close(value, alone[1][name], rtol=0, atol=1e-12)
