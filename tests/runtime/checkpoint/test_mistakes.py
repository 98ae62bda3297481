"""Forged checkpoints and mistakes of users are refused on all ranks, and nothing is changed."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
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
from galvatron_lite.runtime.activations.layout import Box, all_of
from galvatron_lite.runtime.checkpoint import checkpointer
from galvatron_lite.runtime.checkpoint.huggingface import export_safetensors
from galvatron_lite.runtime.checkpoint.manifest import FORMAT, META, Manifest, read_manifest, survey, write_sealed
from galvatron_lite.runtime.checkpoint.shards import write_tensors
from galvatron_lite.runtime.checkpoint.tensors import copied, stored_files
from galvatron_lite.runtime.checkpoint.unsplit import load_into
from galvatron_lite.runtime.parameters.pieces import LocalShard
from tests.pool import WorkerPool
from tests.runtime.checkpoint import jobs
from tests.runtime.checkpoint.jobs import Case, go_on, groups_of, load, make_net, make_run, moments, same, save
from tests.runtime.checkpoint.test_faults import ALONE

PAIR = Case([Strategy(data=2)] * 5)
Data = dict[str, Any]


def reshape(data: Data, name: str, shape: list[int]) -> None:
    """Set the shape of a tensor, in one piece."""
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
"""Changes that exporting the weights does not notice."""
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
    """Change a checkpoint and write matching checksums."""
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
    except FileFormatError:  # the change does not fit the schema
        write_data(folder / META, data)


def written(folder: str) -> None:
    run = make_run(PAIR)
    go_on(run, 2)
    save(run, Path(folder))


def refused(folder: str, changes: list[str]) -> dict[str, str]:
    """The error of loading each forged checkpoint; the run then continues like one that loaded none of them."""
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
    for change in changes:  # one process and an export may accept changes of what they do not read
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
    """A position in the data that rank 1 cannot load."""

    at = 0

    def state_dict(self) -> Data:
        return {"at": self.at}

    def load_state_dict(self, state: Data) -> None:
        if dist.get_rank() == 1:
            raise ValueError("of other data")
        self.at = state["at"]


def one_cannot(folder: str) -> tuple[str, str]:
    """The errors on loading and saving when the data of rank 1 fail."""
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
    """Make the checkpoint one of an early version without lineage."""
    write_sealed(folder, replace(read_manifest(folder), run="", sequence=0, ancestors={}))
    assert not {"run", "sequence", "ancestors"} & json.loads((folder / META).read_text()).keys()


@pytest.mark.parametrize("again", ["same process", "new process"])
def test_abandoned_checkpoints_are_neither_newest_nor_deleted(tmp_path: Path, again: str) -> None:
    run = make_run(ALONE)
    for step in (10, 20, 30, 40):
        save(run, tmp_path / f"step-{step}", step=step)
    run = run if again == "same process" else make_run(ALONE)
    load(run, tmp_path / "step-20")
    for step in (21, 22, 23):
        save(run, tmp_path / f"step-{step}", step=step, keep=3)
    assert names(tmp_path) == ["step-21", "step-22", "step-23", "step-30", "step-40"]
    for _ in range(2):  # restarts continue the lineage
        run = make_run(ALONE)
        found = run[0].load_latest(tmp_path, run[1])
        assert found.step == max(int(name[5:]) for name in names(tmp_path) if name not in ("step-30", "step-40"))
        save(run, tmp_path / f"step-{found.step + 1}", step=found.step + 1, keep=3)
    assert names(tmp_path) == ["step-23", "step-24", "step-25", "step-30", "step-40"]


def test_another_run_beside_it_and_folders_of_its_own(tmp_path: Path) -> None:
    """A run deletes only its own checkpoints, separately in each folder that it saves to."""
    other = make_run(ALONE)
    save(other, tmp_path / "all" / "other", step=1)
    run = make_run(ALONE)
    for step in (1, 2, 3):
        save(run, tmp_path / "all" / f"step-{step}", step=step, keep=1)
        save(run, tmp_path / "best" / f"step-{step}", step=step, keep=2)
    assert names(tmp_path / "all") == ["other", "step-3"]
    assert names(tmp_path / "best") == ["step-2", "step-3"]


def test_checkpoints_without_a_record(tmp_path: Path) -> None:
    """The one with most steps is the newest; checkpoints that continue them are newer, and do not delete them."""
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
    parallel, optimizer = make_run(ALONE)[:2]
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
    """Without checkpoints training starts anew; a single checkpoint instead of a folder of them is an error."""
    parallel = make_run(ALONE)[0]
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
    parallel, optimizer = make_run(ALONE)[:2]
    parallel.save(tmp_path / "step-1", optimizer)
    with pytest.raises(InputError, match=r"folder of checkpoints \(step-1\)") as caught:
        parallel.load(tmp_path, optimizer)
    assert "delete" not in str(caught.value)
    assert (caught.value.field, caught.value.value) == ("checkpoint", tmp_path)


def test_a_file_in_the_place_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(InputError, match="give a folder"):
        make_run(ALONE)[0].save(tmp_path / "notes")
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
    half = copied(LocalShard("weight", (4,), torch.arange(4.0), Box(((2, 4),)), Box(((0, 2),))))
    assert (half.tensor.tolist(), half.local, half.box) == ([2.0, 3.0], all_of((2,)), all_of((2,)))


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


def averaged_run(seed: int) -> tuple[Any, torch.optim.swa_utils.AveragedModel]:
    run = make_run(Case([Strategy(zero=2, zero_stage=3)] * 5), seed=seed)
    return run, torch.optim.swa_utils.AveragedModel(
        run[0], multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )


def extras(folder: str) -> list[str]:
    """The errors and warnings for extra state that is a shard or differs between ranks; averages are restored."""
    run, averaged = averaged_run(seed=0)
    for _ in range(2):
        go_on(run, 1)
        averaged.update_parameters(run[0])
    said = []
    for extra in ({"other": run[1]}, {"shards": dict(run[0].named_parameters())}):
        with pytest.raises(InputError) as raised:
            save(run, Path(folder, "parts"), extra=extra)
        said.append(str(raised.value))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save(run, Path(folder, "one"), extra={"averaged": averaged, "rank": torch.tensor(dist.get_rank())})
    other, again = averaged_run(seed=1)
    other[0].load(Path(folder, "one"), other[1], extra={"averaged": again})
    assert int(again.n_averaged) == 2
    same(again.module.full_state_dict(), averaged.module.full_state_dict())
    same(other[0].full_state_dict(), run[0].full_state_dict())
    return [*said, *(str(one.message) for one in caught)]


def test_parts_are_not_saved_as_values_of_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    first, second = pool.run(2, extras, folder=str(tmp_path))
    for optimizer, shards, *warned in (first, second):
        assert "extra['other']" in optimizer
        assert "this rank's part of a tensor" in shards
        assert len(warned) == (warned == first[2:])
    assert "extra['rank']" in first[2]


def test_a_place_is_that_of_the_moment_of_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, left = make_run(ALONE), threading.Event()
    begin = checkpointer.begin_folder
    monkeypatch.setattr(checkpointer, "begin_folder", lambda *given, **more: left.wait(9) and begin(*given, **more))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    save(run, "one", asynchronous=True)
    monkeypatch.chdir(tmp_path)
    left.set()
    run[0].finish_saving()
    assert names(tmp_path) == ["work"]
    assert names(tmp_path / "work") == ["one"]
