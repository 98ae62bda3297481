"""What is said of a plan: batch norms under it, another width of its model, unsure measurements."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from galvatron_lite.api import plan
from galvatron_lite.capture.trace import trace
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.oracle.request import graph_named
from galvatron_lite.plans.describe import other_size
from galvatron_lite.plans.schema import PLAN_VERSION, Plan, Proof, Provenance, Schedule
from galvatron_lite.profiler.schema import Origin, OriginKind, spread_note


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


def noted(graph: ModelGraph, gpus: int, **more: object) -> tuple[str, ...]:
    made = plan(model=graph, cluster="a100-80gb", gpus=gpus, batch=8, **more)  # type: ignore[arg-type]
    assert made.provenance is not None
    return tuple(note for note in made.provenance.notes if "batch norms" in note)


def test_replicas_and_micro_batches_have_statistics_of_their_own() -> None:
    graph = captured(nn.BatchNorm2d)
    (both,) = noted(graph, 2, fix=["dp=2", "pp=1", "microbatches=2"])
    assert "as few as 2 of the 8 samples" in both
    assert "SyncBatchNorm" in both
    assert "--fix microbatches=1" in both
    (parts,) = noted(graph, 1, fix="microbatches=2")
    assert "SyncBatchNorm" not in parts
    assert noted(graph, 1, fix="microbatches=1") == ()


def test_other_norms_need_no_note() -> None:
    for graph in (captured(nn.GroupNorm, 2), graph_named("convnext-t", "fp32")):
        assert noted(graph, 2, fix=["dp=2", "pp=1"]) == (), graph.name


def test_known_shapes_tell_their_batch_norms() -> None:
    (said,) = noted(graph_named("resnet50", "fp32"), 2, fix=["dp=2", "pp=1"])
    assert "as few as 4 of the 8" in said
    assert "microbatches=1" not in said


def test_a_plan_of_another_width_is_told() -> None:
    made_from = Provenance("", "", "", "", "", {}, 1, Proof.GIVEN, parameters=2_000_000)
    given = Plan(PLAN_VERSION, "m", 1, 1, 1, Schedule.ONE_F_ONE_B, "fp32", (), provenance=made_from)
    (said,) = other_size(given, 4_000_000)
    assert "2M parameters" in said
    assert "has 4M" in said
    assert other_size(given, 2_010_000) == other_size(given, 1_990_000) == ()
    assert other_size(replace(given, provenance=replace(made_from, parameters=0)), 5) == ()


def test_measurements_that_differ_are_told() -> None:
    origin = Origin(OriginKind.MEASURED, "CPU", "2026-01-01", 5, spread=0.36)
    (said,) = spread_note(origin)
    assert "36%" in said
    assert spread_note(replace(origin, spread=0.1)) == ()
