"""Checkpoints of cyclic data parallelism: a resumed run equals an uninterrupted one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from galvatron_lite import folders
from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.runtime.checkpoint.manifest import META
from galvatron_lite.runtime.cyclic.checkpoint import check_complete, flushed_state, latest
from tests.cyclic_reference import train_reference
from tests.parallelism.cyclic.models import blocks_case, make_batches, make_plan, mixed_case, split
from tests.runtime.cyclic.saving import ADAM, Training, check_same

SETTINGS = ["single", "data", "stages"]
RULES = ["cdp-v1", "cdp-v2"]
STEPS, SAVED = 4, 2
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
HALVED = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 3], gamma=0.5)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.fixture(autouse=True, scope="module")
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def blocks(setting: str, rule: str = "cdp-v2", count: int = 3) -> Training:
    case = blocks_case(count)
    return Training(case, make_plan(case[2], rule, setting), make_batches(STEPS, count), ADAM, HALVED)


def mixed(setting: str, rule: str = "cdp-v2") -> Training:
    """A model with a skip over a stage and running statistics."""
    case, batches = mixed_case(), make_batches(STEPS, 3, rows=4)
    return Training(case, make_plan(case[2], rule, setting, rows=4), batches, MOMENTUM, example=batches[0])


def elsewhere(training: Training, setting: str) -> Training:
    """The same training in another setting."""
    plan = training.plan
    return replace(training, plan=make_plan(training.case[2], plan.cyclic.rule, setting, plan.microbatch))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_resuming_gives_the_run_that_was_not_stopped(tmp_path: Path, setting: str, rule: str) -> None:
    """Bit for bit: losses, parameters, states of Adam, running statistics, a schedule of learning rates."""
    training = replace(mixed(setting, rule), factory=ADAM, scheduler=HALVED)
    whole = training.run()
    check_same(training.run(saves={SAVED: tmp_path / "one"}), whole)
    check_same(training.run(start=tmp_path / "one"), whole)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_run_continues_anywhere(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any number of workers, rule and step; frozen and unused parameters; bit for bit in the same setting."""
    count, rule = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(RULES))
    written, read = data.draw(st.sampled_from(SETTINGS)), data.draw(st.sampled_from(SETTINGS))
    step, place = data.draw(st.integers(0, STEPS - 1)), tmp_path_factory.mktemp("any") / "one"
    training = blocks(written, rule, count)
    training.case[0].blocks[0].weight.requires_grad_(data.draw(st.booleans()))
    training.case[0].blocks[-1].idle = torch.nn.Parameter(torch.ones(2))
    whole = training.run()
    training.run(saves={step: place}, end=step + 1)
    resumed = elsewhere(training, read).run(start=place)
    if read == written:
        check_same(resumed, whole)
    expected = {name: value for run in whole for name, value in run.parameters.items()}
    for run in resumed:
        for name, value in run.parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("written", "rule"), list(zip(SETTINGS, [*RULES, "cdp-v2"], strict=True)))
