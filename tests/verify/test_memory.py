"""Memory, volume and prices of a dry run, against the plan."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.shapes import load_model
from galvatron_lite.model.zoo.gpt import GPT, GPTConfig, random_tokens
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.memory import track_peak
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.verify.conformance.layers import PlannedLayers
from galvatron_lite.verify.conformance.volume import predicted_bytes, volume, wire_bytes
from galvatron_lite.verify.dry.roles import named_for, run_roles
from galvatron_lite.verify.dry.step import dry_run, subject_of
from galvatron_lite.verify.schema import Message, MessageType, Verdict
from galvatron_lite.verify.source import example_of, named_source
from scripts.verify_sampled import verify
from studies import kept_bytes
from tests.equivalence.plans import uniform_plan, write_plan
from tests.equivalence.test_plans import sampled
from tests.pool import WorkerPool
from tests.verify.test_faithful import PLANS, graph, right_runs
from tests.verify.worlds import message

CONFIG = GPTConfig(vocab=256, layers=4, hidden=128, heads=4, sequence=64)
SAMPLES = 16
NAMES = ["before", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "after"]
WITHIN = 0.03
PATIENCE = 5.0
"""Seconds that a message is waited behind at most."""


def batch() -> dict[str, torch.Tensor]:
    return random_tokens(SAMPLES, CONFIG.sequence, CONFIG.vocab)


def plan_of(strategy: Strategy, microbatches: int) -> Plan:
    edges = replace(strategy, sequence_parallel=False)
    strategies = dict.fromkeys(NAMES, strategy) | {"before": edges, "after": edges}
    return write_plan([NAMES], strategies, devices=strategy.devices, batch=SAMPLES, microbatches=microbatches)


def others_run() -> bool:
    """Whether another thread of this process runs, or waits for a processor."""
    own = str(threading.get_native_id())
    return any(state(thread) == "R" for thread in Path("/proc/self/task").iterdir() if thread.name != own)


def state(thread: Path) -> str:
    """Of a thread, as the kernel has it (``proc(5)``, the field behind the name); none of one that has ended."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@contextmanager
def settled() -> Iterator[None]:
    """Wait behind every message until gloo's own thread has let go of its tensors.

    Whoever lets go last frees a tensor, and the profiler does not see what other threads than the caller's free. A
    thread that still has to do so is running, or would if it had a processor.
    """
    wait = dist.Work.wait

    def waited(work: dist.Work, *given: Any) -> Any:
        made = wait(work, *given)
        calm, until = 0, time.monotonic() + PATIENCE
        while calm < 2 and time.monotonic() < until:
            time.sleep(0.0005)
            calm = 0 if others_run() else calm + 1
        return made

    dist.Work.wait = waited  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


def real_peak(plan: Plan) -> int:
    """Bytes at the worst moment of this process's third step, its batch apart."""
    given = batch()
    gc.collect()
    with settled(), track_peak("cpu") as tracked:
        torch.manual_seed(0)
        model: Any = GPT(CONFIG)
        parallel = ParallelModel(model, plan, discover_layers(model, given), given, device="cpu")
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
        for _ in range(2):
            parallel.train_step(given, optimizer)
        tracked.mark()
        parallel.train_step(given, optimizer)
    return tracked.phases[-1].peak


def dry_peak(plan: Plan) -> int:
    with torch.device("meta"):
        model = GPT(CONFIG)
    run, _ = dry_run(subject_of(model, plan, batch()), plan, 0)
    return run.peak.total


def pipeline_of(schedule: Schedule) -> Plan:
    strategies = dict.fromkeys(NAMES, Strategy())
    plan = write_plan([NAMES[:3], NAMES[3:]], strategies, devices=2, batch=SAMPLES, microbatches=4)
    return replace(plan, schedule=schedule)


def dry_peaks(plan: Plan) -> list[int]:
    with torch.device("meta"):
        model = GPT(CONFIG)
    return [run.peak.total for run in run_roles(subject_of(model, plan, batch()), plan)]


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.ZERO_BUBBLE_1P], ids=str)
def test_a_dry_run_sees_what_each_stage_holds(pool: WorkerPool, schedule: Schedule) -> None:
    plan = pipeline_of(schedule)
    assert dry_peaks(plan) == pytest.approx(pool.run(2, real_peak, plan=plan), rel=WITHIN)


@pytest.mark.parametrize(
    ("strategy", "microbatches"),
    [
        (Strategy(), 1),
        (Strategy(recompute=Recompute.FULL), 2),
        (Strategy(data=2), 2),
        (Strategy(zero=2, zero_stage=3), 2),
        (Strategy(tensor=2, sequence_parallel=True), 1),
    ],
    ids=str,
)
def test_a_dry_run_sees_what_a_real_step_holds(pool: WorkerPool, strategy: Strategy, microbatches: int) -> None:
    plan = plan_of(strategy, microbatches)
    found = pool.run(plan.devices, real_peak, plan=plan)
    assert dry_peak(plan) == pytest.approx(max(found), rel=WITHIN)


