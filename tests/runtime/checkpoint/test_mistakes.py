"""Mistakes that are easily made with folders: the message does not lead to the loss of what is good."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from galvatron_lite.errors import InputError
from tests.runtime.test_stepped import model_of


def test_the_folder_of_the_checkpoints_instead_of_one(tmp_path: Path) -> None:
    parallel = model_of()
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    parallel.save(tmp_path / "step-1", optimizer)
    with pytest.raises(InputError, match=r"folder of checkpoints \(step-1\)") as caught:
        parallel.load(tmp_path, optimizer)
    assert "delete" not in str(caught.value)


def test_a_file_in_the_place_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(InputError, match="give a folder"):
        model_of().save(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"
