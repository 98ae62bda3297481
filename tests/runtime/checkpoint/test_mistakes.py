"""Mistakes that are easily made with folders: the message does not lead to the loss of what is good."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.runtime.activations.layout import Box, all_of
from galvatron_lite.runtime.checkpoint.manifest import FORMAT, META, Manifest, read_manifest, survey, write_sealed
from galvatron_lite.runtime.checkpoint.shards import write_tensors
from galvatron_lite.runtime.checkpoint.tensors import copied, stored_files
from galvatron_lite.runtime.checkpoint.unsplit import load_into
from galvatron_lite.runtime.parameters.pieces import ItemRun, LocalShard
from tests.runtime.checkpoint import jobs
from tests.runtime.checkpoint.jobs import load, make_net, make_run, save
from tests.runtime.checkpoint.test_faults import ALONE
from tests.runtime.test_steps import model_of

DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped": lambda file: file.write_bytes(file.read_bytes().replace(b'"step": 2', b'"step": 3')),
    "empty": lambda file: file.write_bytes(b""),
    "missing": Path.unlink,
    "link": lambda file: (file.unlink(), file.symlink_to("nowhere")),
    "other": lambda file: file.write_bytes(file.read_bytes().replace(b'"format": 1', b'"format": 9')),
}


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def without_record(folder: Path) -> None:
    """As versions wrote it that kept no lineage."""
    write_sealed(folder, replace(read_manifest(folder), run="", sequence=0, ancestors={}))
    assert not {"run", "sequence", "ancestors"} & json.loads((folder / META).read_text()).keys()


@pytest.mark.parametrize("again", ["same process", "new process"])
def test_what_was_abandoned_neither_outranks_nor_is_deleted(tmp_path: Path, again: str) -> None:
    run = make_run(ALONE)
    for step in (10, 20, 30, 40):
        save(run, tmp_path / f"step-{step}", step=step)
    run = run if again == "same process" else make_run(ALONE)
    load(run, tmp_path / "step-20")
    for step in (21, 22, 23):
        save(run, tmp_path / f"step-{step}", step=step, keep=3)
    assert names(tmp_path) == ["step-21", "step-22", "step-23", "step-30", "step-40"]
    for _ in range(2):  # restarts go on with the same lineage
        run = make_run(ALONE)
        found = run[0].load_latest(tmp_path, run[1])
        assert found.step == max(int(name[5:]) for name in names(tmp_path) if name not in ("step-30", "step-40"))
        save(run, tmp_path / f"step-{found.step + 1}", step=found.step + 1, keep=3)
    assert names(tmp_path) == ["step-23", "step-24", "step-25", "step-30", "step-40"]


def test_another_run_beside_it_and_folders_of_its_own(tmp_path: Path) -> None:
    """A run deletes its own checkpoints in every folder that it saves to, and nobody else's."""
    other = make_run(ALONE)
    save(other, tmp_path / "all" / "other", step=1)
    run = make_run(ALONE)
    for step in (1, 2, 3):
        save(run, tmp_path / "all" / f"step-{step}", step=step, keep=1)
        save(run, tmp_path / "best" / f"step-{step}", step=step, keep=2)
    assert names(tmp_path / "all") == ["other", "step-3"]
    assert names(tmp_path / "best") == ["step-2", "step-3"]


