"""The order in which one stage works through its micro-batches. Pure: no torch, no communication."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from galvatron_lite.plans.schema import Schedule


class Pass(StrEnum):
    """What is done with a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch."""

    what: Pass
    microbatch: int


def stage_actions(schedule: Schedule, stages: int, stage: int, microbatches: int) -> tuple[Action, ...]:
    """What stage ``stage`` of ``stages`` does, in order.

    GPipe runs every forward pass, then every backward pass. 1F1B (Narayanan et al. 2021, "Efficient Large-Scale
    Language Model Training on GPU Clusters", section 2.2) starts with ``stages - stage - 1`` forward passes and then
    alternates, so that a stage never holds the activations of more than ``stages - stage`` micro-batches.
    """
    ahead = microbatches if schedule is Schedule.GPIPE else min(microbatches, stages - stage - 1)
    forward = [Action(Pass.FORWARD, index) for index in range(microbatches)]
    backward = [Action(Pass.BACKWARD, index) for index in range(microbatches)]
    steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return tuple(forward[:ahead] + steady + backward[microbatches - ahead :])
