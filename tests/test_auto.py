"""``auto_parallelize`` from end to end."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite import auto_parallelize
from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.probe import probe
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import DeadParameters
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import write_plan
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import OriginKind
from galvatron_lite.profiler.store import kept_profile, profile_name, read_profile, save_profile, write_profile
from galvatron_lite.units import parse_bytes
from tests.auto_jobs import alone, error_of, notes_of, pinned_runs, refused, warnings_of, with_nothing_else
from tests.pool import JobError, WorkerPool

STEPS = 4
MEASURING = 280.0
"""Seconds until a job that measures counts as hung, however busy the machine."""


@pytest.fixture(scope="module")
def measured(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder with the profile of a first run on two processes, and what that run returned."""
    folder = tmp_path_factory.mktemp("profiles")
    return folder, pool.run(2, with_nothing_else, timeout=MEASURING, name="gpt-tiny", folder=str(folder), steps=STEPS)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def test_with_no_arguments_at_all(pool: WorkerPool, measured: tuple[Path, list[Any]]) -> None:
    folder, ((plan, losses, written), (other_plan, other_losses, _)) = measured
    assert plan == other_plan
    assert plan["provenance"]["profile_origin"].startswith("measured")
    wanted = alone("gpt-tiny", STEPS)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert other_losses == pytest.approx(wanted, rel=1e-5)
    again = pool.run(2, with_nothing_else, timeout=MEASURING, name="gpt-tiny", folder=str(folder), steps=1)
    assert again[0][2] == written


def test_one_process_and_a_model_of_transformers(pool: WorkerPool, tmp_path: Path) -> None:
    name = "llama-of-transformers"
    ((plan, losses, _),) = pool.run(
        1, with_nothing_else, timeout=MEASURING, name=name, folder=str(tmp_path), steps=STEPS
    )
    assert plan["devices"] == 1
    assert losses == pytest.approx(alone(name, STEPS), rel=1e-5)


def _plan(devices: int, first: str = "blocks.0") -> Plan:
    strategy = Strategy(data=devices)
    runs = [LayerRun("before", "before", 1, strategy), LayerRun(first, "blocks.1", 2, strategy)]
    runs.append(LayerRun("after", "after", 1, strategy))
    return Plan(PLAN_VERSION, "gpt", devices, 8, 1, Schedule.ONE_F_ONE_B, "fp32", (Stage(tuple(runs)),))


def test_another_world_than_the_plans(pool: WorkerPool, tmp_path: Path) -> None:
    write_plan(_plan(4), tmp_path / "plan.yaml")
    for message in pool.run(2, error_of, plan=str(tmp_path / "plan.yaml"), mem="95%"):
        assert message.startswith("LaunchError")
        assert "4" in message
        assert "2" in message


def test_a_layer_the_model_does_not_have(pool: WorkerPool) -> None:
    for message in pool.run(2, error_of, plan=_plan(2, "blocks.9"), mem="95%"):
        assert "blocks.9" in message


def test_a_plan_file_does_not_hide_that_batch_norms_see_a_share(pool: WorkerPool) -> None:
    names = "before", "stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "after"
    stages = (Stage(tuple(LayerRun(name, name, 1, Strategy()) for name in names)),)
    plans = [Plan(PLAN_VERSION, "r", 1, n, n, Schedule.ONE_F_ONE_B, "fp32", stages) for n in (1, 2)]
    alone, shared = (pool.run(1, notes_of, plan=plan, name="resnet-mini")[0] for plan in plans)
    assert not any("batch norms" in line for line in alone)
    assert any("batch norms take statistics of as few as 1 of the 2 samples" in line for line in shared)


def test_a_budget_too_small_is_an_error_on_every_rank(pool: WorkerPool, measured: tuple[Path, list[Any]]) -> None:
    profile = str(next(measured[0].glob("*/*.yaml")))
    for message in pool.run(2, error_of, plan=None, mem="1.1MB", profile=profile):
        assert message.startswith("InfeasibleError")
        named = re.search(r"smallest budget is (?:about )?(\S+B)\.", message)
        assert named is not None
        assert parse_bytes(named[1]) > parse_bytes("1.1MB")


def test_a_profile_from_other_hardware_warns(
    pool: WorkerPool, tmp_path: Path, measured: tuple[Path, list[Any]]
) -> None:
    profile = read_profile(next(measured[0].glob("*/*.yaml")))
    fingerprint = profile.cluster.fingerprint | {"cpu": "Another CPU"}
    other = replace(profile, cluster=replace(profile.cluster, fingerprint=fingerprint))
    write_profile(other, tmp_path / "other.yaml")
    (said, _) = pool.run(2, warnings_of, profile=str(tmp_path / "other.yaml"))
    assert any("other hardware" in message and "Another CPU" in message for message in said)


