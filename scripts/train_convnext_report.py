"""Print what was predicted beside what was measured, and the losses beside those of one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from rich.console import Console

from galvatron_lite.plans.io import read_plan
from quickstart_report import compared
from train_convnext_model import LEARNING_RATE, MAX_GRAD_NORM, batches, make

NAMES = ("rows", "short")
TOLERANCE = 1e-4


def losses_alone(steps: int) -> list[float]:
    """What plain PyTorch in this one process makes of the same model and data."""
    torch.set_num_threads(1)
    model, _ = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in batches(steps):
        loss = model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def report(folder: Path) -> bool:
    """The tables; whether every loss is that of one process."""
    console, equal = Console(highlight=False), True
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in NAMES}
    alone = losses_alone(max(one["steps"] for one in found.values()))
    for name, one in found.items():
        plan = read_plan(folder / f"{name}.yaml")
        ways = sorted({str(run.strategy) for stage in plan.stages for run in stage.runs})
        console.print(compared(plan, one, f"{', '.join(ways)}: {one['steps']} steps of {one['batch']} pictures"))
        off = max(abs(ours - theirs) for ours, theirs in zip(one["curve"], alone, strict=False))
        console.print(f"Largest difference of a step's loss from one process: {off:.1e}")
        equal = equal and off < TOLERANCE
    return equal


if __name__ == "__main__":
    sys.exit(0 if report(Path(sys.argv[1])) else "the losses are not those of one process")
