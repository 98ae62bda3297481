"""Predicted against measured step time and peak memory under delayed gradients; run by ``scripts/accuracy_cyclic``.

Steps are timed without a barrier between them: workers are two time steps apart, and a barrier would have each wait for
the last one. Memory is that of tensors on the fullest process.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accuracy_cyclic_model import BATCH, make
from rich.console import Console
from rich.table import Table
from torch import distributed as dist

from galvatron_lite import auto_parallelize
from galvatron_lite.api import plan as find_plan
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.memory import track_peak
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import last_profile, read_profile
from galvatron_lite.units import format_bytes, format_seconds
from galvatron_lite.world import join, leave, rank, world_size
from measured import Measured, highest, spread_of

WARM_UP = 3
SINGLE = (2, 4)
"""Micro-batches on one process."""


def plans(profile: Profile) -> list[Plan]:
    """Priced plans of this world: every rule and setting that its processes suffice for."""
    found = []
    for setting in CyclicSetting:
        for count in SINGLE if setting is CyclicSetting.SINGLE else (None,):
            for rule in CyclicRule:
                pins: dict[str, object] = {"setting": setting.value, "rule": rule.value}
                pins |= {} if count is None else {"microbatches": count}
                try:
                    found.append(find_plan(profile, batch=BATCH, gpus=world_size(), fix=pins, allow_delay=True))
                except InputError:
                    continue
    return found


def stepper(plan: Plan) -> tuple[Any, Callable[[], object]]:
    """A fresh model under the plan, and the function that begins one step of it."""
    model, batch = make()
    parallel = auto_parallelize(model, batch, plan=plan)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    return parallel, lambda: parallel.train_step(batch, optimizer)


def peak(plan: Plan) -> int:
    """Peak bytes of one training step in steady state on the fullest rank, before what is in flight is ended."""
    gc.collect()
    with track_peak("cpu") as found:
        parallel, step = stepper(plan)
        for _ in range(WARM_UP):
            step()
        found.mark()
        step()
        found.mark()
        parallel.drain()
        del parallel, step
    return int(highest(found.phases[-2].peak))


def measure(plan: Plan, steps: int) -> Measured:
    """The median time from the end of a step to that of the next, on the slowest rank; the peak is measured apart."""
    most = peak(plan)
    parallel, step = stepper(plan)
    ends = []
    for _ in range(WARM_UP + steps):
        step()
        ends.append(time.perf_counter())
    parallel.drain()
    seconds = [after - before for before, after in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
    return Measured(highest(statistics.median(seconds)), highest(spread_of(seconds)), steps, most)


def main() -> None:
    """Measure every plan of this world and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("profiles"), help="where the measured profile is")
    parser.add_argument("--steps", type=int, default=12, help="steps to time of each plan")
    options = parser.parse_args()
    join(torch.device("cpu"))
    profile = read_profile(last_profile(options.folder))
    table = Table(
        "plan", "stages", "predicted", "measured", "spread", "error", "predicted memory", "measured", "error "
    )
    for plan in plans(profile):
        if plan.cyclic is None or plan.prediction is None:
            raise SystemExit("a plan is not of delayed gradients, or carries no prediction")
        found, predicted = measure(plan, options.steps), plan.prediction
        table.add_row(
            f"{plan.cyclic.setting.value}, {plan.cyclic.rule.value}", str(len(plan.stages)),
            format_seconds(predicted.step_seconds), format_seconds(found.seconds), f"{found.spread:.0%}",
            f"{predicted.step_seconds / found.seconds - 1:+.1%}",
            format_bytes(predicted.peak_memory), format_bytes(found.peak),
            f"{predicted.peak_memory / found.peak - 1:+.1%}",
        )  # fmt: skip
        dist.barrier()
    if rank() == 0:
        Console(highlight=False, width=160).print(f"Processes: {world_size()}", table, sep="\n")
    leave()


if __name__ == "__main__":
    main()
