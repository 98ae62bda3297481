"""One of the two training processes of ``scripts/adaptation``."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from adaptation_model import BATCH, make_batch, make_model, make_profile

from galvatron_lite.files import write_data
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.monitor.adaptive import Monitor
from galvatron_lite.runtime.monitor.schema import Adapt
from galvatron_lite.search.planner import find_plan
from galvatron_lite.world import leave

WINDOW = 8
SETTINGS = Adapt(window=WINDOW, warm_up=2, threshold=0.25, cool_down=5 * WINDOW, steps=5000)


def make_parallel(rate: float, folder: Path) -> ParallelModel:
    """The model that adapts, under the plan for this wire."""
    model, example, profile = make_model(), make_batch(0), make_profile(rate * 1e6 / 8)
    plan = find_plan(profile, devices=2, global_batch=BATCH, budget=2**31)
    parallel = ParallelModel(model, plan, discover_layers(model, example), example, device="cpu")
    parallel.steering = Monitor(parallel, profile, replace(SETTINGS, log=str(folder / "log.jsonl")))
    return parallel


def slow_down(folder: Path) -> None:
    """Ask for a slower wire, and wait until it is."""
    (folder / "make-slow").touch()
    while not (folder / "is-slow").exists():
        time.sleep(0.05)
    dist.barrier()


def main() -> None:
    """Train over the quick wire, then over the slow one, and write the times of the steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--quick", type=int, required=True)
    parser.add_argument("--slow", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    parallel = make_parallel(arguments.rate, arguments.folder)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    seconds = list[float]()
    for step in range(arguments.quick + arguments.slow):
        if step == arguments.quick:
            slow_down(arguments.folder)
        start = time.perf_counter()
        parallel.train_step(make_batch(step), optimizer)
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        quick = arguments.quick
        figures = {
            "quick": median(seconds[WINDOW:quick]), "slow": median(seconds[quick + 1 : quick + WINDOW]),
            "after": median(seconds[-WINDOW:]), "quick_steps": quick,
        }  # fmt: skip
        write_data(arguments.folder / "steps.json", figures)
    leave()


if __name__ == "__main__":
    main()
