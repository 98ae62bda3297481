"""Checkpoints: the resumed run is the one that was not stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.cyclic.checkpoint import check_whole, flushed_state
from tests.cyclic_reference import train_reference
from tests.parallelism.cyclic.models import blocks_case, make_batches, make_plan, mixed_case, split
from tests.runtime.cyclic.saving import ADAM, Training, check_same

SETTINGS = ["single", "data", "stages"]
RULES = ["cdp-v1", "cdp-v2"]
STEPS, SAVED = 4, 2
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
HALVED = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 3], gamma=0.5)


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def blocks(setting: str, rule: str = "cdp-v2", count: int = 3) -> Training:
    case = blocks_case(count)
    return Training(case, make_plan(case[2], rule, setting), make_batches(STEPS, count), ADAM, HALVED)


def mixed(setting: str, rule: str = "cdp-v2") -> Training:
    """With a skip over a stage and running statistics."""
    case, batches = mixed_case(), make_batches(STEPS, 3, rows=4)
    return Training(case, make_plan(case[2], rule, setting, rows=4), batches, MOMENTUM, example=batches[0])


def elsewhere(training: Training, setting: str) -> Training:
    """The same in another setting."""
    plan = training.plan
    assert plan.cyclic is not None
    return replace(training, plan=make_plan(training.case[2], plan.cyclic.rule, setting, plan.microbatch))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_resuming_gives_the_run_that_was_not_stopped(tmp_path: Path, setting: str, rule: str) -> None:
    """Every bit: losses, parameters, states of Adam, running statistics, a schedule of learning rates."""
    training = replace(mixed(setting, rule), factory=ADAM, scheduler=HALVED)
    whole = training.run()
    check_same(training.run(saves={SAVED: tmp_path / "one"}), whole)
    check_same(training.run(start=tmp_path / "one"), whole)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_run_continues_anywhere(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """As many workers, any rule, any step; frozen and unused parameters; bit for bit where the setting is the same."""
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


@pytest.mark.parametrize("step", [0, 1, STEPS - 1])
def test_any_step_can_be_saved(tmp_path: Path, step: int) -> None:
    """Before the first one, too; and a resumed run writes checkpoints as well."""
    training = blocks("data")
    whole = training.run()
    training.run(saves={step: tmp_path / "one"})
    check_same(training.run(start=tmp_path / "one", saves={STEPS - 1: tmp_path / "two"}), whole)
    check_same(training.run(start=tmp_path / "two"), whole)


@pytest.mark.parametrize(("written", "rule"), list(zip(SETTINGS, [*RULES, "cdp-v2"], strict=True)))
def test_continues_in_any_setting(tmp_path: Path, written: str, rule: str) -> None:
    """And equals the plain reference of delayed gradients there."""
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
    """Under ``data`` nobody writes the whole model; older parameters are there where they are still used."""
    blocks("data").run(saves={SAVED: tmp_path / "one"}, end=SAVED + 1)
    manifest = check_whole(tmp_path / "one")
    assert sorted(manifest.files) == [f"{what}-{place}.pt" for what in ("process", "stage") for place in range(3)]
    assert (manifest.step, manifest.base, manifest.workers) == (SAVED, SAVED - 1, 3)
    older = [torch.load(tmp_path / "one" / f"stage-{stage}.pt", weights_only=True)["older"] for stage in range(3)]
    assert [one is not None for one in older] == [True, True, False]


def grouped(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Each parameter by itself."""
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
