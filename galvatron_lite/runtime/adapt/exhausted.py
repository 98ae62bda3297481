"""What is done where memory runs out in a step.

Where it runs out on every rank, at the same place of a forward pass, nothing was updated, and no rank waits for
another: training goes on from the tensors in memory under a plan that takes less. Elsewhere (on some ranks alone, in
backward, in the optimizer) other ranks wait in collectives that nobody joins; the error then says so, the log keeps the
factor, and the run that is started again plans with it and loads its last checkpoint.
"""

from __future__ import annotations

import gc
import traceback
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from galvatron_lite.cluster.budget import DEFAULT_BUDGET, budget_on
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runtime.adapt.planning import plain

PATIENCE = timedelta(seconds=10)
"""How long other ranks are waited for; on a rank by itself, memory ran out there alone."""
_LEAST = 1.1
_OVER = 1.02


def asked_group() -> dist.ProcessGroup | None:
    """A group in which ranks ask one another whether memory ran out; all ranks make it together."""
    if dist.get_world_size() == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=PATIENCE)
    return group


def place_of(error: BaseException) -> str:
    """Where in the code memory ran out; empty where that was in a backward pass or an update."""
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name in ("backward", "_finish_step", "step") and "torch" in frame.filename for frame in frames):
        return ""
    return "\n".join(f"{frame.filename}:{frame.lineno}" for frame in frames)


def everywhere(error: BaseException, group: dist.ProcessGroup | None) -> bool:
    """Whether memory ran out on all ranks at the same place of a forward pass; called on ranks where it did."""
    place = place_of(error)
    if group is None:
        return bool(place)
    every: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(every, place, group=group)
    except RuntimeError:  # others did not come in time
        return False
    return bool(place) and set(every) == {place}


def let_go(error: BaseException, optimizer: torch.optim.Optimizer) -> None:
    """Free what the step held: gradients, and activations in the frames of the error."""
    traceback.clear_frames(error.__traceback__)
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def factor_of(profile: Profile, plan: Plan, mem: str | int, factor: float) -> float:
    """Factor on predicted bytes by which the plan under way does not fit the budget any more.

    Args:
        profile: as it was made.
        plan: under which memory ran out.
        mem: budget a device.
        factor: the factor so far.
    """
    budget = budget_on(profile.cluster, mem or DEFAULT_BUDGET).least
    prediction = evaluate(profile, plain(plan)).prediction
    peak = budget if prediction is None else prediction.peak_memory
    return round(max(_LEAST, factor * _OVER, _OVER * budget / peak), 3)
