"""Which version of a stage's parameters a micro-batch uses. No torch here.

After Fournier and Oyallon, "Cyclic Data Parallelism for Efficient Parallelism of Deep Neural Networks", arXiv
2403.08837. Workers, stages and training steps are counted from 0. Version v of a stage's parameters has had v updates;
plain data parallelism uses version t in training step t.
"""

from __future__ import annotations

from enum import StrEnum


class CyclicRule(StrEnum):
    """``cdp-v1``: every worker uses the parameters of the step before. ``cdp-v2``: the freshest that are there."""

    V1 = "cdp-v1"
    V2 = "cdp-v2"


class CyclicSetting(StrEnum):
    """Where the passes run.

    ``single``: all on one device. ``data``: each micro-batch on a device of its own. ``zero``: as ``data``, and the
    states of a stage travel to the device that uses it. ``stages``: one stage of one micro-batch on a device.
    """

    SINGLE = "single"
    DATA = "data"
    ZERO = "zero"
    STAGES = "stages"


def device_count(setting: CyclicSetting, workers: int) -> int:
    """Devices that a setting takes: 1, N, or N(N+1)/2.

    Under ``stages`` a worker is in the stages from j (counted from 1) on, and back, for 2(N-j+1) of the 2N time steps
    of a training step, so N-j+1 devices of stage j are enough, each with one micro-batch at a time.
    """
    own = {CyclicSetting.SINGLE: 1, CyclicSetting.STAGES: workers * (workers + 1) // 2}
    return own.get(setting, workers)


def is_fresh(rule: CyclicRule, worker: int, stage: int, workers: int) -> bool:
    """Whether a worker uses the newest parameters of a stage: under ``cdp-v2`` if i + j > N, counted from 1."""
    return rule is CyclicRule.V2 and worker + stage >= workers - 1


def version(rule: CyclicRule, worker: int, stage: int, workers: int, step: int, base: int = 0) -> int:
    """The version of a stage's parameters that a worker uses in a training step.

    Args:
        rule: of the run.
        worker: which.
        stage: which.
        workers: how many, as many as stages.
        step: the training step.
        base: the oldest version there is (0 at the beginning).
    """
    return max(base, step if is_fresh(rule, worker, stage, workers) else step - 1)
