"""Train the quickstart's model under a plan and write what was measured; every rank runs it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from galvatron_lite import auto_parallelize
from galvatron_lite.files import write_text
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.world import leave, rank
from measured import measure, peak_of
from quickstart_model import BATCH, batches, make

LAST = 10


def parallel_and_optimizer(plan: Path) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """The model split as the plan says, and its optimizer."""
    model, batch = make()
    parallel = auto_parallelize(model, batch, plan=plan)
    return parallel, parallel.optimizer(torch.optim.AdamW, lr=1e-3)


def stepper(plan: Path) -> Callable[[], object]:
    """A fresh model, and a function that trains one step of it."""
    parallel, optimizer = parallel_and_optimizer(plan)
    _, batch = make()
    return lambda: parallel.train_step(batch, optimizer, max_grad_norm=1.0)


def train(plan: Path, steps: int, result: Path) -> None:
    """Train, measure, and write the figures (rank 0)."""
    peak = peak_of(lambda: stepper(plan))
    parallel, optimizer = parallel_and_optimizer(plan)
    curve = [float(parallel.train_step(batch, optimizer, max_grad_norm=1.0)) for batch in batches(steps)]
    timed = next(batches(1))
    measured = measure(lambda: parallel.train_step(timed, optimizer, max_grad_norm=1.0), 1, 12, peak)
    if rank() == 0:
        figures = {
            "seconds": measured.seconds, "spread": measured.spread, "repetitions": measured.steps, "peak": peak,
            "before": curve[0], "after": sum(curve[-LAST:]) / LAST, "steps": steps, "batch": BATCH,
        }  # fmt: skip
        write_text(result, json.dumps(figures) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    train(arguments.plan, arguments.steps, arguments.result)
    leave()
