"""Checkpoints that are torn, that were never finished, or that the disk had no room for."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from galvatron_lite import folders
from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.runtime.checkpoint.manifest import META
from galvatron_lite.runtime.cyclic.checkpoint import check_whole, flushed_state, latest
from tests.parallelism.cyclic.models import blocks_case, make_batches, make_plan
from tests.runtime.cyclic.saving import ADAM, Training, check_same


def training(setting: str = "data", scheduler: Any = None) -> Training:
    torch.manual_seed(2)
    case = blocks_case(2)
    return Training(case, make_plan(case[2], "cdp-v2", setting), make_batches(4, 2), ADAM, scheduler)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of training steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("checkpoints")
    training().run(saves={step: folder / f"step-{step}" for step in (1, 2, 3)})
    return folder


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_changed_byte_is_found(
    written: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("copy") / "one"
    shutil.copytree(written / "step-2", place)
    file = data.draw(st.sampled_from(sorted(place.iterdir())))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    with pytest.raises(FileFormatError, match=file.name):
        check_whole(place)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


@pytest.mark.parametrize("spoil", [_cut, Path.unlink])
@pytest.mark.parametrize("name", [META, "stage-1.pt", "process-0.pt"])
def test_a_torn_folder_is_refused_and_the_one_before_found(
    written: Path, tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    folder = tmp_path / "all"
    shutil.copytree(written, folder)
    assert latest(folder) == folder / "step-3"
    spoil(folder / "step-3" / name)
    for use in (lambda: training().run(start=folder / "step-3"), lambda: flushed_state(folder / "step-3")):
        with pytest.raises(InputError, match=rf"(?s)step-3.*({name}|Make it anew).*"):
            use()
    assert latest(folder) == folder / "step-2"
    shutil.rmtree(folder / "step-2")
    assert latest(folder) == folder / "step-1"
    assert latest(tmp_path / "none") is None


class Full:
    """A disk with room for so many more bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, sink: folders.FileSink, data: Any) -> int:
        count = memoryview(data).nbytes
        self.room -= count
        if self.room < 0:
            sink._error = sink._error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "stage-1.pt")
        return count


@pytest.mark.parametrize("room", [0, 1000, 12000])
def test_a_full_disk_leaves_the_old_checkpoint_and_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    place, run = tmp_path / "one", training()
    whole = run.run()
    run.run(saves={1: place}, end=2)
    before = {file.name: file.read_bytes() for file in place.iterdir()}
    disk = Full(room)
    with monkeypatch.context() as patched:
        patched.setattr(folders.FileSink, "write", lambda sink, data: disk.write(sink, data))
        after = run.run(saves={2: place})
    assert disk.room < 0
    check_same(after, whole)
    for one in after:
        assert [str(error) for error in one.refusals] == [str(after[0].refusals[0])]
    assert "No space left on device" in str(after[0].refusals[0])
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before
    assert list(tmp_path.iterdir()) == [place], "nothing is left of the attempt"
    check_same(run.run(start=place), whole)


def test_the_disk_itself_is_asked(tmp_path: Path) -> None:
    """A real full device: what torch writes to it ends in the system's error, not in torch's."""
    with open("/dev/full", "wb") as stream:
        sink = folders.FileSink(stream)
        torch.save({"x": torch.zeros(100000)}, sink)  # type: ignore[arg-type]
        with pytest.raises(OSError, match="No space left"):
            sink.content()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # so that closing writes what is left


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_machine_lost_while_moving_leaves_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """The same name is written again; it ends before the first move, between the two, or after both."""
    run = training()
    whole = run.run()
    run.run(saves={1: tmp_path / "last"}, end=2)

    class Lost(BaseException):
        pass

    done, rename = [0], Path.rename

    def until(one: Path, target: Path) -> Path:
        if done[0] == renames:
            raise Lost
        done[0] += 1
        return rename(one, target)

    new = folders.begin_folder(tmp_path / "last")
    run.run(saves={2: tmp_path / "second"}, end=3)
    shutil.copytree(tmp_path / "second", new, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "second")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", until)
        if renames < 2:
            with pytest.raises(Lost):
                folders.put_in_place(new, tmp_path / "last")
        else:
            folders.put_in_place(new, tmp_path / "last")
    found = latest(tmp_path)
    assert found is not None
    assert check_whole(found).step == 2
    check_same(run.run(start=found), whole)
    run.run(saves={3: tmp_path / "last"})
    assert list(tmp_path.iterdir()) == [tmp_path / "last"], "the next one clears away what was left"


def test_a_move_that_is_refused_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, place, rename = folders.begin_folder(tmp_path / "one"), tmp_path / "one", Path.rename
    place.mkdir()
    (place / "old").touch()

    def refused(one: Path, target: Path) -> Path:
        if one == new:
            raise OSError(errno.EACCES, "Permission denied")
        return rename(one, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="Permission"):
        folders.put_in_place(new, place)
    assert (place / "old").exists()


class Rate:
    """A schedule that keeps something of its own."""

    def __call__(self, step: int) -> float:
        return 0.5**step


def test_states_that_could_not_be_read_again_are_refused_when_written(tmp_path: Path) -> None:
    class Odd(torch.optim.lr_scheduler.LambdaLR):
        def state_dict(self) -> dict[str, Any]:
            return {"nested": [{"rate": Rate()}]}

    runs = training(scheduler=lambda optimizer: Odd(optimizer, Rate())).run(saves={1: tmp_path / "one"})
    assert all("scheduler['nested'][0]['rate']" in str(run.refusals[0]) for run in runs)
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_by_function_is_kept(tmp_path: Path) -> None:
    run = training(scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, Rate()))
    whole = run.run(saves={2: tmp_path / "one"})
    check_same(run.run(start=tmp_path / "one"), whole)
