"""Runs with planted causes, on every rank: blocks take known times, so that what is predicted is what they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runs.schema import TRACES
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.monitor.attach import ObserverOptions, observe
from tests.known_time import KnownClock, retimed
from tests.runtime.monitor import slow_link
from tests.runtime.monitor.slow_link import Link
from tests.runtime.monitor.workers import BLOCKS, Workers, pair, profile_of, worked_batch
from tests.runtime.plans import make_plan

BATCH = 8
FORWARD, BACKWARD = 0.01, 0.02
"""Seconds of a block's pass of a micro-batch."""
BANDWIDTH, LATENCY = 2e8, 1e-3
MORE = 0.1
"""Seconds that are planted, in forward; twice that in backward."""
SLOWER = 0.5
"""Seconds that the gradients' messages take longer, all together."""


class Plants:
    """What is planted now."""

    blocks: dict[int, float] = {}  # noqa: RUF012 - changed by the jobs of one process
    optimizer = 0.0


def pace(number: int, _samples: int) -> tuple[float, float]:
    more = Plants.blocks.get(number, 0.0)
    return FORWARD + more, BACKWARD + 2 * more


def known_profile() -> Profile:
    return profile_of(pace, BATCH, pair(BANDWIDTH, LATENCY))


def plan_of(profile: Profile, stages: int = 1, microbatches: int = 1) -> Plan:
    """Two replicas; or two stages."""
    names = [layer.name for layer in profile.graph.layers]
    halves = [names] if stages == 1 else [names[: len(names) // 2], names[len(names) // 2 :]]
    strategies = [[Strategy(data=2 // stages)] * len(half) for half in halves]
    return evaluate(profile, make_plan(halves, strategies, BATCH, microbatches))


class Trained:
    """A model that trains on this rank, and what is planted into it.

    Args:
        folder: of the test.
        stages, microbatches: of the plan.
    """

    def __init__(self, folder: Path, stages: int = 1, microbatches: int = 1) -> None:
        self.folder, self.profile = folder, known_profile()
        self.plan = plan_of(self.profile, stages, microbatches)
        model, batch = Workers(pace), worked_batch(BATCH, 1)
        self.parallel = ParallelModel(model, self.plan, discover_layers(model, batch), batch, device="cpu")
        self.optimizer = self.parallel.optimizer(torch.optim.SGD, lr=0.01)
        self.optimizer.register_step_pre_hook(lambda *_: Link.clock.work(Plants.optimizer))

    def run(self, name: str) -> float:
        """Train some steps into a folder of their own, the last two of them traced; seconds of the second."""
        first = self.parallel.step
        traced = range(first + 2, first + 4)
        recorder = observe(self.parallel, ObserverOptions(self.folder / name, False, traced), self.profile)
        seconds = []
        for _ in range(4):
            dist.barrier()
            before = Link.clock.now()
            self.parallel.train_step(worked_batch(BATCH, 1), self.optimizer)
            seconds.append(Link.clock.now() - before)
        recorder.finish()
        (trace,) = (self.folder / name / TRACES).glob(f"rank-{dist.get_rank():05d}-*")
        retimed(trace)
        return seconds[1]


@contextmanager
def planted(blocks: dict[int, float], optimizer: float = 0.0) -> Iterator[None]:
    Plants.blocks, Plants.optimizer = blocks, optimizer
    yield
    Plants.blocks, Plants.optimizer = {}, 0.0


def plant_all(folder: str) -> dict[str, float]:
    """Every cause in a run of its own; seconds of a step of each, on this rank."""
    clock = KnownClock()
    slow_link.join(Path(folder), BANDWIDTH, clock)
    with clock.told():
        return _plant_all(folder)


def _plant_all(folder: str) -> dict[str, float]:
    trained = Trained(Path(folder))
    every, own = dict.fromkeys(range(BLOCKS), MORE / 2), dist.get_rank() == 1
    runs: dict[str, Callable[[], Any]] = {
        "nothing": lambda: planted({}),
        "layers": lambda: planted({1: MORE}),
        "rank": lambda: planted(every if own else {}),
        "layers of a rank": lambda: planted({2: MORE} if own else {}),
        "optimizer": lambda: planted({}, 3 * MORE),
    }
    found = {}
    for name, plant in runs.items():
        with plant():
            found[name] = trained.run(name)
    size = sum(parameter.nbytes for parameter in Workers(pace).parameters())
    Link.per_byte += SLOWER / size
    found["collective"] = trained.run("collective")
    return found


def plant_in_a_stage(folder: str) -> float:
    """A block of the second of two stages takes longer."""
    clock = KnownClock()
    slow_link.join(Path(folder), BANDWIDTH, clock)
    with clock.told():
        trained = Trained(Path(folder), stages=2, microbatches=4)
        with planted({3: MORE}):
            return trained.run("stage")