def test_checkpoints_without_a_record(tmp_path: Path) -> None:
    """They load, the one of most steps first; what continues them outranks them, and does not delete them."""
    run = make_run(ALONE)
    for step in (5, 10, 20):
        save(run, tmp_path / f"step-{step}", step=step)
        without_record(tmp_path / f"step-{step}")
    run = make_run(ALONE)
    found = run[0].load_latest(tmp_path, run[1])
    assert found.step == 20
    load(run, tmp_path / "step-10")
    for step in (11, 12):
        save(run, tmp_path / f"step-{step}", step=step, keep=1)
    assert names(tmp_path) == ["step-10", "step-12", "step-20", "step-5"]
    found = run[0].load_latest(tmp_path, run[1])
    assert found.step == 12


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest_is_named(tmp_path: Path, damage: str) -> None:
    parallel = model_of()
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    for step in (1, 2):
        parallel.save(tmp_path / f"step-{step}", optimizer, step=step)
    DAMAGE[damage](tmp_path / "step-2" / META)
    with pytest.warns(UserWarning, match=r"(?s)step-2.*step-1 \(step 1\) is loaded instead"):
        found = parallel.load_latest(tmp_path, optimizer)
    assert found.step == 1
    shutil.rmtree(tmp_path / "step-1")
    with pytest.raises(InputError, match=r"(?s)step-2.*ignore_damaged=True"):
        parallel.load_latest(tmp_path, optimizer)
    with pytest.warns(UserWarning, match="step-2"):
        assert parallel.load_latest(tmp_path, optimizer, ignore_damaged=True) is None


def test_folders_that_hold_no_checkpoints(tmp_path: Path) -> None:
    """Nothing, or something else: training begins; a single checkpoint in the place of their folder is an error."""
    parallel = model_of()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "meta.txt").write_text("mine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parallel.load_latest(tmp_path) is None
        assert parallel.load_latest(tmp_path / "none") is None
    parallel.save(tmp_path / "one")
    with pytest.raises(InputError, match=r"load\(folder\)"):
        parallel.load_latest(tmp_path / "one")


def test_the_folder_of_the_checkpoints_instead_of_one(tmp_path: Path) -> None:
    parallel = model_of()
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    parallel.save(tmp_path / "step-1", optimizer)
    with pytest.raises(InputError, match=r"folder of checkpoints \(step-1\)") as caught:
        parallel.load(tmp_path, optimizer)
    assert "delete" not in str(caught.value)
    assert (caught.value.field, caught.value.value) == ("checkpoint", str(tmp_path))


def test_a_file_in_the_place_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(InputError, match="give a folder"):
        model_of().save(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_file_without_a_tensor_and_a_folder_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tensors(tmp_path / "one.safetensors", {"weight": torch.zeros(2)})
    with pytest.raises(FileFormatError, match="holds no 'bias'") as caught:
        stored_files({"bias": tmp_path / "one.safetensors"}, {})
    assert (caught.value.field, caught.value.value) == ("file", tmp_path / "one.safetensors")
    place = tmp_path / "step-1"
    place.mkdir()
    monkeypatch.setattr(
        Path, "iterdir", lambda path, own=Path.iterdir: own(path) if path != place else own(place / "x")
    )
    readable, (damaged,) = survey(Manifest, tmp_path, FORMAT)
    assert (readable, damaged.field, damaged.value) == ([], "checkpoint", place)


def test_no_more_is_copied_than_is_written() -> None:
    tensor, first, last = torch.arange(4.0), all_of((2,)), ItemRun(Box(((2, 4),)), Box(((0, 2),)))
    held = LocalShard("weight", (4,), tensor, (ItemRun(first, first), last))
    assert copied(held).tensor.equal(tensor)
    half = copied(replace(held, chunks=(last,)))
    assert half.tensor.tolist() == [2.0, 3.0]
    assert half.chunks == (ItemRun(first, last.whole),)


def test_a_tensor_without_items_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def net(seed: int = 0) -> torch.nn.Module:
        model = make_net(seed)
        model.blocks[0].register_buffer("unused", torch.empty(0, 3))
        return model

    monkeypatch.setattr(jobs, "make_net", net)
    save(jobs.make_run(ALONE), tmp_path / "step-1")
    load(jobs.make_run(ALONE, seed=1), tmp_path / "step-1")
    model = net(1)
    load_into(model, tmp_path / "step-1")
    assert torch.equal(model.leave.weight, net(0).leave.weight)