def test_parameters_that_never_reach_the_loss_warn_once(
    pool: WorkerPool, tmp_path: Path, measured: tuple[Path, list[Any]]
) -> None:
    profile = read_profile(next(measured[0].glob("*/*.yaml")))
    dead = replace(profile, graph=replace(profile.graph, dead=(DeadParameters("blocks.1.mlp", 1000),)))
    write_profile(dead, tmp_path / "dead.yaml")
    said, silent = pool.run(2, warnings_of, profile=str(tmp_path / "dead.yaml"))
    assert ["blocks.1.mlp" in message for message in said if "never reach" in message] == [True]
    assert not any("never reach" in message for message in silent)


def test_a_missing_gpu(pool: WorkerPool) -> None:
    assert not torch.cuda.is_available() or pytest.fail("this test is for machines without a GPU")
    with pytest.raises(JobError, match="no GPU"):
        pool.run(1, on_a_gpu)


def on_a_gpu() -> None:
    auto_parallelize(nn.Linear(2, 2), torch.zeros(2, 2), device="cuda")


def test_a_model_that_does_not_say_what_it_takes() -> None:
    with pytest.raises(InputError, match="example batch"):
        auto_parallelize(nn.Linear(2, 2))


class Two(nn.Module):
    """Two towers, the second of which may read the first: the same parameters in another forward pass."""

    def __init__(self, *, joined: bool = False) -> None:
        super().__init__()
        self.joined = joined
        self.left = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.right = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, rows: Tensor) -> Tensor:
        left = self.left(rows)
        return (left + self.right(left if self.joined else rows)).square().mean()


def _scaled(output: Any, batch: Any) -> Tensor:
    return (torch.as_tensor(output) * batch.float().square().sum()).log()


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn", "said"),
    [
        (Two(), torch.zeros(2, 4), None, ""),
        (Two(), torch.zeros(6, 4), None, ""),
        (Two(joined=True), torch.zeros(2, 4), None, "layers"),
        (Two(), torch.zeros(2, 5, 4), None, "shape of a sample"),
        (Two(), torch.zeros(2, 4), _scaled, "the loss"),
    ],
    ids=["same", "more samples", "forward", "shape", "loss"],
)
def test_a_kept_profile_is_taken_only_for_the_model_as_it_runs_now(
    tmp_path: Path, model: nn.Module, batch: Tensor, loss_fn: Any, said: str
) -> None:
    graph = trace(Two(), torch.zeros(2, 4))
    known = estimate_profile(graph, load_cluster("t4", 1), precision="fp32", name="two")
    path = tmp_path / "machine" / f"{profile_name(model)}.yaml"
    write_profile(replace(known, graph=graph, cluster=replace(known.cluster, fingerprint={})), path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = kept_profile(model, trace(model, batch, loss_fn=loss_fn), tmp_path)
    assert (found is not None) == (not said)
    messages = [str(one.message) for one in caught]
    assert all(str(path) in message and said in message for message in messages)
    assert len(messages) == bool(said)


def test_what_galvatron_profile_has_measured_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it is called; not an estimate, another machine's, or another model's of the same class."""
    model, graph, here = Two(), trace(Two(), torch.zeros(2, 4)), probe()
    estimated = replace(estimate_profile(graph, here, precision="fp32", name="mine"), graph=graph, cluster=here)
    measured = replace(estimated, origin=replace(estimated.origin, kind=OriginKind.MEASURED))
    elsewhere = replace(here, fingerprint={**here.fingerprint, "host": "another"})
    other = replace(measured, name="other", graph=trace(Two(joined=True), torch.zeros(2, 4)))
    for made in (estimated, replace(measured, cluster=elsewhere), other):
        save_profile(made, tmp_path, "machine")
        assert kept_profile(model, graph, tmp_path) is None
    assert capsys.readouterr().err == ""
    path = save_profile(measured, tmp_path, "machine")
    save_profile(other, tmp_path, "machine")
    assert kept_profile(model, graph, tmp_path) == measured
    assert capsys.readouterr().err == f"galvatron: profile {path} is of this model on this machine: taken\n"


@pytest.mark.parametrize("pipeline", [1, 2])
def test_pins_shares_and_random_states(pool: WorkerPool, shared: Path, pipeline: int) -> None:
    """The first run of all measures."""
    for runs in pool.run(2, pinned_runs, timeout=MEASURING, folder=str(shared), pipeline=pipeline):
        for plan, losses, stayed in runs:
            assert stayed
            assert losses == pytest.approx(alone("gpt-tiny", 2), rel=1e-4)
            assert len(plan["stages"]) == pipeline
            taken = [run["strategy"] for stage in plan["stages"] for run in stage["runs"]]
            assert all(one.get("tensor", 1) == one.get("zero", 1) == 1 for one in taken)


def test_a_folder_and_pins_that_cannot_be_kept(pool: WorkerPool, tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("")
    write_plan(_plan(2), tmp_path / "plan.yaml")
    for said in pool.run(2, refused, folder=str(place), plan=str(tmp_path / "plan.yaml")):
        assert "folder=PATH" in said[0]
        assert said[1] == "fix: 'pp=2' cannot be used. The plan is given: leave one of the two out."
