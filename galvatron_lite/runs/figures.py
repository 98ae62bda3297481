"""What a run's steps come to, beside what was predicted for its plan. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from galvatron_lite.plans.schema import Plan
from galvatron_lite.runs.schema import StepRecord

RECENT = 20
"""Steps that a figure is of, at most."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of some steps, or of a prediction; 0 where one is not known.

    Attributes:
        seconds: of a step.
        samples: a second, with what lies between steps.
        tokens: a second; 0 where the model has none.
        mfu: model FLOPs utilisation, 0..1.
        memory: bytes on the fullest device, without its driver's context.
    """

    seconds: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    mfu: float = 0.0
    memory: int = 0


def predicted(plan: Plan) -> Figures:
    """What a plan is predicted to do; nothing of one written by hand."""
    found = plan.prediction
    if found is None:
        return Figures()
    tokens = found.tokens_per_second if found.tokens_per_second != found.samples_per_second else 0.0
    memory = max((stage.memory.total - stage.memory.context for stage in plan.stages), default=0)
    return Figures(found.step_seconds, found.samples_per_second, tokens, found.mfu, max(memory, 0))


def measured(steps: Sequence[StepRecord], plan: Plan) -> Figures:
    """What the last of some steps came to: medians, so that single slow ones do not count.

    MFU counts the FLOPs that the plan was made for: those of its prediction, a sample.
    """
    recent = [step for step in steps if not step.profiled][-RECENT:]
    if not recent:
        return Figures()
    seconds, period = median(step.seconds for step in recent), median(step.seconds + step.between for step in recent)
    samples = median(step.samples for step in recent) / period if period else 0.0
    tokens = median(step.tokens for step in recent) / period if period else 0.0
    wanted = predicted(plan)
    mfu = wanted.mfu * samples / wanted.samples if wanted.samples else 0.0
    return Figures(seconds, samples, tokens if wanted.tokens else 0.0, mfu, recent[-1].memory)


def tokens_of_sample(plan: Plan) -> float:
    """Tokens of a sample that a plan was made for; 1 where the model has none, or nothing was predicted."""
    found = plan.prediction
    return 1.0 if found is None or not found.samples_per_second else found.tokens_per_second / found.samples_per_second
