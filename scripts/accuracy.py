"""Predicted against measured step time and peak memory of many plans: a GPT or ResNet-50 on two processes, a ConvNeXt
on four, a Llama or ResNet-50 on one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist
from torch import nn

import llama_model
import quickstart_model
import resnet50_model
import train_convnext_model
from galvatron_lite import auto_parallelize
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.graph import Recompute, Role
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import last_profile, read_profile
from galvatron_lite.units import format_bytes, format_seconds
from galvatron_lite.validate.results import spearman
from galvatron_lite.world import join, leave, pick_device, rank
from measured import Measured, measure, peak_of

FULL, SELECTIVE = Recompute.FULL, Recompute.SELECTIVE
Make = Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class Case:
    """A plan to try: pipeline stages, micro-batches, strategies of the blocks (the last repeats) and of the edges."""

    name: str
    stages: int
    microbatches: int
    blocks: tuple[Strategy, ...]
    edge: Strategy


def gpt_cases() -> list[Case]:
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


def convnext_cases() -> list[Case]:
    """Plans for four devices: data parallelism, and pixels and channels beside it."""
    data, rows, columns = Strategy(data=4), Strategy(data=2, height=2), Strategy(data=2, width=2)
    zero, grid = Strategy(zero=2, zero_stage=3, height=2), Strategy(height=2, width=2)
    channels = Strategy(data=2, channels=2)
    return [
        Case("data", 1, 1, (data,), data),
        Case("rows, data", 1, 1, (rows,), rows),
        Case("columns, data, recompute", 1, 1, (replace(columns, recompute=FULL),), columns),
        Case("rows and columns", 1, 1, (grid,), grid),
        Case("rows, ZeRO-3", 1, 1, (zero,), zero),
        Case("filters, data", 1, 1, (Strategy(data=2, filters=2),), Strategy(data=2, filters=2)),
        Case("2 rows, then channels, data", 1, 1, (rows, rows, channels), rows),
    ]


def resnet_cases() -> list[Case]:
    """Plans for two devices: samples or rows of pixels."""
    data, rows = Strategy(data=2), Strategy(height=2)
    return [Case("data", 1, 1, (data,), data), Case("rows", 1, 1, (rows,), rows)]


def one_device_cases(attention: bool) -> list[Case]:
    """Plans for one device: micro-batches, recomputation, of models with attention also of parts of a block, and on a
    GPU what the host keeps."""
    alone = Strategy()
    full, selective = replace(alone, recompute=FULL), replace(alone, recompute=SELECTIVE)
    states, kept = replace(alone, offload=Offload.STATES), replace(alone, offload=Offload.ACTIVATIONS)
    rows = [(f"{count} micro-batches", count, (alone,)) for count in (1, 2, 4)]
    rows += [(f"recompute, {count} micro-batches", count, (full,)) for count in (1, 2, 4)]
    rows += [(f"2 blocks recompute, {count} micro-batches", count, (full, full, alone)) for count in (1, 2)]
    if attention:
        rows += [(f"selective recompute, {count} micro-batches", count, (selective,)) for count in (1, 4)]
    if attention and torch.cuda.is_available():
        rows += [("states in the host", 1, (states,)), ("activations in the host", 2, (kept,))]
    return [
        Case(name.replace("1 micro-batches", "1 micro-batch"), 1, count, blocks, alone) for name, count, blocks in rows
    ]


CASES = {
    "gpt": (quickstart_model, gpt_cases),
    "convnext": (train_convnext_model, convnext_cases),
    "resnet50": (resnet50_model, resnet_cases),
    "llama": (llama_model, partial(one_device_cases, attention=True)),
    "resnet50-alone": (resnet50_model, partial(one_device_cases, attention=False)),
}
"""By the name of a model: its module, and the plans to try."""


def plan_of(case: Case, profile: Profile, batch: int) -> Plan:
    """The case as a plan of the profile's model, the same number of blocks in every stage."""
    layers = profile.graph.layers
    blocks = sum(layer.role is Role.BLOCK for layer in layers)
    parts: list[list[LayerRun]] = [[] for _ in range(case.stages)]
    place = 0
    for layer in layers:
        block = layer.role is Role.BLOCK
        strategy = case.blocks[min(place, len(case.blocks) - 1)] if block else case.edge
        stage = min(place * case.stages // blocks, case.stages - 1)
        parts[stage].append(LayerRun(layer.name, layer.name, 1, strategy))
        place += block
    devices, stages = case.stages * case.edge.devices, tuple(Stage(tuple(part)) for part in parts)
    name = profile.graph.name
    return Plan(
        PLAN_VERSION, name, devices, batch, case.microbatches, Schedule.ONE_F_ONE_B, profile.graph.precision, stages
    )


def stepper(make: Make, plan: Plan) -> Callable[[], object]:
    """A fresh model under the plan, and the function that trains one step of it."""
    model, batch = make()
    parallel = auto_parallelize(model, batch, plan=plan)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    return lambda: parallel.train_step(batch, optimizer)


def show(rows: list[tuple[Case, Plan, Measured]], as_json: Path | None) -> None:
    """The table, its worst errors and the rank correlation."""
    table = Table("plan", "predicted", "measured", "spread", "error", "predicted memory", "measured", "error ")
    time_errors, memory_errors, data = [], [], []
    for case, plan, found in rows:
        prediction = plan.prediction
        if prediction is None:
            raise SystemExit("a plan carries no prediction")
        time_errors.append(prediction.step_seconds / found.seconds - 1)
        memory = max(stage.memory.tensors for stage in plan.stages)  # the driver's context is not measured
        memory_errors.append(memory / found.peak - 1)
        table.add_row(
            case.name, format_seconds(prediction.step_seconds), format_seconds(found.seconds), f"{found.spread:.0%}",
            f"{time_errors[-1]:+.1%}", format_bytes(memory), format_bytes(found.peak),
            f"{memory_errors[-1]:+.1%}",
        )  # fmt: skip
        data.append([case.name, prediction.step_seconds, found.seconds, found.spread, memory, found.peak])
    rho = spearman([(row[1], row[2]) for row in data]) or 0.0
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
    parser.add_argument("--model", choices=tuple(CASES), default="gpt", help="of scripts/*_model.py")
    parser.add_argument("--folder", type=Path, default=Path("profiles"), help="where the measured profile is")
    parser.add_argument("--steps", type=int, default=12, help="steps to time of each plan")
    parser.add_argument("--only", default="", help="run the plans whose name holds this")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    join(pick_device())
    profile = read_profile(last_profile(options.folder))
    model, cases = CASES[options.model]
    rows = []
    chosen = [case for case in cases() if options.only in case.name]
    for number, case in enumerate(chosen, 1):
        if rank() == 0:
            print(f"{number} of {len(chosen)}: {case.name}", file=sys.stderr)
        plan = evaluate(profile, plan_of(case, profile, model.BATCH))
        peak = peak_of(lambda plan=plan: stepper(model.make, plan))
        found = measure(stepper(model.make, plan), 2, options.steps, peak)
        rows.append((case, plan, found))
        dist.barrier()
    if rank() == 0:
        show(rows, options.json)
    leave()


if __name__ == "__main__":
    main()
