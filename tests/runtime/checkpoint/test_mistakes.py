"""Mistakes that are easily made with folders: the message does not lead to the loss of what is good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.runtime.activations.layout import Box, all_of
from galvatron_lite.runtime.checkpoint.manifest import FORMAT, Manifest, survey
from galvatron_lite.runtime.checkpoint.shards import write_tensors
from galvatron_lite.runtime.checkpoint.tensors import copied, stored_files
from galvatron_lite.runtime.checkpoint.unsplit import load_into
from galvatron_lite.runtime.parameters.pieces import ItemRun, LocalShard
from tests.runtime.checkpoint import jobs
from tests.runtime.checkpoint.jobs import load, make_net, save
from tests.runtime.checkpoint.test_faults import ALONE
from tests.runtime.test_steps import model_of


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
