"""Processes that are lost: the others stop and say why, and the last checkpoint gives the run that was not stopped."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

from galvatron_lite.parallelism.cyclic.rules import CyclicSetting, device_count
from tests.patience import patiently
from tests.pool import WorkerPool
from tests.runtime.cyclic.kept_jobs import (
    EVERY,
    LOST_AT,
    Kept,
    from_the_last,
    full_on_one,
    lost_in_a_pass,
    lost_while_saving,
    saved_and_resumed,
    whole,
)
from tests.runtime.cyclic.launched import Ended, launch

TOLD = re.compile(
    r"LaunchError: Worker \d, stage \d, training step \d: .+ rank (\d), which is gone or was silent for \d+ s "
    r"\(.+\)\. Training has stopped\. Start all processes again and resume from the last checkpoint \(load_latest\)\.",
    re.DOTALL,
)


def same(resumed: Kept, whole: Kept) -> bool:
    """Every bit of losses and state, as far as the resumed run goes."""
    (losses, state), (all_losses, all_state) = resumed, whole
    equal = all(torch.equal(value, all_state[name]) for name, value in state.items())
    return equal and losses == all_losses[-len(losses) :] and state.keys() == all_state.keys()


def is_told(ended: list[Ended], lost: int) -> bool:
    """Whether all others said whom they had waited for, and someone had waited for the lost one."""
    matches = [TOLD.match(one.told) for rank, one in enumerate(ended) if rank != lost]
    return all(matches) and str(lost) in {match[1] for match in matches if match is not None}


def check_told(ended: list[Ended], lost: int, seconds: float) -> None:
    """All others stopped in time, and said so."""
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
    """Before anybody knows what messages look like."""
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
    """The one before stays, and is what is found."""
    job = {"count": 2, "setting": "data", "folder": str(tmp_path)}
    lost, other = launch(2, lost_while_saving, 240, lost=0, **job)
    assert lost.code == -signal.SIGKILL
    assert other.told.startswith("LaunchError: Checkpoint: rank 1 did not hear of all other ranks")
    assert "resume from the last checkpoint" in other.told
    for one in pool.run(2, from_the_last, **job):
        assert one["found"] == tmp_path / "step-1"
        assert same(one["resumed"], one["whole"])


def test_a_full_disk_of_one_process_is_told_to_all(pool: WorkerPool, tmp_path: Path) -> None:
    job = {"count": 2, "setting": "data", "folder": str(tmp_path)}
    results = pool.run(2, full_on_one, full=1, **job)
    found = pool.run(2, from_the_last, **job)
    for one, after in zip(results, found, strict=True):
        assert re.match(r"checkpoint: .* Rank 1: No space left on device\.", one["told"])
        assert after["found"] == tmp_path / "last"
        assert same(after["resumed"], after["whole"])
        assert same(one["kept"], after["whole"])


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Kept:
    """What one process gives without a break."""
    kept: Kept = pool.run(1, whole, count=2, setting="single")[0]
    return kept


@pytest.mark.parametrize("setting", ["single", "data", "stages"])
def test_dropout_goes_on_where_it_was(pool: WorkerPool, tmp_path: Path, alone: Kept, setting: str) -> None:
    """Bit for bit in the setting itself, in a new model and in one that goes back; and all settings drop the same."""
    world = device_count(CyclicSetting(setting), 2)
    for one in pool.run(world, saved_and_resumed, count=2, setting=setting, folder=str(tmp_path)):
        assert same(one["resumed"], one["whole"])
        assert same(one["back"], one["whole"])
        assert same((one["written"][0][-1:], one["written"][1]), (one["whole"][0][-1:], one["whole"][1]))
        for name, value in one["whole"][1].items():
            if name.endswith(("weight", "bias")):
                torch.testing.assert_close(value, alone[1][name], rtol=0, atol=1e-12)
