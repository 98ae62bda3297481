"""Checkpoints with sound checksums and senseless contents: our own error on every rank, and nothing has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from galvatron_lite.errors import FileFormatError, GalvatronError, InputError
from galvatron_lite.files import from_data, to_data, write_data
from galvatron_lite.folders import content_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.checkpoint.huggingface import export_safetensors
from galvatron_lite.runtime.checkpoint.manifest import META, Manifest, write_sealed
from galvatron_lite.runtime.checkpoint.unsplit import load_into
from tests.pool import WorkerPool
from tests.runtime.checkpoint.jobs import Case, go_on, groups_of, make_net, make_run, moments, save
from tests.runtime.checkpoint.test_kinds import same

PAIR = Case([Strategy(data=2)] * 5)
Data = dict[str, Any]


def reshape(data: Data, name: str, shape: list[int]) -> None:
    """Another shape, in one piece."""
    tensor = data["tensors"][name]
    tensor["shape"] = shape
    tensor["pieces"] = [{**tensor["pieces"][0], "at": [0] * len(shape), "size": shape}]


def rename(data: Data, old: str, new: str) -> None:
    data["files"][new] = data["files"].pop(old)


WEIGHT, STATE = "blocks.0.linear.weight", "blocks.0.linear.weight/exp_avg"
MANIFESTS: dict[str, Callable[[Data], object]] = {
    "negative step": lambda data: data.update(step=-5),
    "no processes": lambda data: data.update(processes=0),
    "more processes than files": lambda data: data.update(processes=9),
    "no tensor of a name": lambda data: data["tensors"].pop(WEIGHT),
    "no file of options": lambda data: data["files"].pop("training.pt"),
    "NUL in a name": lambda data: rename(data, "rank-1.pt", "rank-1.pt\0"),
    "a path": lambda data: rename(data, "rank-1.pt", "../rank-1.pt"),
    "false dtype": lambda data: data["tensors"][WEIGHT].update(dtype="int64"),
    "no dtype": lambda data: data["tensors"][STATE].update(dtype="strided"),
    "huge": lambda data: reshape(data, STATE, [10**7, 10**7]),
    "negative": lambda data: reshape(data, STATE, [-6, -6]),
    "other shape of a state": lambda data: reshape(data, STATE, [36]),
    "overlapping pieces": lambda data: data["tensors"][STATE].update(
        pieces=[{**data["tensors"][STATE]["pieces"][0], "at": [0, at], "size": [6, 3]} for at in (0, 0)]
    ),
    "another file": lambda data: data["tensors"][STATE]["pieces"][0].update(file="rank-0.pt"),
}
STATES = ("other shape of a state", "another file")
"""What an export of the weights does not read."""
CONTENTS: dict[str, tuple[str, Callable[[Data], object]]] = {
    "no members": ("training.pt", lambda data: data["optimizer"].pop("members")),
    "no group": ("training.pt", lambda data: data["optimizer"].update(groups=[])),
    "no options": ("training.pt", lambda data: data.pop("optimizer")),
    "odd scheduler": ("training.pt", lambda data: data["optimizer"].update(scheduler=[])),
    "no extra": ("training.pt", lambda data: data.pop("extra")),
    "no data": ("rank-1.pt", lambda data: data.pop("data")),
    "odd data": ("rank-1.pt", lambda data: data.update(data={"at": 1})),
    "no generators": ("rank-1.pt", lambda data: data.pop("random")),
    "odd generators": ("rank-1.pt", lambda data: data["random"].update(python=[1, 2])),
    "odd buffers": ("rank-1.pt", lambda data: data["buffers"].update({"blocks.0.norm.running_mean": torch.ones(9)})),
    "a list": ("rank-1.pt", lambda data: data.clear()),
}


def forge(folder: Path, change: str) -> None:
    """Change a checkpoint and seal it again."""
    data = json.loads((folder / META).read_text())
    if change in MANIFESTS:
        MANIFESTS[change](data)
    else:
        name, alter = CONTENTS[change]
        content = torch.load(folder / name, weights_only=True)
        alter(content)
        torch.save(content, folder / name)
        data["files"][name] = to_data(content_of(folder / name))
    try:
        write_sealed(folder, replace(from_data(Manifest, data, "forged"), digest=""))
    except FileFormatError:  # without the checks of what reads it
        write_data(folder / META, data)


def written(folder: str) -> None:
    run = make_run(PAIR)
    go_on(run, 2)
    save(run, Path(folder))


def refused(folder: str, changes: list[str]) -> dict[str, str]:
    """What each forged checkpoint is answered with; the run behind them is that of one that never tried."""
    run, other = make_run(PAIR, seed=3), make_run(PAIR, seed=3)
    start = torch.get_rng_state()
    go_on(run, 1)
    told = {}
    rates = [group["lr"] for group in run[1].param_groups]
    before = run[0].full_state_dict(), moments(run[1], run[0]), run[2].state_dict(), run[3].state_dict()
    random = torch.get_rng_state()
    for change in changes:
        try:
            run[0].load(Path(folder, change), run[1], scheduler=run[2], data=run[3])
            told[change] = "taken"
        except GalvatronError as error:
            told[change] = f"{type(error).__name__}: {error}"
        dist.barrier()
        assert torch.equal(torch.get_rng_state(), random), change
        same(run[0].full_state_dict(), before[0])
        same(moments(run[1], run[0]), before[1])
        assert (run[2].state_dict(), run[3].state_dict()) == before[2:], change
        assert [group["lr"] for group in run[1].param_groups] == rates, change
    loss = go_on(run, 1)[0]
    torch.set_rng_state(start)
    assert loss == go_on(other, 2)[2]
    return told


def test_forged_checkpoints(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, written, folder=str(tmp_path / "good"))
    changes = [*MANIFESTS, *CONTENTS]
    for change in changes:
        shutil.copytree(tmp_path / "good", tmp_path / change)
        forge(tmp_path / change, change)
    for told in pool.run(2, refused, folder=str(tmp_path), changes=changes):
        for change, said in told.items():
            assert said.startswith(("InputError: ", "FileFormatError: ")), (change, said)
    for change in changes:  # without other processes: what they do not read, they may take
        model = make_net()
        try:
            load_into(model, tmp_path / change, torch.optim.AdamW(groups_of(model)))
            assert change in CONTENTS, change
        except InputError:
            pass
        try:
            export_safetensors(tmp_path / change, tmp_path / f"{change}-weights")
            assert change in [*CONTENTS, *STATES], change
        except InputError:
            pass


class Broken:
    """A position in the data that one rank cannot take."""

    at = 0

    def state_dict(self) -> Data:
        return {"at": self.at}

    def load_state_dict(self, state: Data) -> None:
        if dist.get_rank() == 1:
            raise ValueError("of other data")
        self.at = state["at"]


def one_cannot(folder: str) -> tuple[str, str]:
    """Rank 1's data take no state, then give none."""
    parallel, optimizer, *_ = make_run(PAIR)
    data, told = Broken(), []
    parallel.save(folder, optimizer, data={"at": 7})
    with torch.no_grad():
        next(parallel.parameters()).add_(1.0)
    before = parallel.full_state_dict()
    with pytest.raises(InputError) as caught:
        parallel.load(folder, optimizer, data=data)
    told.append(str(caught.value))
    assert data.at == 0, "rank 0 went back"
    same(parallel.full_state_dict(), before)
    data.state_dict = lambda: {"at": 1 // (1 - dist.get_rank())}  # type: ignore[method-assign]
    with pytest.raises(InputError) as caught:
        parallel.save(folder, optimizer, data=data)
    told.append(str(caught.value))
    return told[0], told[1]


def test_data_that_one_rank_cannot_take_or_give(pool: WorkerPool, tmp_path: Path) -> None:
    for taking, giving in pool.run(2, one_cannot, folder=str(tmp_path / "one"), timeout=60):
        assert "Rank 1: " in taking
        assert "ValueError: of other data" in taking
        assert "Rank 1: " in giving
        assert "ZeroDivisionError" in giving
