"""Predicted against measured step time and peak memory of plans of the example's ConvNeXt, on four processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed as dist

from accuracy import Case, show
from galvatron_lite import auto_parallelize
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.graph import Recompute, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import last_profile, read_profile
from galvatron_lite.world import join, leave, rank
from measured import measure, peak_of
from train_convnext_model import BATCH, make


def cases() -> list[Case]:
    """Plans for four devices: data parallelism, and pixels and channels beside it."""
    data, rows, columns = Strategy(data=4), Strategy(data=2, height=2), Strategy(data=2, width=2)
    zero, grid = Strategy(zero=2, zero_stage=3, height=2), Strategy(height=2, width=2)
    filters, channels = Strategy(data=2, filters=2), Strategy(data=2, channels=2)
    return [
        Case("data", 1, 1, (data,), data),
        Case("rows, data", 1, 1, (rows,), rows),
        Case("columns, data, recompute", 1, 1, (replace(columns, recompute=Recompute.FULL),), columns),
        Case("rows and columns", 1, 1, (grid,), grid),
        Case("rows, ZeRO-3", 1, 1, (zero,), zero),
        Case("filters, data", 1, 1, (filters,), filters),
        Case("2 rows, then channels, data", 1, 1, (rows, rows, channels), rows),
    ]


def plan_of(case: Case, profile: Profile) -> Plan:
    """The case as a plan of the example's model."""
    blocks = iter(range(len(profile.graph.layers)))
    runs = []
    for layer in profile.graph.layers:
        is_block = layer.role is Role.BLOCK
        strategy = case.blocks[min(next(blocks), len(case.blocks) - 1)] if is_block else case.edge
        runs.append(LayerRun(layer.name, layer.name, 1, strategy))
    stages, devices = (Stage(tuple(runs)),), case.edge.devices
    return Plan(PLAN_VERSION, "ConvNeXt", devices, BATCH, case.microbatches, Schedule.ONE_F_ONE_B, "fp32", stages)


def stepper(plan: Plan, batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    """A fresh model under the plan, and the function that trains one step of it."""
    model, _ = make()
    parallel = auto_parallelize(model, batch, plan=plan)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    return lambda: parallel.train_step(batch, optimizer)


def main() -> None:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("profiles"), help="where the measured profile is")
    parser.add_argument("--steps", type=int, default=12, help="steps to time of each plan")
    parser.add_argument("--only", default="", help="run the plans whose name holds this")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    join(torch.device("cpu"))
    profile = read_profile(last_profile(options.folder))
    _, batch = make()
    rows = []
    for case in cases():
        if options.only not in case.name:
            continue
        plan = evaluate(profile, plan_of(case, profile))
        peak = peak_of(lambda plan=plan: stepper(plan, batch))
        rows.append((case, plan, measure(stepper(plan, batch), 2, options.steps, peak)))
        dist.barrier()
    if rank() == 0:
        show(rows, options.json)
    leave()


if __name__ == "__main__":
    main()
