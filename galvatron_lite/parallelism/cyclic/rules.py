"""The rules of cyclic data parallelism: parameter versions, time steps of passes, and numbers of devices.

After Fournier and Oyallon, "Cyclic Data Parallelism for Efficient Parallelism of Deep Neural Networks", arXiv
2403.08837. Workers, stages and training steps are counted from 0. Version v of a stage's parameters has had v updates;
data parallelism uses version t in training step t. A training step takes 2N time steps; worker w begins 2w time steps
after worker 0. From time step 2(N-1) on every stage runs exactly once in a time step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CyclicRule(StrEnum):
    """``cdp-v1``: every worker uses the parameters of the previous step. ``cdp-v2``: the newest that are available."""

    V1 = "cdp-v1"
    V2 = "cdp-v2"


class CyclicSetting(StrEnum):
    """Where passes run.

    ``single``: all on one device. ``data``: each micro-batch on a separate device. ``stages``: one stage of one
    micro-batch on each device.
    """

    SINGLE = "single"
    DATA = "data"
    STAGES = "stages"


def device_count(setting: CyclicSetting, workers: int) -> int:
    """Return the devices of a setting: 1, N, or N(N+1)/2.

    Under ``stages`` a micro-batch occupies stage j (counted from 1) for 2(N-j+1) of the 2N time steps of a training
    step, from its forward to its backward, so stage j needs N-j+1 devices with one micro-batch at a time.
    """
    if setting is CyclicSetting.SINGLE:
        return 1
    return workers if setting is CyclicSetting.DATA else workers * (workers + 1) // 2


def is_fresh(rule: CyclicRule, worker: int, stage: int, workers: int) -> bool:
    """Whether a worker uses the newest parameters of a stage: under ``cdp-v2`` if i + j > N, counted from 1."""
    return rule is CyclicRule.V2 and worker + stage >= workers - 1


@dataclass(frozen=True, slots=True, order=True)
class StagePass:
    """A forward or backward pass of a stage."""

    time: int  # time step
    backward: bool
    step: int  # training step
    worker: int  # whose micro-batch
    stage: int


def forward_time(step: int, worker: int, stage: int, workers: int) -> int:
    """Return the time step of a forward pass: 2Nt + 2(i-1) + (j-1), counted from 1."""
    return 2 * workers * step + 2 * worker + stage


def backward_time(step: int, worker: int, stage: int, workers: int) -> int:
    """Return the time step of a backward pass: 2Nt + 2(i-1) + (2N-j), counted from 1."""
    return 2 * workers * step + 2 * worker + 2 * workers - 1 - stage


def moments(step: int, worker: int, stage: int, workers: int) -> tuple[StagePass, StagePass]:
    """Return the forward and the backward pass of a stage by a worker in a training step."""
    return (
        StagePass(forward_time(step, worker, stage, workers), False, step, worker, stage),
        StagePass(backward_time(step, worker, stage, workers), True, step, worker, stage),
    )
