"""Planning with a corrected profile, in this process or in another one while training continues.

The other process reads its query from standard input and writes the answer to standard output, both as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

from galvatron_lite.cluster.budget import DEFAULT_BUDGET, budget_on
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.errors import GalvatronError
from galvatron_lite.files import from_data, to_data
from galvatron_lite.plans.io import check_runs
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import data_hash
from galvatron_lite.runtime.monitor.correct import corrected
from galvatron_lite.runtime.monitor.schema import Corrections, PlannedRecord, Started
from galvatron_lite.search.pins import read_pins
from galvatron_lite.search.planner import find_plan

_NICE = 10


def answer(query: Started) -> PlannedRecord:
    """Search for the fastest plan by the corrected profile. The current plan is one of the candidates."""
    plan, settings = query.plan, query.settings
    profile = corrected(query.profile, query.corrections)
    budget = budget_on(query.profile.cluster, settings.mem or DEFAULT_BUDGET)
    try:
        pins = read_pins(settings.fix, (*settings.forbid, "branches"), profile.graph)
        best = find_plan(
            profile,
            devices=plan.devices,
            global_batch=plan.global_batch,
            budget=budget.scaled(1.0 / query.corrections.memory),
            fixed=pins.at(plan.devices, plan.global_batch),
            runners_up=0,
            stoppable=False,
            tolerance=0.0 if plan.provenance is None else plan.provenance.tolerance,
            margin=0.0 if plan.provenance is None else plan.provenance.margin,
            candidates=(plain(plan),),
        )
        return PlannedRecord(query.step, check_runs(best))
    except GalvatronError as error:
        return PlannedRecord(query.step, error=f"{type(error).__name__}: {error}")


def plain(plan: Plan) -> Plan:
    """Return the plan without its prediction and provenance."""
    return replace(plan, prediction=None, alternatives=(), left_out=(), provenance=None)


def step_seconds(profile: Profile, corrections: Corrections, plan: Plan) -> float:
    """Predict the seconds of a step by the corrected profile, times the residual factor."""
    prediction = evaluate(corrected(profile, corrections), plain(plan)).prediction
    return corrections.residual * (0.0 if prediction is None else prediction.step_seconds)


def plan_name(plan: Plan) -> str:
    """Return a short name that is equal for plans that differ in their predictions alone."""
    stages = tuple(type(stage)(stage.runs) for stage in plan.stages)
    return data_hash(to_data(replace(plain(plan), stages=stages, model="")))[:12]


class PlanningProcess:
    """A query that is being answered in a process of low priority."""

    def __init__(self, query: Started) -> None:
        self._step = query.step
        self._process = subprocess.Popen(
            [sys.executable, "-m", "galvatron_lite.runtime.monitor.planning"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(to_data(query)))
        self._process.stdin.close()
        self._process.stdin = None

    @property
    def done(self) -> bool:
        """Whether the answer is ready."""
        return self._process.poll() is not None

    def answer(self) -> PlannedRecord:
        """Wait for the answer and return it."""
        output, _ = self._process.communicate()
        if self._process.returncode:
            error = f"the planning process ended with status {self._process.returncode}"
            return PlannedRecord(self._step, error=error)
        return from_data(PlannedRecord, json.loads(output), "answer of the planning process")

    def stop(self) -> None:
        """Stop the process without waiting for its answer."""
        if not self.done:
            self._process.kill()
        self._process.communicate()


def main() -> None:
    """Answer the query on standard input: the entry point of the process."""
    os.nice(_NICE)
    query = from_data(Started, json.load(sys.stdin), "query to the planning process")
    json.dump(to_data(answer(query)), sys.stdout)


if __name__ == "__main__":
    main()
