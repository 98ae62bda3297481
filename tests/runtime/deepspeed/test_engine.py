"""DeepSpeed's engine trains like one process, whatever its stage."""

from __future__ import annotations

import importlib.util
import re
import shlex
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from galvatron_lite.launch.commands import read_hostfile
from galvatron_lite.runtime.checkpoint.unsplit import load_into
from tests.docs.pages import ROOT, blocks, text_of
from tests.pool import WorkerPool
from tests.runtime.cyclic.launched import launch
from tests.runtime.deepspeed import jobs
from tests.runtime.plans import clipped, losses_alone
from tests.runtime.training import ADAMW, Case, Trained, assert_same, make_batch, make_model, train_alone

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
EVERY = sorted(jobs.STRATEGIES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes save."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def answers(pool: WorkerPool, folder: Path) -> dict[str, Any]:
    """Of the first of two processes; one job, as DeepSpeed takes seconds to start."""
    code = blocks(text_of("docs/deepspeed.md"), "python")[0]
    first, second = pool.run(2, jobs.everything, timeout=300, folder=str(folder), code=code)
    assert first["trained"]["zero3"].losses == second["trained"]["zero3"].losses
    return first


@pytest.fixture(scope="module")
def alone() -> Trained:
    return train_alone(Case([], max_grad_norm=jobs.CLIP))


@pytest.mark.parametrize("name", EVERY)
def test_every_stage_trains_like_one_process_with_clipping_and_accumulation(
    answers: dict[str, Any], alone: Trained, name: str
) -> None:
    found = answers["trained"][name]
    assert_same(Trained(found.losses, {}, found.state), Trained(alone.losses, {}, alone.state))
    assert found.stage == jobs.STRATEGIES[name].zero_stage


def test_bf16_trains_nearly_like_float32(answers: dict[str, Any], alone: Trained) -> None:
    torch.testing.assert_close(answers["in_bf16"], alone.losses, rtol=2e-3, atol=0.0)
    assert answers["in_bf16"] != alone.losses


def _plainly(steps: int) -> tuple[list[float], torch.nn.Module, torch.optim.Optimizer]:
    """One process, with a schedule."""
    model = make_model(jobs.MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    losses = []
    for _ in range(steps):
        losses += losses_alone(model, optimizer, [make_batch()], partial(clipped, largest=jobs.CLIP))
        schedule.step()
    return losses, model, optimizer


def test_the_plain_loop_with_a_schedule_trains_like_one_process(answers: dict[str, Any]) -> None:
    losses, model, _ = _plainly(3)
    for run in answers["plainly"].values():
        assert_same(Trained(run.losses, {}, run.state), Trained(losses, {}, model.state_dict()))


def test_gradients_of_two_batches_add_up(answers: dict[str, Any]) -> None:
    model = make_model(jobs.MODEL)
    losses_alone(model, torch.optim.AdamW(model.parameters(), **ADAMW), [make_batch()])
    for state in answers["accumulated"]:
        assert_same(Trained([], {}, state), Trained([], {}, model.state_dict()))


def test_a_state_of_one_stage_goes_into_another(answers: dict[str, Any]) -> None:
    same, first, second, outputs = answers["reloaded"]
    assert same
    one = train_alone(Case([], max_grad_norm=jobs.CLIP), steps=1)
    model = make_model(jobs.MODEL)
    model.load_state_dict(one.state)
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(first), model(**make_batch()), rtol=1e-5, atol=0.0)
        torch.testing.assert_close(outputs, model(tokens=make_batch()["tokens"]), rtol=1e-4, atol=1e-5)
    assert second < first


def test_what_cannot_be_trained_is_refused_and_changes_nothing(answers: dict[str, Any]) -> None:
    without, second, unsound, copied, *others = answers["refused"]
    assert without == (
        "InputError: optimizer is missing. Make it first: optimizer = parallel.optimizer(torch.optim.AdamW, lr=...)."
    )
    assert "has one already" in second
    assert unsound.startswith("NonFiniteLossError")
    assert "load full_state_dict()" in copied
    named = ["gradients: 'of two batches'"] * 2
    named += ["gradients: 'dropped'", "output_router_logits", "param_groups", "takes no parameter in float64"]
    named += ["batch: 'of rank 1' cannot be used"]
    assert all(part in error for part, error in zip(named, others, strict=True)), others


def test_a_model_on_meta_is_made_in_shards(answers: dict[str, Any]) -> None:
    shards, loss = answers["from_meta"]
    total = sum(parameter.numel() for parameter in make_model(jobs.MODEL).parameters())
    assert total / 2 <= shards < 0.6 * total
    assert 3.0 < loss < 6.0


@pytest.mark.parametrize("name", ["zero3", "zero2", "data"])
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_been_stopped(answers: dict[str, Any], name: str) -> None:
    assert answers["resumed"][name] == (True, True, 2)


@pytest.mark.usefixtures("answers")
def test_the_plain_model_goes_on_from_a_checkpoint_of_deepspeed(folder: Path) -> None:
    _, expected, theirs = _plainly(2)
    model = make_model(jobs.MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    assert load_into(model, folder / "zero3", optimizer).step == 2
    assert_same(Trained([], {}, model.state_dict()), Trained([], {}, expected.state_dict()))
    moments = [
        [state["exp_avg"] for state in one.state.values()] + [state["step"] for state in one.state.values()]
        for one in (optimizer, theirs)
    ]
    torch.testing.assert_close(moments[0], moments[1], rtol=1e-3, atol=1e-7)
    assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def test_deepspeed_goes_on_from_a_checkpoint_of_this_runtime(answers: dict[str, Any]) -> None:
    assert answers["from_galvatron"]


def test_the_script_of_the_page_trains_like_one_process(answers: dict[str, Any]) -> None:
    model = make_model(jobs.MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = losses_alone(model, optimizer, [make_batch()] * 3, partial(clipped, largest=1.0))
    torch.testing.assert_close(answers["page"], losses, rtol=1e-4, atol=0.0)


def test_a_process_that_is_killed_is_named() -> None:
    survivor, victim = launch(2, jobs.lost, 120)
    assert victim.code == -signal.SIGKILL
    said = r"PeerError: Rank 0 waited in vain .*Rank 1 \(.*process \d+\) is gone; it was last seen in step 1, forward"
    assert re.search(said, survivor.told), survivor.told


HOSTS = "# two of them\nworker-1 slots=1\n\nworker-2 slots=1  # the slow one\n"


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text(HOSTS)
    return path


def test_hostfiles_are_read_as_deepspeed_reads_them(hostfile: Path) -> None:
    deepspeed = pytest.importorskip("deepspeed.launcher.runner")
    theirs = deepspeed.fetch_hostfile(str(hostfile))
    assert {host.name: host.slots for host in read_hostfile(hostfile)} == dict(theirs)


def test_its_launcher_takes_the_commands_of_the_page() -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    shown = re.findall(r"^deepspeed (--.*)$", text_of("docs/deepspeed.md"), re.MULTILINE)
    found = [shlex.split(words) for words in shown]
    assert [runner.parse_args(words).user_script for words in found] == ["train.py"] * 2
    assert [runner.parse_args(words).num_gpus for words in found] == [8, -1]
    assert runner.parse_args(found[1]).hostfile == "hosts"


def test_torchrun_takes_the_commands_of_the_pages() -> None:
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "api.md"]
    found = [
        words
        for page in pages
        for words in re.findall(r"torchrun (--[^;`\n]*train\.py)", page.read_text(encoding="utf-8"))
    ]
    assert len(found) >= 2
    for words in found:
        asked = get_args_parser().parse_args(shlex.split(words))
        assert asked.training_script == "train.py"
        assert int(asked.nproc_per_node) > 1