def test_continues_in_any_setting(tmp_path: Path, written: str, rule: str) -> None:
    """The resumed run equals the reference of delayed gradients."""
    training = mixed(written, rule)
    training.run(saves={SAVED: tmp_path / "one"}, end=SAVED + 1)
    parts = [split(batch, 3) for batch in training.batches]
    stages = [["stem", "scale", "blocks.0"], ["blocks.1", "blocks.2"], ["blocks.3", "norm", "head"]]
    steps = train_reference(training.case[0], stages, parts, optimizer_factory=MOMENTUM, rule=rule)
    for setting in SETTINGS:
        for run in elsewhere(training, setting).run(start=tmp_path / "one"):
            for name, value in run.parameters.items():
                torch.testing.assert_close(value, steps[-1].parameters[name], rtol=0, atol=1e-12)
            for number, loss in run.losses.items():
                assert loss == pytest.approx(steps[number // 3].losses[number % 3], abs=1e-12)


def test_statistics_of_several_processes_become_their_mean(tmp_path: Path) -> None:
    training = mixed("data")
    before = training.run(saves={SAVED: tmp_path / "one"}, end=SAVED)
    training.run(saves={SAVED: tmp_path / "one"}, end=SAVED + 1)
    (alone,) = elsewhere(training, "single").run(start=tmp_path / "one", end=SAVED)
    mean = torch.stack([run.buffers["norm.running_mean"] for run in before]).mean(0)
    torch.testing.assert_close(alone.buffers["norm.running_mean"], mean)
    assert len({run.buffers["norm.running_mean"].sum().item() for run in before}) == 3, "they differed"


@pytest.mark.parametrize("setting", SETTINGS)
def test_flushed_state_is_the_model_with_all_its_updates(tmp_path: Path, setting: str) -> None:
    training = mixed(setting)
    training.run(saves={SAVED: tmp_path / "one"}, end=SAVED + 1)
    state, ended = flushed_state(tmp_path / "one"), training.run(end=SAVED)
    assert state.keys() == training.case[0].state_dict().keys()
    training.case[0].load_state_dict(state)
    for run in ended:
        assert all(torch.equal(value, state[name]) for name, value in run.parameters.items())


def test_every_process_writes_one_stage(tmp_path: Path) -> None:
    """Under ``data`` each process writes one stage, with older parameters if they are still used."""
    blocks("data").run(saves={SAVED: tmp_path / "one"}, end=SAVED + 1)
    manifest = check_complete(tmp_path / "one")
    assert sorted(manifest.files) == [f"{what}-{place}.pt" for what in ("process", "stage") for place in range(3)]
    assert (manifest.step, manifest.base, manifest.workers) == (SAVED, SAVED - 1, 3)
    older = [torch.load(tmp_path / "one" / f"stage-{stage}.pt", weights_only=True)["older"] for stage in range(3)]
    assert [one is not None for one in older] == [True, True, False]


def grouped(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Adam with a group for each parameter."""
    return torch.optim.Adam([{"params": [one]} for one in parameters])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rule": "cdp-v1"}, r"cdp-v2 with 3 workers; this plan has cdp-v1.*load_full_state_dict\(flushed_state"),
        ({"count": 2}, r"with 3 workers; this plan has cdp-v2 with 2.*load_full_state_dict\(flushed_state"),
        ({"factory": MOMENTUM}, "optimizer: 'SGD' cannot be used.*states of a Adam"),
        ({"factory": grouped}, "optimizer: 'Adam' cannot be used.*parameter groups are others"),
        ({"scheduler": None}, "scheduler is missing.*states of a MultiStepLR"),
        ({"width": 4}, r"parameter: 'float64 \[3, 3\]' cannot be used.*is float64 \[4, 4\] in this model"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    blocks("single").run(saves={1: tmp_path / "one"}, end=2)
    case = blocks_case(change.pop("count", 3))
    if width := change.pop("width", None):
        case[0].blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in case[0].blocks)
    plan = make_plan(case[2], change.pop("rule", "cdp-v2"), "single")
    with pytest.raises(InputError, match=f"(?s){said}"):
        replace(Training(case, plan, [], ADAM, HALVED), **change).run(start=tmp_path / "one")


def training(setting: str = "data", scheduler: Any = None) -> Training:
    torch.manual_seed(2)
    case = blocks_case(2)
    return Training(case, make_plan(case[2], "cdp-v2", setting), make_batches(4, 2), ADAM, scheduler)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 1, 2 and 3."""
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
        check_complete(place)


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


def test_the_disk_itself_is_asked(tmp_path: Path) -> None:
    """Writing with torch to a device that is full raises the error of the system, not one of torch."""
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
    """A checkpoint of the same name is replaced; the process ends before, between or after the two renames."""
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
    assert check_complete(found).step == 2
    check_same(run.run(start=found), whole)
    run.run(saves={3: tmp_path / "last"})
    assert list(tmp_path.iterdir()) == [tmp_path / "last"], "the next checkpoint removes what was left"


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
    """A schedule that is an object."""

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


class Full:
    """A disk with room for some more bytes."""

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


def test_a_resumed_run_writes_checkpoints_too(tmp_path: Path) -> None:
    training = blocks("data")
    whole = training.run()
    training.run(saves={0: tmp_path / "one"})
    check_same(training.run(start=tmp_path / "one", saves={STEPS - 1: tmp_path / "two"}), whole)
    check_same(training.run(start=tmp_path / "two"), whole)
