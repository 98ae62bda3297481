"""Adaptation of plans while training: a link that becomes slower by a known factor, and exhausted memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.capture.trace import trace
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.zoo.gpt import GPT, GPTConfig
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.monitor import adaptive
from galvatron_lite.runtime.monitor.adaptive import Monitor
from galvatron_lite.runtime.monitor.attach import earlier_corrections
from galvatron_lite.runtime.monitor.decide import read_log, replay
from galvatron_lite.runtime.monitor.schema import Adapt, AdaptAction, Decision, Exhausted, Planner
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.space import Fixed
from tests.known_time import KnownClock
from tests.pool import WorkerPool
from tests.runtime.monitor import machines
from tests.runtime.monitor.machines import Link, Workers, pair, profile_of, worked_batch
from tests.runtime.plans import losses_alone

CONFIG = GPTConfig(vocab=64, layers=4, hidden=128, heads=4, sequence=16)
BATCH = 16
BANDWIDTH = 1e8
WORK = 1e-3
"""Seconds of a block's forward pass of a sample."""
FACTOR = 24.0
"""How many times longer a byte takes."""
WINDOW = 5
SETTINGS = Adapt(window=WINDOW, warm_up=2, threshold=0.25, cool_down=5 * WINDOW, steps=5000, planner=Planner.INLINE)


@dataclass(frozen=True)
class SlowLinkRun:
    """A run over a link that becomes slow."""

    seconds: tuple[float, float]  # of a step over the slow link, under the first plan and under the last one
    decisions: list[Decision]  # of the monitor
    losses: list[float]  # of every step


def make_batch(step: int) -> dict[str, Tensor]:
    """The global batch of a step."""
    rows = torch.randint(0, CONFIG.vocab, (BATCH, CONFIG.sequence + 1), generator=torch.Generator().manual_seed(step))
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def slow_profile() -> Profile:
    """An estimate for two processes over the link, on a processor unlike this machine's."""
    return estimate_profile(trace(make_model(), make_batch(0)), pair(BANDWIDTH, 1e-5), precision="fp32", name="gpt")


def pace(_number: int, samples: int) -> tuple[float, float]:
    return WORK * samples, 2 * WORK * samples


def known_profile() -> Profile:
    return profile_of(pace, BATCH, pair(BANDWIDTH, 1e-3))


def train_over_slow_link(folder: str, quick: int, slow: int) -> SlowLinkRun:
    """Train ``quick`` steps over a fast link, then ``slow`` steps over a slower one, on a simulated clock."""
    machines.join(Path(folder), BANDWIDTH, clock := KnownClock())
    seconds, losses = list[float](), list[float]()
    with clock.told():
        profile, model, example = known_profile(), Workers(pace), worked_batch(BATCH, 0)
        plan = find_plan(profile, devices=2, global_batch=BATCH, budget=2**31)
        parallel = ParallelModel(model, plan, discover_layers(model, example), example, device="cpu")
        settings = replace(SETTINGS, log=str(Path(folder) / "log.jsonl"))
        parallel.steering = monitor = Monitor(parallel, profile, settings)
        monitor.step = BEFORE  # as a checkpoint sets it
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        for step in range(quick + slow):
            Link.per_byte = (1.0 if step < quick else FACTOR) / BANDWIDTH
            dist.barrier()
            before = clock.now()
            losses.append(float(parallel.train_step(worked_batch(BATCH, step), optimizer)))
            seconds.append(clock.now() - before)
    steady = median(seconds[quick + 1 : quick + WINDOW]), median(seconds[-WINDOW:])
    return SlowLinkRun(steady, list(monitor.decisions), losses)


