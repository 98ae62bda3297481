"""Times changes of plan on the quickstart's model, each beside the steps before and after it; every rank runs it."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import torch
import torch.distributed as dist

from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.reshard.reshard import Resharded
from galvatron_lite.world import join, leave, pick_device
from quickstart_model import BATCH, make

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Row:
    """One change of plan."""

    names: tuple[str, str]  # of the plans
    steps: tuple[float, ...]  # seconds of steps, those before and after it
    switched: Resharded  # what it took

    @property
    def ratio(self) -> float:
        """Seconds of the change over those of a step, of the slower plan: the median of its steps."""
        half = len(self.steps) // 2
        return self.switched.seconds / max(statistics.median(part) for part in (self.steps[:half], self.steps[half:]))


def plans(names: list[str], world: int) -> dict[str, Plan]:
    """Uniform plans for the whole world, and a pipeline of as many stages as processes."""
    split = {
        "data": Strategy(data=world),
        "zero-2": Strategy(zero=world, zero_stage=2),
        "zero-3": Strategy(zero=world, zero_stage=3),
        "tensor": Strategy(tensor=world),
    }
    made = {name: plan([names], strategy, 1) for name, strategy in split.items()}
    size = -(-len(names) // world)
    cut = [names[start : start + size] for start in range(0, len(names), size)]
    return {**made, "pipeline": plan(cut, Strategy(), world * 2)}


def plan(stages: list[list[str]], strategy: Strategy, microbatches: int) -> Plan:
    """A plan with one strategy for all layers."""
    made = tuple(Stage(tuple(LayerRun(name, name, 1, strategy) for name in names)) for names in stages)
    devices = strategy.devices * len(stages)
    return Plan(PLAN_VERSION, "quickstart", devices, BATCH, microbatches, Schedule.ONE_F_ONE_B, "fp32", made)


def rows(rounds: int, steps: int) -> Iterator[Row]:
    """Changes through all plans and back to the first, so many times."""
    join(pick_device())
    model, batch = make()
    layers = discover_layers(model, batch)
    known = plans([layer.name for layer in layers], dist.get_world_size())
    names = list(known)
    parallel = ParallelModel(model, known[names[0]], layers, batch)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=LEARNING_RATE)

    def timed() -> list[float]:
        parallel.train_step(batch, optimizer)  # the first step under a plan makes buffers and connections
        found = []
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            parallel.train_step(batch, optimizer)
            found.append(time.perf_counter() - start)
        return found

    name, before = names[0], timed()
    for following in islice(cycle([*names[1:], names[0]]), rounds * len(names)):
        dist.barrier()
        switched = parallel.switch(known[following], optimizer)
        after = timed()
        yield Row((name, following), (*before, *after), switched)
        name, before = following, after


def main() -> None:
    """Print a line for every change of plan (rank 0)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="times through all plans")
    parser.add_argument("--steps", type=int, default=3, help="timed before and after every change")
    arguments = parser.parse_args()
    ratios = []
    for row in rows(arguments.rounds, arguments.steps):
        ratios.append(row.ratio)
        if dist.get_rank() == 0:
            phases = ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in row.switched.phases.items())
            print(
                f"{row.names[0]:>8} -> {row.names[1]:<8} {row.switched.seconds:6.3f} s = {row.ratio:4.2f} steps of "
                f"{statistics.median(row.steps):.3f} s; sent {row.switched.moved_bytes / 1e6:.1f} MB; ms: {phases}"
            )
    if dist.get_rank() == 0:
        print(f"median {statistics.median(ratios):.2f}, largest {max(ratios):.2f} steps (measured on this machine)")
    leave()


if __name__ == "__main__":
    main()
