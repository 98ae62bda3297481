"""Changing the plan while training runs, on the same processes, without a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.switch.change import Observe, PlanChange, SwitchableModel


@dataclass(frozen=True, slots=True)
class Switched:
    """What a change of plan took."""

    seconds: float  # from the call to its end
    moved_bytes: int  # that this rank sent to others
    # of parameters, states, buffers and messages on this rank at the worst moment (computed from their sizes);
    # gradients and activations are not there then
    worst_bytes: int
    by_turns: bool  # whether old tensors were given up as new ones arrived, because both plans' did not fit at once
    phases: dict[str, float]  # seconds of each phase


def switch(
    parallel: SwitchableModel,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    scheduler: Any = None,
    *,
    batch: Any = None,
    memory: int | None = None,
    observe: Observe | None = None,
) -> Switched:
    """Train on under another plan; every rank calls it alike, between two steps.

    Parameters, the optimizer's states, buffers and random states are carried over bit by bit. The model and the
    optimizer stay the same objects, with their groups and learning rates.

    Args:
        parallel: the model, split by its present plan.
        optimizer: over its parameters.
        plan: the other plan, for as many processes.
        scheduler: of the optimizer's learning rate; needed where the optimizer gets more groups.
        batch: an example batch of other shapes, where the plan is for those.
        memory: bytes of this rank that may be taken meanwhile; what is free if not given.
        observe: told of every phase; what it raises fails the phase.

    Raises:
        InputError: the plan does not fit, gradients are pending, or a state cannot be cut. The old plan stays.
        LaunchError: the plan is for another number of processes. The old plan stays.
        SwitchError: a rank failed. Every rank is on the plan it had.
    """
    change = PlanChange(parallel, optimizer, plan, scheduler, batch, observe or (lambda _: None))
    try:
        change.validate()
        change.prepare()
        change.make_groups()
        change.build()
        carrying = change.carry(memory)
    except BaseException:
        change.roll_back()
        raise
    change.commit()
    phases = change.clock.phases()
    return Switched(sum(phases.values()), carrying.moved, carrying.worst, carrying.by_turns, phases)
