"""Plans of forward passes."""

from __future__ import annotations

import pytest

from galvatron_lite.api import plan as find
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.backends import ANY, check_runs
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Mode, Plan, Schedule, Stage


def inference(stages: int, mode: Mode = Mode.INFERENCE) -> Plan:
    runs = [Stage((LayerRun(f"l{place}", f"l{place}", 1, Strategy()),)) for place in range(stages)]
    return Plan(PLAN_VERSION, "test", stages, 4, 2, Schedule.ONE_F_ONE_B, "fp32", tuple(runs), mode=mode)


def test_pipelines_are_priced_but_not_run() -> None:
    with pytest.raises(InputError, match=r"runs no pipelines in inference.*--fix pp=1"):
        check_runs(inference(2))
    assert check_runs(inference(2), ANY) == inference(2)


@pytest.mark.parametrize("plan", [inference(1), inference(2, Mode.TRAINING)])
def test_others_are_run(plan: Plan) -> None:
    assert check_runs(plan) is plan


@pytest.mark.parametrize("stages", [1, 2])
def test_a_plan_says_that_it_is_not_run(stages: int) -> None:
    made = _found(f"pp={stages}", "any")
    assert made.provenance is not None
    assert [note for note in made.provenance.notes if "runs no pipelines" in note] == [NOTE] * (stages - 1)


def test_a_pipeline_is_not_offered() -> None:
    assert len(_found("tensor=1", "galvatron").stages) == 1
    with pytest.raises(InputError, match=r"runs no pipelines in inference; --backend any prices them"):
        _found("pp=2", "galvatron")


def _found(fix: str, backend: str) -> Plan:
    return find(model="vit-huge", cluster="a100-80gb", gpus=2, batch=2, mode="inference", fix=fix, backend=backend)


NOTE = "auto_parallelize runs no pipelines in inference: this one is priced for other software (--fix pp=1)"
