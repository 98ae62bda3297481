"""Our plans as Hetu-Galvatron's files, or what to pin for one that they can say."""

from __future__ import annotations

from typing import Any

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.peers.hetu.plan import SCHEDULES, from_plan
from galvatron_lite.peers.hetu.strategy import write_hetu_plan
from galvatron_lite.plans.schema import Plan


def exported(plan: Plan) -> dict[str, Any]:
    """The JSON object of a plan of ours.

    Raises:
        InputError: what their files cannot say, and the options of ``galvatron plan`` that make a plan they can.
    """
    try:
        return write_hetu_plan(from_plan(plan))
    except InputError as error:
        remedy = f"{error.remedy} A plan that they can say comes of: galvatron plan ... {' '.join(options(plan))}"
        raise InputError(error.field, error.value, remedy) from error


def options(plan: Plan) -> list[str]:
    """Options of ``galvatron plan`` for a plan of the same model that their files can say.

    Without replicas all layers are ZeRO-2, ZeRO-3 or not split by samples, which their files tell apart; embedding and
    head, of which they hold one strategy, are ZeRO-3 alone.
    """
    ends = plan.stages[0].runs[0].first, plan.stages[-1].runs[-1].last
    pins = [f"--fix {name}.{pin}" for name in ends for pin in ("zero=3", "tp=1")]
    again = any(run.strategy.recompute is Recompute.SELECTIVE for stage in plan.stages for run in stage.runs)
    schedule = [] if plan.schedule in SCHEDULES.values() else ["--schedule 1f1b"]
    return [*schedule, "--forbid data", *pins, *(["--fix recompute=full"] if again else [])]
