"""Memory seen in a dry run against what torch's allocator tells of the same step, run for real."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.zoo.gpt import GPT, GPTConfig, random_tokens
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.profiler.memory import track_peak
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.verify.dry.roles import run_roles
from galvatron_lite.verify.dry.step import dry_run, subject_of
from tests.equivalence.plans import write_plan
from tests.pool import WorkerPool

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


def test_layers_that_gather_nothing_hold_no_gathered_buffer() -> None:
    """Forward passes behind ZeRO-3 layers hold as much as without them, but for what these hold themselves."""
    strategies = dict.fromkeys(NAMES, Strategy(data=2))
    seen = []
    for gathering in ((), NAMES[1:2]):
        chosen = strategies | dict.fromkeys(gathering, Strategy(zero=2, zero_stage=3))
        plan = write_plan([NAMES], chosen, devices=2, batch=SAMPLES, microbatches=1)
        with torch.device("meta"):
            model = GPT(CONFIG)
        run, _ = dry_run(subject_of(model, plan, batch()), plan, 0)
        seen.append(max(one.memory.communication for one in run.samples if one.layer == "blocks.3"))
    assert seen[1] <= seen[0]


def test_states_in_host_memory_are_not_on_the_device() -> None:
    plan = plan_of(Strategy(offload=Offload.STATES), 1)
    with torch.device("meta"):
        model = GPT(CONFIG)
    run, _ = dry_run(subject_of(model, plan, batch()), plan, 0)
    items = sum(parameter.numel() for parameter in model.parameters())
    assert run.peak.optimizer == 0
    assert run.host == pytest.approx(4 * 4 * items, rel=WITHIN)  # a copy, its gradient, two moments


def test_activations_in_host_memory_are_not_on_the_device() -> None:
    runs = []
    for offload in (Offload.NONE, Offload.ACTIVATIONS):
        plan = plan_of(Strategy(offload=offload), 1)
        with torch.device("meta"):
            model = GPT(CONFIG)
        runs.append(dry_run(subject_of(model, plan, batch()), plan, 0)[0])
    (on_device, _), (left, waiting) = ((sum(run.kept.values()), run.host) for run in runs)
    # layers hand their outputs on, which the device holds until the next one has run
    assert waiting == pytest.approx(on_device, rel=0.1)
    assert left < on_device / 5


def pipeline_of(schedule: Schedule) -> Plan:
    strategies = dict.fromkeys(NAMES, Strategy())
    plan = write_plan([NAMES[:3], NAMES[3:]], strategies, devices=2, batch=SAMPLES, microbatches=4)
    return replace(plan, schedule=schedule)


def dry_peaks(plan: Plan) -> list[int]:
    with torch.device("meta"):
        model = GPT(CONFIG)
    return [run.peak.total for run in run_roles(subject_of(model, plan, batch()), plan)]


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE_1P], ids=str)
def test_a_dry_run_sees_what_each_stage_holds(pool: WorkerPool, schedule: Schedule) -> None:
    plan = pipeline_of(schedule)
    assert dry_peaks(plan) == pytest.approx(pool.run(2, real_peak, plan=plan), rel=WITHIN)


@pytest.mark.parametrize(
    ("strategy", "microbatches"),
    [
        (Strategy(recompute=Recompute.FULL), 2),
        (Strategy(zero=2, zero_stage=3), 2),
        (Strategy(tensor=2, sequence_parallel=True), 1),
    ],
    ids=str,
)
def test_a_dry_run_sees_what_a_real_step_holds(pool: WorkerPool, strategy: Strategy, microbatches: int) -> None:
    plan = plan_of(strategy, microbatches)
    found = pool.run(plan.devices, real_peak, plan=plan)
    assert dry_peak(plan) == pytest.approx(max(found), rel=WITHIN)
