"""The shipped measured profile against the twelve plans that were run on its machine (docs/accuracy.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Prediction, Schedule, Stage
from galvatron_lite.profiler.schema import OriginKind, Profile
from galvatron_lite.profiler.store import read_profile

PROFILE = Path(__file__).parents[2] / "profiles" / "CPU-AMD-EPYC-x2-5bce98" / "quickstart-profile.yaml"
FULL = Recompute.FULL
DATA, TENSOR, ALONE = Strategy(data=2), Strategy(tensor=2), Strategy()
ZERO2, ZERO3 = Strategy(zero=2, zero_stage=2), Strategy(zero=2, zero_stage=3)

# Stages, micro-batches, strategies of the blocks (the last repeats), measured ms a step, measured peak MiB.
RAN = (
    (1, 1, (DATA,), 394, 176.4),
    (1, 4, (DATA,), 392, 100.4),
    (1, 1, (Strategy(data=2, recompute=FULL),), 470, 101.2),
    (1, 1, (ZERO2,), 431, 158.5),
    (1, 1, (ZERO3,), 459, 137.0),
    (1, 2, (Strategy(zero=2, zero_stage=3, recompute=FULL),), 657, 63.5),
    (1, 1, (TENSOR,), 481, 172.2),
    (1, 2, (Strategy(tensor=2, sequence_parallel=True),), 582, 100.9),
    (2, 2, (ALONE,), 564, 143.0),
    (2, 8, (ALONE,), 477, 64.8),
    (2, 4, (Strategy(recompute=FULL),), 621, 53.2),
    (1, 2, (ZERO3, ZERO3, TENSOR, TENSOR, DATA), 510, 106.9),
)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return read_profile(PROFILE)


def plan_of(profile: Profile, stages: int, microbatches: int, blocks: tuple[Strategy, ...]) -> Plan:
    names = [layer.name for layer in profile.graph.layers]
    edge = Strategy(
        data=blocks[-1].data, zero=blocks[-1].zero, zero_stage=blocks[-1].zero_stage, tensor=blocks[-1].tensor
    )
    inner = [blocks[min(index, len(blocks) - 1)] for index in range(len(names) - 2)]
    runs = [LayerRun(name, name, 1, one) for name, one in zip(names, [edge, *inner, edge], strict=True)]
    half = len(inner) // stages + 1
    parts = [runs] if stages == 1 else [runs[:half], runs[half:]]
    made = tuple(Stage(tuple(part)) for part in parts)
    return Plan(PLAN_VERSION, "gpt", 2, 16, microbatches, Schedule.ONE_F_ONE_B, "fp32", made)


def predicted(profile: Profile, stages: int, microbatches: int, blocks: tuple[Strategy, ...]) -> Prediction:
    prediction = evaluate(profile, plan_of(profile, stages, microbatches, blocks)).prediction
    assert prediction is not None
    return prediction


@pytest.mark.parametrize(("stages", "microbatches", "blocks", "milliseconds", "mebibytes"), RAN)
def test_a_measured_profile_predicts_the_plans_that_were_run(
    profile: Profile, stages: int, microbatches: int, blocks: tuple[Strategy, ...], milliseconds: int, mebibytes: float
) -> None:
    prediction = predicted(profile, stages, microbatches, blocks)
    assert prediction.step_seconds * 1e3 == pytest.approx(milliseconds, rel=0.091)
    assert prediction.peak_memory / 2**20 == pytest.approx(mebibytes, rel=0.041)


def test_the_profile_is_measured(profile: Profile) -> None:
    assert profile.origin.kind is OriginKind.MEASURED
