"""Plans of forward passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galvatron_lite.api import plan as find
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.backends import GALVATRON
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import check_runs
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Mode, Plan, Schedule, Stage


def inference(stages: int, mode: Mode = Mode.INFERENCE) -> Plan:
    runs = [Stage((LayerRun(f"l{place}", f"l{place}", 1, Strategy()),)) for place in range(stages)]
    return Plan(PLAN_VERSION, "test", stages, 4, 2, Schedule.ONE_F_ONE_B, "fp32", tuple(runs), mode=mode)


@pytest.mark.parametrize("plan", [inference(1), inference(2), inference(2, Mode.TRAINING)])
def test_all_are_run(plan: Plan) -> None:
    assert check_runs(plan) is plan


def test_a_backend_without_pipelines_refuses_them() -> None:
    alone = replace(GALVATRON, pipelines=(Mode.TRAINING,))
    with pytest.raises(InputError, match=r"runs no pipelines in inference.*--fix pp=1"):
        check_runs(inference(2), alone)
    assert check_runs(inference(1), alone) == inference(1)


def test_a_pipeline_is_offered() -> None:
    assert len(_found("pp=2", "galvatron").stages) == 2


def _found(fix: str, backend: str) -> Plan:
    return find(model="vit-huge", cluster="a100-80gb", gpus=2, batch=2, mode="inference", fix=fix, backend=backend)