def run_out_of_memory(folder: str, everywhere: bool) -> tuple[list[float], list[int], str]:
    """Train five steps, with memory exhausted in the third under the first plan, on both ranks or on rank 1 only.

    Returns:
        The losses, the predicted bytes of the plan of each step, and the message of the error.
    """
    profile, model = slow_profile(), make_model()
    # one stage, as the stages of a pipeline would wait for each other before they fail
    plan = find_plan(profile, devices=2, global_batch=BATCH, budget=2**31, fixed=Fixed(pipeline=1))
    parallel = ParallelModel(model, plan, discover_layers(model, make_batch(0)), make_batch(0), device="cpu")
    settings = Adapt(planner=Planner.INLINE, log=str(Path(folder) / "log.jsonl"))
    with patch.object(adaptive, "PATIENCE", timedelta(seconds=10 if everywhere else 2)):
        parallel.steering = monitor = Monitor(parallel, profile, settings)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)

    def fail(*_: object) -> None:
        if monitor.step == 2 and parallel.plan is plan:
            if everywhere or dist.get_rank() == 1:
                raise torch.OutOfMemoryError("as injected")
            raise EOFError  # it would wait in a collective for rank 1

    parallel.runtime.model.register_forward_pre_hook(fail)
    losses, bytes_of = list[float](), list[int]()
    for step in range(5):
        try:
            losses.append(float(parallel.train_step(make_batch(step), optimizer)))
        except (MemoryError, EOFError) as error:
            return losses, bytes_of, str(error)
        prediction = evaluate(profile, parallel.plan).prediction
        bytes_of.append(0 if prediction is None else prediction.peak_memory)
    return losses, bytes_of, ""


BEFORE, QUICK, SLOW = 40, 2 + 3 * WINDOW, 8 * WINDOW


def test_a_slow_link_is_found_and_the_new_plan_is_faster(pool: WorkerPool, tmp_path: Path) -> None:
    course = pool.run(2, train_over_slow_link, timeout=600.0, folder=str(tmp_path), quick=QUICK, slow=SLOW)[0]
    assert course.decisions[0].step == BEFORE + SETTINGS.warm_up + WINDOW, "first steps are ignored after a restart too"
    behind = [decision for decision in course.decisions if decision.step > BEFORE + QUICK]
    taken = [decision.action for decision in behind if decision.action is not AdaptAction.KEEP]
    assert taken == [AdaptAction.PLAN, AdaptAction.SWITCH]
    planned = next(decision for decision in behind if decision.action is AdaptAction.PLAN)
    assert planned.step <= BEFORE + QUICK + (SETTINGS.patience + 1) * WINDOW
    (link,) = planned.corrections.links
    assert link.per_byte == pytest.approx(FACTOR, rel=0.2)
    slow, after = course.seconds
    assert after < 0.8 * slow
    model, batches = Workers(pace), (worked_batch(BATCH, step) for step in range(len(course.losses)))
    losses = losses_alone(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    assert course.losses == pytest.approx(losses, rel=1e-4)
    assert all(one.same for one in replay(read_log(tmp_path / "log.jsonl")))


def test_where_all_ranks_run_out_alike_training_goes_on_from_memory(pool: WorkerPool, tmp_path: Path) -> None:
    losses, taken, said = pool.run(2, run_out_of_memory, folder=str(tmp_path), everywhere=True)[0]
    assert said == ""
    model = make_model()
    wanted = losses_alone(model, torch.optim.SGD(model.parameters(), lr=0.1), map(make_batch, range(5)))
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert taken[0] == taken[1] > taken[2] == taken[4]
    records = read_log(tmp_path / "log.jsonl")
    assert [record.ranks for record in records if isinstance(record, Exhausted)] == [(0, 1)]
    assert all(one.same for one in replay(records))


def test_where_one_rank_runs_out_the_next_run_has_learnt_of_it(pool: WorkerPool, tmp_path: Path) -> None:
    _, (losses, _, said) = pool.run(2, run_out_of_memory, folder=str(tmp_path), everywhere=False)
    assert len(losses) == 2
    assert "--max-restarts" in said
    assert earlier_corrections(Adapt(log=str(tmp_path / "log.jsonl")), slow_profile()).memory > 1.0