MOST = 1.15


@pytest.mark.parametrize(("name", "tensor"), [("Llama", 1), *((name, 2) for name in kept_bytes.MODELS)])
def test_blocks_keep_no_more_than_they_must(name: str, tensor: int) -> None:
    sizes, make = kept_bytes.MODELS[name]
    small = replace(sizes, hidden=sizes.hidden // 16, ffn=sizes.ffn // 16, heads=4, kv_heads=2)
    if sizes.kv_heads == sizes.heads:
        small = replace(small, kv_heads=4)
    with patch.dict(kept_bytes.MODELS, {name: (small, make)}):
        for recompute in (Recompute.NONE, Recompute.SELECTIVE):
            theirs, seen, said = kept_bytes.compare(name, tensor, recompute)
            assert said == pytest.approx(seen, rel=0.01), recompute
            assert seen <= MOST * theirs, recompute


def test_what_a_later_layer_reads_is_there_while_a_layer_computes() -> None:
    """Up-sampling by interpolation does not keep its input, which the activation in place before it does."""
    name = "unet-bilinear"
    graph = load_model(name, precision="bf16")
    profile = estimate_profile(graph, load_cluster("h100", 1), precision="bf16", name=name)
    priced = evaluate(profile, replace(uniform_plan(graph, Strategy(), batch=2), precision="bf16"))
    parts = named_source(name).on_meta()
    batch = example_of(parts)
    named = named_for(priced, discover_layers(parts[0], batch))
    run, _ = dry_run(subject_of(parts[0], named, batch, loss_fn=parts[2]), named, 0)
    memory = priced.stages[0].memory
    assert run.peak.total == pytest.approx(memory.total - memory.context, rel=0.01)


@pytest.mark.parametrize(("family", "seed"), [("plain", 0), ("plain", 2), ("plain", 4), ("zoo-llama", 1)])
def test_right_plans_pass(family: str, seed: int) -> None:
    """Unlike layouts side by side, stages that go round, parameters outside of layers."""
    (plan,) = sampled(family, 2, 1, seed)
    found = verify(family, plan)
    assert len(found) > 8
    assert [check for check in found if check.verdict is Verdict.FAILED] == []


@cache
def profile() -> Profile:
    return estimate_profile(graph(), load_cluster("a100-80gb", 4), precision="fp32", name="gpt")


def of(kind: MessageType, bytes_given: int, **more: tuple[int, ...]) -> Message:
    return replace(message(kind, (0, 1, 2, 3), shape=(bytes_given,)), bytes=bytes_given, **more)


def test_wire_bytes_of_one_message() -> None:
    """By hand, four ranks and 400 bytes given by each."""
    assert wire_bytes(of(MessageType.ALL_REDUCE, 400), 0) == 600
    assert wire_bytes(of(MessageType.ALL_GATHER, 400), 0) == 1200
    assert wire_bytes(of(MessageType.REDUCE_SCATTER, 400), 0) == 300
    assert wire_bytes(of(MessageType.ALL_TO_ALL, 400), 0) == 300
    assert wire_bytes(of(MessageType.ALL_TO_ALL, 400, sent=(100,) * 4, taken=(10, 20, 30, 40)), 1) == 80
    assert wire_bytes(of(MessageType.SEND, 400), 0) == 400
    assert wire_bytes(replace(of(MessageType.RECEIVE, 400), bytes=0), 0) == 0


def test_what_is_priced_is_the_closed_form() -> None:
    """All gradients once a step in an all-reduce of two ranks; twice a boundary tensor for every micro-batch."""
    found = predicted_bytes(LayerPricer(profile()), PlannedLayers(PLANS["data"], graph()), 0)
    assert found["data"] == 4 * graph().parameters
    ends = predicted_bytes(LayerPricer(profile()), PlannedLayers(PLANS["pipeline"], graph()), 0)
    assert ends["pipeline"] == PLANS["pipeline"].microbatches * 2 * 16 * 32 * 4


@pytest.mark.parametrize("name", PLANS)
def test_what_is_sent_is_what_is_priced(name: str) -> None:
    check = volume(right_runs(PLANS[name]), PLANS[name], profile())
    assert check.verdict is Verdict.PASSED, (check.said, *check.details)
    assert check.details


def test_what_is_not_priced_is_found() -> None:
    """Gradients that are summed twice."""
    runs = right_runs(PLANS["data"])
    twice = [replace(run, messages=run.messages * 2) for run in runs]
    check = volume(twice, PLANS["data"], profile())
    assert check.verdict is Verdict.FAILED
    assert check.said.startswith("Stage 0 sends")
    assert any("for data" in line for line in check.details)
