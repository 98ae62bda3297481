"""Losses in which samples weigh unlike, and those on shares of a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import call_model, loss_of
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.vocabulary import logits
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.store import write_profile
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.loss.weights import TargetCount, TargetCounts, share_factors
from galvatron_lite.runtime.parameters.full_state import full_gradients
from tests.equivalence import families
from tests.equivalence.families import build_family, build_model
from tests.pool import WorkerPool
from tests.runtime.losses import count_mask, differences, make, planned, refusals, switch_refusal
from tests.runtime.plans import make_plan

TWO = ("data", "zero1", "zero3", "pipeline")
ALONE, FOUR = ("micro-batches",), ("pipeline and data",)
"""Of one process: for kinds that share a batch each in its own way; the others have micro-batches in pipelines."""


@pytest.mark.parametrize(
    ("kind", "options", "more"),
    [
        ("llama", {}, ("context", "tensor")),
        ("bert", {}, ("tensor",)),
        ("t5", {}, ()),
        ("plain", {}, ("tensor",)),
        ("classes", {}, ()),
        ("sum", {"loss_reduction": "sum"}, ()),
        ("masked", {"loss_weight": count_mask}, ()),
        ("buffers", {}, ("recompute", "selective")),
        ("two terms", {}, ("context", "tensor")),
        ("ctc", {}, ("tensor",)),
        ("positions", {}, ("tensor",)),
    ],
)
def test_losses_train_as_in_one_process(
    pool: WorkerPool, kind: str, options: dict[str, Any], more: tuple[str, ...]
) -> None:
    worlds = {2: (*TWO, *more)}
    worlds |= {1: ALONE} if kind in ("llama", "sum", "masked", "buffers") else {}
    worlds |= {4: FOUR} if kind in ("bert", "sum", "two terms") else {}
    for world, names in worlds.items():
        for found in pool.run(world, differences, kind=kind, names=names, **options):
            assert found == []


@pytest.mark.parametrize(
    ("kind", "names", "said"),
    [
        ("masked", ("micro-batches", "data", "pipeline"), "loss_weight="),
        ("buffers", ("tensor",), "Forward passes update"),
        ("sum", ("micro-batches", "data"), "loss_reduction='sum'"),
        ("contrastive", ("micro-batches", "data", "pipeline"), "--fix dp=1"),
        ("loose buffer", ("pipeline",), "Code between layers updates these buffers"),
        ("penalty", ("zero3", "pipeline", "tensor"), "weight_decay"),
        ("tied by hand", ("zero3", "pipeline", "tensor"), "outside of their layers"),
        ("head by hand", ("zero3",), "outside of their layers"),
        ("inner module", ("zero3", "pipeline"), "outside of their layers"),
        ("reversible", ("zero3", "pipeline"), "outside of their layers"),
        ("slope", ("zero3", "pipeline", "tensor", "recompute"), "Forward passes take gradients"),
        ("written", ("micro-batches", "zero1", "pipeline", "recompute"), "Forward passes change these parameters"),
        ("counting", ("micro-batches", "recompute"), "Every forward pass changes"),
    ],
)
def test_refused_before_the_first_step(pool: WorkerPool, kind: str, names: tuple[str, ...], said: str) -> None:
    alone = [name for name in names if name == "micro-batches"]
    for world, some in ((1, alone), (2, names[len(alone) :])):
        for messages in pool.run(world, refusals, kind=kind, names=some) if some else ():
            assert len(messages) == len(some)
            assert all(message.startswith("InputError") and said in message for message in messages), messages


def test_a_switch_to_a_plan_that_trains_otherwise_is_refused(pool: WorkerPool) -> None:
    for message in pool.run(2, switch_refusal, kind="contrastive", first="tensor", other="data"):
        assert "compares samples" in message


@pytest.mark.parametrize("kind", ["contrastive", "penalty", "written", "buffers", "masked"])
def test_the_planner_keeps_to_plans_that_train_it_right(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    model, batch = make(kind)
    path = tmp_path / "profile.yaml"
    write_profile(estimate_profile(trace(model, batch), load_cluster("t4", 2), precision="fp32", name=kind), path)
    (plan, error), (other, _) = pool.run(2, planned, kind=kind, profile=str(path))
    assert plan == other
    if kind == "masked":
        assert "loss_weight=" in error
        return
    strategies = [run.strategy for stage in plan.stages for run in stage.runs]
    if kind == "contrastive":
        _, error = pool.run(2, planned, kind=kind, profile=str(path), fix=["dp=2"])[0]
        assert "compares samples with one another" in error
        assert plan.microbatches == 1
        assert {one.batch_degree for one in strategies} == {1}
    else:
        assert {(one.tensor, one.context, one.recompute) for one in strategies} == {(1, 1, Recompute.NONE)}
    assert kind not in ("penalty", "written") or len(plan.stages) == 1
    assert kind != "written" or plan.microbatches == 1


@pytest.mark.parametrize("fix", [[], ["tp=1"]])
def test_a_buffer_that_leaves_no_plan_is_named_with_its_remedy(
    pool: WorkerPool, tmp_path: Path, fix: list[str]
) -> None:
    model, batch = make("read buffer")
    path = tmp_path / "profile.yaml"
    write_profile(estimate_profile(trace(model, batch), load_cluster("t4", 2), precision="fp32", name="read"), path)
    for plan, error in pool.run(2, planned, kind="read buffer", profile=str(path), fix=fix):
        assert plan is None
        assert "let forward passes update average only after they have read them" in error.lower()
        assert "one of the pins" not in error
        assert ("Lift --fix tp=1" in error) == bool(fix)


def test_a_share_without_counted_labels_is_refused(pool: WorkerPool) -> None:
    ((message,),) = pool.run(1, refusals, kind="masked 0/0", names=["micro-batches"], loss_weight=count_mask)
    assert ".clamp(min=1)" in message


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("contrastive", ("tensor",)),
        ("loose buffer", ("data", "zero3")),
        ("penalty", ("data", "zero1")),
        ("tied by hand", ("data", "zero1")),
        ("inner module", ("data", "zero1")),
        ("reversible", ("data", "zero1")),
        ("written", ("data",)),
        ("slope", ("data", "zero1")),
        ("counting", ("data", "zero1")),
    ],
)
def test_plans_that_train_such_losses_right(pool: WorkerPool, kind: str, names: tuple[str, ...]) -> None:
    for found in pool.run(2, differences, kind=kind, names=names):
        assert found == []


def test_means_over_different_targets_that_count_unlike() -> None:
    labels = torch.tensor([[1, -100], [1, 1]])
    counts = TargetCounts((TargetCount(".a", 0, -100), TargetCount(".b", 0, -100)))
    assert share_factors(counts, "mean", {"a": labels, "b": labels}, 2) is not None
    with pytest.raises(InputError, match=r"different targets \(a, b\)"):
        share_factors(counts, "mean", {"a": labels, "b": labels.abs()}, 2)
    beside = TargetCounts((TargetCount(".a", 0, -100),), even=True)
    assert share_factors(beside, "mean", {"a": labels.abs()}, 2) is not None
    with pytest.raises(InputError, match=r"targets \(a\).* and of other terms"):
        share_factors(beside, "mean", {"a": labels}, 2)


def test_weights_are_numbers_of_at_least_zero() -> None:
    with pytest.raises(InputError, match="loss_weight"):
        share_factors(lambda _: -1.0, "mean", torch.ones(4, 2), 2)


VOCAB, SAMPLES = 67, 4
NAMES = ("gpt2", "llama", "qwen2", "bert", "zoo-gpt")


def _logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["logits"]


def _wrong(name: str, tensor: int, zero: int, microbatches: int) -> list[str]:
    """What differs from one process."""
    model, batch, layers = build_family(name, SAMPLES)
    loss = loss_of(call_model(model, batch), batch)
    loss.backward()
    loss = loss.detach()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    whole = _logits_of(call_model(model, batch)).detach()
    strategies = [[Strategy(zero=zero, tensor=tensor)] * len(layers)]
    plan = make_plan([[layer.name for layer in layers]], strategies, SAMPLES, microbatches)
    parallel = ParallelModel(build_model(name), plan, layers, batch, device="cpu")
    with patch.object(logits, "gather_last", side_effect=AssertionError("whole logits were made")):
        mine = parallel.backward_step(batch).detach()
    dist.all_reduce(mine)
    found = full_gradients(parallel)
    wrong = [] if abs(float(mine) - float(loss)) < 1e-5 else [f"{name}: loss {float(mine)}, not {float(loss)}"]
    wrong += [f"{name}: {key}" for key in wanted if not torch.allclose(found[key], wanted[key], rtol=1e-4, atol=1e-6)]
    outputs = _logits_of(parallel.outputs(batch))
    if whole.dim() and not (type(outputs) is Tensor and torch.allclose(outputs, whole, atol=1e-5)):
        wrong.append(f"{name}: outputs")
    return wrong


def compare(cases: list[tuple[str, int, int, int]]) -> list[str]:
    with patch.object(families, "VOCAB", VOCAB):
        return [one for case in cases for one in _wrong(*case)]


def test_families_train_like_one_process(pool: WorkerPool) -> None:
    assert pool.run(2, compare, cases=[(name, 2, 1, 1) for name in NAMES]) == [[]] * 2


def test_with_zero_and_microbatches(pool: WorkerPool) -> None:
    cases = [("gpt2", 4, 1, 2), ("bert", 2, 2, 2)]
    assert pool.run(4, compare, cases=cases) == [[]] * 4
