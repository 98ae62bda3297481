"""Plans made anew from a corrected profile, in a process beside training or in this one. No torch here.

The process is given its question on standard input and answers on standard output, both JSON, checked like files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from galvatron_lite.cluster.budget import DEFAULT_BUDGET, budget_on
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.errors import GalvatronError
from galvatron_lite.files import STRICT, from_data, to_data
from galvatron_lite.plans.execution import check_runs
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import data_hash
from galvatron_lite.runtime.adapt.correct import corrected, corrected_budget
from galvatron_lite.runtime.adapt.schema import Adapt, Corrections
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.user_pins import read_pins

if TYPE_CHECKING:
    from pydantic import ConfigDict

_NICE = 10


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """What plan is looked for."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    profile: Profile  # as it was made
    corrections: Corrections  # of it
    plan: Plan  # under way, of the devices and the batch; its tolerance and margin hold for the next one
    settings: Adapt  # the budget and the pins


@dataclass(frozen=True, slots=True)
class Replanned:
    """The fastest plan by the corrected profile; or why there is none."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    plan: Plan | None = None
    error: str = ""


def answer(question: PlanQuery) -> Replanned:
    """Look for a plan; the present one is among those compared."""
    plan, settings = question.plan, question.settings
    known = corrected(question.profile, question.corrections)
    budget = corrected_budget(
        budget_on(question.profile.cluster, settings.mem or DEFAULT_BUDGET), question.corrections.memory
    )
    try:
        pins = read_pins(settings.fix, (*settings.forbid, "branches"), known.graph)
        found = find_plan(
            known,
            devices=plan.devices,
            global_batch=plan.global_batch,
            budget=budget,
            fixed=pins.at(plan.devices, plan.global_batch),
            runners_up=0,
            stoppable=False,
            tolerance=0.0 if plan.provenance is None else plan.provenance.tolerance,
            margin=0.0 if plan.provenance is None else plan.provenance.margin,
            known=(plain(plan),),
        )
        return Replanned(check_runs(found))
    except GalvatronError as error:
        return Replanned(error=f"{type(error).__name__}: {error}")


def plain(plan: Plan) -> Plan:
    """What a plan does, without what it was predicted to cost."""
    return replace(plan, prediction=None, alternatives=(), left_out=(), provenance=None)


def step_seconds(profile: Profile, corrections: Corrections, plan: Plan) -> float:
    """Seconds of a step by the corrected profile, times the factor that nothing explains."""
    prediction = evaluate(corrected(profile, corrections), plain(plan)).prediction
    return corrections.residual * (0.0 if prediction is None else prediction.step_seconds)


def plan_name(plan: Plan) -> str:
    """A short name of what a plan does: equal for plans that do the same, whatever they were predicted to cost."""
    bare = replace(
        plain(plan), stages=tuple(type(stage)(stage.runs) for stage in plan.stages), model="", precision=plan.precision
    )
    return data_hash(to_data(bare))[:12]


class PlanningProcess:
    """A question under way in a process of low priority."""

    def __init__(self, question: PlanQuery) -> None:
        command = [sys.executable, "-m", "galvatron_lite.runtime.adapt.planning"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(to_data(question)))
        self._process.stdin.close()
        self._process.stdin = None

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._process.poll() is not None

    def answer(self) -> Replanned:
        """The answer; waits for it. A process that died has none."""
        said, _ = self._process.communicate()
        if self._process.returncode:
            return Replanned(error=f"the planning process ended with status {self._process.returncode}")
        return from_data(Replanned, json.loads(said), "answer of the planning process")

    def stop(self) -> None:
        """End it, where its answer is of no use any more."""
        if not self.done:
            self._process.kill()
        self._process.communicate()


def main() -> None:
    """Answer the question on standard input."""
    import os

    os.nice(_NICE)
    question = from_data(PlanQuery, json.load(sys.stdin), "question to the planning process")
    json.dump(to_data(answer(question)), sys.stdout)


if __name__ == "__main__":
    main()
