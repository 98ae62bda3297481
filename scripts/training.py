"""Train a model under a plan and write what was measured, for the examples; every rank runs it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from galvatron_lite import auto_parallelize
from galvatron_lite.files import write_text
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.world import leave, rank
from measured import measure, peak_of

LAST = 10


@dataclass(frozen=True)
class Job:
    """What to train."""

    make: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]  # a fresh model and an example batch
    batches: Callable[[int], Iterator[dict[str, torch.Tensor]]]  # so many global batches, the same on every rank
    samples: int  # of a batch
    steps: int  # to train, if not told otherwise
    learning_rate: float = 1e-3  # of AdamW
    max_grad_norm: float = 1.0  # see ``train_step``


def parallel_and_optimizer(job: Job, plan: Path) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """The model split as the plan says, and its optimizer."""
    model, batch = job.make()
    parallel = auto_parallelize(model, batch, plan=plan)
    return parallel, parallel.optimizer(torch.optim.AdamW, lr=job.learning_rate)


def stepper(job: Job, plan: Path, batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    """A fresh model, and a function that trains one step of it."""
    parallel, optimizer = parallel_and_optimizer(job, plan)
    return lambda: parallel.train_step(batch, optimizer, max_grad_norm=job.max_grad_norm)


def train(job: Job, plan: Path, steps: int, result: Path) -> None:
    """Train, measure, and write the figures (rank 0)."""
    timed = next(job.batches(1))  # made before the peak is tracked: the user's whole batch is not the plan's
    peak = peak_of(lambda: stepper(job, plan, timed))
    parallel, optimizer = parallel_and_optimizer(job, plan)
    curve = [float(parallel.train_step(batch, optimizer, job.max_grad_norm)) for batch in job.batches(steps)]
    measured = measure(lambda: parallel.train_step(timed, optimizer, job.max_grad_norm), 1, 12, peak)
    if rank() == 0:
        figures = {
            "seconds": measured.seconds, "spread": measured.spread, "repetitions": measured.steps, "peak": peak,
            "before": curve[0], "after": sum(curve[-LAST:]) / LAST, "steps": steps, "batch": job.samples,
            "curve": curve,
        }  # fmt: skip
        write_text(result, json.dumps(figures) + "\n")


def run(job: Job, description: str | None) -> None:
    """Train under the plan that the command line names."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=job.steps)
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    train(job, arguments.plan, arguments.steps, arguments.result)
    leave()
