"""When every pass takes place. No torch here.

A training step takes 2N time steps; worker w (from 0) begins 2w time steps after worker 0. From time step 2(N-1) on
every stage is used exactly once a time step (arXiv 2403.08837).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class StagePass:
    """One pass of a stage."""

    time: int  # time step, from 0
    backward: bool  # whether it is a backward pass
    step: int  # training step, from 0
    worker: int  # whose micro-batch, from 0
    stage: int  # of the model, from 0


def forward_time(step: int, worker: int, stage: int, workers: int) -> int:
    """Time step of a forward pass: 2Nt + 2(i-1) + (j-1), counted from 1."""
    return 2 * workers * step + 2 * worker + stage


def backward_time(step: int, worker: int, stage: int, workers: int) -> int:
    """Time step of a backward pass: 2Nt + 2(i-1) + (2N-j), counted from 1."""
    return 2 * workers * step + 2 * worker + 2 * workers - 1 - stage


def moments(step: int, worker: int, stage: int, workers: int) -> tuple[StagePass, StagePass]:
    """The forward and the backward pass of a stage by a worker in a training step."""
    return (
        StagePass(forward_time(step, worker, stage, workers), False, step, worker, stage),
        StagePass(backward_time(step, worker, stage, workers), True, step, worker, stage),
    )
