"""Predicted against measured step time and peak memory of many plans; run by ``scripts/accuracy`` on two processes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist

from galvatron_lite import auto_parallelize
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import last_profile, read_profile
from galvatron_lite.units import format_bytes, format_seconds
from galvatron_lite.world import join, leave, rank
from measured import Measured, measure, peak_of
from quickstart_model import BATCH, CONFIG, make

FULL = Recompute.FULL


@dataclass(frozen=True)
class Case:
    """A plan to try: pipeline stages, micro-batches, strategies of the blocks (the last repeats) and of the edges."""

    name: str
    stages: int
    microbatches: int
    blocks: tuple[Strategy, ...]
    edge: Strategy


def cases() -> list[Case]:
    """Plans of every dimension for two devices."""
    data, tensor = Strategy(data=2), Strategy(tensor=2)
    zero2, zero3 = Strategy(zero=2, zero_stage=2), Strategy(zero=2, zero_stage=3)
    sequence, alone = replace(tensor, sequence_parallel=True), Strategy()
    return [
        Case("data", 1, 1, (data,), data),
        Case("data, 4 micro-batches", 1, 4, (data,), data),
        Case("data, recompute", 1, 1, (replace(data, recompute=FULL),), data),
        Case("ZeRO-2", 1, 1, (zero2,), zero2),
        Case("ZeRO-3", 1, 1, (zero3,), zero3),
        Case("ZeRO-3, recompute, 2 micro-batches", 1, 2, (replace(zero3, recompute=FULL),), zero3),
        Case("tensor", 1, 1, (tensor,), tensor),
        Case("tensor + sequence, 2 micro-batches", 1, 2, (sequence,), tensor),
        Case("pipeline, 2 micro-batches", 2, 2, (alone,), alone),
        Case("pipeline, 8 micro-batches", 2, 8, (alone,), alone),
        Case("pipeline, recompute, 4 micro-batches", 2, 4, (replace(alone, recompute=FULL),), alone),
        Case("2 ZeRO-3, 2 tensor, 2 data", 1, 2, (zero3, zero3, tensor, tensor, data), data),
    ]


def plan_of(case: Case) -> Plan:
    """The case as a plan of the quickstart's model."""
    count, per_stage = CONFIG.layers, CONFIG.layers // case.stages
    strategies = [case.blocks[min(index, len(case.blocks) - 1)] for index in range(count)]
    runs = [LayerRun(f"blocks.{i}", f"blocks.{i}", 1, strategy) for i, strategy in enumerate(strategies)]
    parts = [runs[start : start + per_stage] for start in range(0, count, per_stage)]
    parts[0].insert(0, LayerRun("before", "before", 1, case.edge))
    parts[-1].append(LayerRun("after", "after", 1, case.edge))
    stages = tuple(Stage(tuple(part)) for part in parts)
    devices = case.stages * case.edge.devices
    return Plan(PLAN_VERSION, "gpt", devices, BATCH, case.microbatches, Schedule.ONE_F_ONE_B, "fp32", stages)


def stepper(plan: Plan) -> Callable[[], object]:
    """A fresh model under the plan, and the function that trains one step of it."""
    model, batch = make()
    parallel = auto_parallelize(model, batch, plan=plan)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    return lambda: parallel.train_step(batch, optimizer)


def ranks_of(values: Sequence[float]) -> list[int]:
    """The rank of every value."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    return [order.index(index) for index in range(len(values))]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation (no ties)."""
    count = len(first)
    distance = sum((a - b) ** 2 for a, b in zip(ranks_of(first), ranks_of(second), strict=True))
    return 1 - 6 * distance / (count * (count**2 - 1))


def show(rows: list[tuple[Case, Plan, Measured]], as_json: Path | None) -> None:
    """The table, its worst errors and the rank correlation."""
    table = Table("plan", "predicted", "measured", "spread", "error", "predicted memory", "measured", "error ")
    time_errors, memory_errors, data = [], [], []
    for case, plan, found in rows:
        prediction = plan.prediction
        if prediction is None:
            raise SystemExit("a plan carries no prediction")
        time_errors.append(prediction.step_seconds / found.seconds - 1)
        memory_errors.append(prediction.peak_memory / found.peak - 1)
        table.add_row(
            case.name, format_seconds(prediction.step_seconds), format_seconds(found.seconds), f"{found.spread:.0%}",
            f"{time_errors[-1]:+.1%}", format_bytes(prediction.peak_memory), format_bytes(found.peak),
            f"{memory_errors[-1]:+.1%}",
        )  # fmt: skip
        data.append(
            [case.name, prediction.step_seconds, found.seconds, found.spread, prediction.peak_memory, found.peak]
        )
    rho = spearman([row[1] for row in data], [row[2] for row in data])
    console = Console(highlight=False, width=160)
    console.print(table)
    console.print(f"largest error: time {max(map(abs, time_errors)):.1%}, memory {max(map(abs, memory_errors)):.1%}")
    console.print(f"mean error: time {mean_size(time_errors):.1%}, memory {mean_size(memory_errors):.1%}")
    console.print(f"Spearman rank correlation of step times: {rho:.3f}")
    if as_json is not None:
        as_json.write_text(json.dumps(data, indent=1) + "\n")


def mean_size(errors: Sequence[float]) -> float:
    """Mean of absolute values."""
    return sum(map(abs, errors)) / len(errors)


def main() -> None:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("profiles"), help="where the measured profile is")
    parser.add_argument("--steps", type=int, default=12, help="steps to time of each plan")
    parser.add_argument("--only", default="", help="run the plans whose name holds this")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    join(torch.device("cpu"))
    profile: Profile = read_profile(last_profile(options.folder))
    rows = []
    for case in cases():
        if options.only not in case.name:
            continue
        plan = evaluate(profile, plan_of(case))
        peak = peak_of(lambda plan=plan: stepper(plan))
        found = measure(stepper(plan), 2, options.steps, peak)
        rows.append((case, plan, found))
        dist.barrier()
    if rank() == 0:
        show(rows, options.json)
    leave()


if __name__ == "__main__":
    main()
