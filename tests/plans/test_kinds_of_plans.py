"""Plans of inference and cyclic plans, and what a plan notes of batch norms, of other widths and of measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from galvatron_lite.api import plan
from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.oracle.request import graph_named
from galvatron_lite.parallelism.backends import GALVATRON
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting, device_count, moments
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.describe import other_size
from galvatron_lite.plans.io import check_plan, check_runs, read_plan, write_plan
from galvatron_lite.plans.schema import PLAN_VERSION, Cyclic, LayerRun, Mode, Plan, Proof, Provenance, Schedule, Stage
from galvatron_lite.plans.written import plan_from
from galvatron_lite.profiler.schema import Origin, OriginKind, spread_note
from tests.factories import make_graph, make_kind


def inference(stages: int, mode: Mode = Mode.INFERENCE) -> Plan:
    runs = [Stage((LayerRun(f"l{place}", f"l{place}", 1, Strategy()),)) for place in range(stages)]
    return Plan(PLAN_VERSION, "test", stages, 4, 2, Schedule.ONE_F_ONE_B, "fp32", tuple(runs), mode=mode)


@pytest.mark.parametrize("one", [inference(1), inference(2), inference(2, Mode.TRAINING)])
def test_every_kind_of_plan_is_run(one: Plan) -> None:
    assert check_runs(one) is one


def test_a_backend_without_pipelines_refuses_them() -> None:
    alone = replace(GALVATRON, pipelines=(Mode.TRAINING,))
    with pytest.raises(InputError, match=r"runs no pipelines in inference.*--fix pp=1"):
        check_runs(inference(2), alone)
    assert check_runs(inference(1), alone) == inference(1)


def test_a_pipeline_is_offered() -> None:
    two = {"cluster": "a100-80gb", "gpus": 2, "batch": 2, "mode": "inference", "fix": "pp=2", "backend": "galvatron"}
    assert len(plan(model="vit-huge", **two).stages) == 2  # type: ignore[arg-type]


def cyclic_plan(setting: CyclicSetting, count: int = 3) -> Plan:
    """A plan of one layer a stage."""
    stages = tuple(Stage((LayerRun(f"l{place}", f"l{place}", 1, Strategy()),)) for place in range(count))
    return Plan(
        PLAN_VERSION, "test", device_count(setting, count), 2 * count, count, Schedule.CYCLIC, "fp32", stages,
        cyclic=Cyclic(CyclicRule.V2, setting),
    )  # fmt: skip


@pytest.mark.parametrize("setting", CyclicSetting)
def test_written_read_and_run(setting: CyclicSetting, tmp_path: Path) -> None:
    written = cyclic_plan(setting)
    write_plan(written, tmp_path / "plan.yaml")
    assert check_runs(read_plan(tmp_path / "plan.yaml")) == written
    assert (written.stage_devices, written.microbatch) == (1, 2)
    assert written.pipeline == (3 if setting is CyclicSetting.STAGES else 1)


@pytest.mark.parametrize("count", range(1, 9))
def test_devices_are_those_that_a_stage_is_busy_with(count: int) -> None:
    # Between a worker's forward and backward of a stage its activations are there: the device is taken.
    needed = 0
    for stage in range(count):
        spans = []
        for step in range(4):
            for worker in range(count):
                own = [moment.time for moment in moments(step, worker, stage, count)]
                spans.append((min(own), max(own)))
        middle = range(2 * count, 6 * count)
        needed += max(sum(first <= time <= last for first, last in spans) for time in middle)
    assert device_count(CyclicSetting.STAGES, count) == needed
    assert [device_count(one, count) for one in (CyclicSetting.SINGLE, CyclicSetting.DATA)] == [1, count]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"devices": 4}, "devices"),
        ({"microbatches": 2}, "microbatches"),
        ({"schedule": Schedule.ONE_F_ONE_B}, "schedule"),
        ({"cyclic": None}, "schedule"),
        ({"virtual_stages": 3}, "schedule"),
    ],
)
def test_numbers_that_contradict_one_another(change: dict[str, object], named: str) -> None:
    changed = replace(cyclic_plan(CyclicSetting.DATA), **change)  # type: ignore[arg-type]
    with pytest.raises(InputError) as refused:
        check_plan(changed)
    assert refused.value.field == f"plan, {named}"


def test_layers_of_a_pipeline_are_not_split() -> None:
    whole = cyclic_plan(CyclicSetting.DATA)
    split = Stage((LayerRun("l0", "l0", 1, Strategy(tensor=3)),))
    with pytest.raises(InputError, match="has 1 device"):
        check_plan(replace(whole, stages=(split, *whole.stages[1:])))


def test_a_plan_written_by_hand() -> None:
    graph = make_graph([make_kind("block", 10)], ["block"] * 4)
    stages = [{"runs": [{"layers": name, "strategy": "whole"}]} for name in ("l0..l1", "l2..l3")]
    written = {
        "devices": 3, "global_batch": 4, "microbatches": 2, "stages": stages,
        "cyclic": {"rule": "cdp-v1", "setting": "stages"},
    }  # fmt: skip
    read = plan_from(written, graph, "hand")
    assert read.schedule is Schedule.CYCLIC
    assert read.cyclic == Cyclic(CyclicRule.V1, CyclicSetting.STAGES)


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module], *args: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(*args, 8), nn.ReLU()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


def captured(norm: type[nn.Module], *args: int) -> ModelGraph:
    return trace(Net(norm, *args), (torch.zeros(4, 8, 6, 6),))


def batch_norm_notes(graph: ModelGraph, gpus: int, **more: object) -> tuple[str, ...]:
    found = plan(model=graph, cluster="a100-80gb", gpus=gpus, batch=8, **more)  # type: ignore[arg-type]
    return tuple(note for note in found.provenance.notes if "batch norms" in note)


def test_replicas_and_micro_batches_have_statistics_of_their_own() -> None:
    graph = captured(nn.BatchNorm2d)
    (both,) = batch_norm_notes(graph, 2, fix=["dp=2", "pp=1", "microbatches=2"])
    assert "as few as 2 of the 8 samples" in both
    assert "SyncBatchNorm" in both
    assert "--fix microbatches=1" in both
    (parts,) = batch_norm_notes(graph, 1, fix="microbatches=2")
    assert "SyncBatchNorm" not in parts
    assert batch_norm_notes(graph, 1, fix="microbatches=1") == ()
    assert batch_norm_notes(graph, 2, fix=["dp=2", "pp=1"], mode="inference") == (), "averages are used there"


def test_other_norms_need_no_note() -> None:
    for graph in (captured(nn.GroupNorm, 2), graph_named("convnext-t", "fp32")):
        assert batch_norm_notes(graph, 2, fix=["dp=2", "pp=1"]) == (), graph.name


def test_known_shapes_tell_their_batch_norms() -> None:
    (note,) = batch_norm_notes(graph_named("resnet50", "fp32"), 2, fix=["dp=2", "pp=1"])
    assert "as few as 4 of the 8" in note
    assert "microbatches=1" not in note


def test_a_plan_for_another_number_of_devices_is_reported() -> None:
    origin = Provenance("", "", "", "", "", {}, 1, Proof.GIVEN, parameters=2_000_000)
    given = Plan(PLAN_VERSION, "m", 1, 1, 1, Schedule.ONE_F_ONE_B, "fp32", (), provenance=origin)
    (note,) = other_size(given, 4_000_000)
    assert "2M parameters" in note
    assert "has 4M" in note
    assert other_size(given, 2_010_000) == other_size(given, 1_990_000) == ()
    assert other_size(replace(given, provenance=replace(origin, parameters=0)), 5) == ()


def test_measurements_that_differ_are_reported() -> None:
    origin = Origin(OriginKind.MEASURED, "CPU", "2026-01-01", 5, spread=0.36)
    (note,) = spread_note(origin)
    assert "36%" in note
    assert spread_note(replace(origin, spread=0.1)) == ()
