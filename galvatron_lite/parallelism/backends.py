"""What can run a plan: the strategies and schedules that a backend trains with. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.base import Offload, Strategy
from galvatron_lite.parallelism.pipeline.schedule import EXECUTABLE
from galvatron_lite.plans.schema import Plan, Schedule


@dataclass(frozen=True, slots=True)
class Backend:
    """What a way to train supports.

    Attributes:
        name: as given to ``--backend``.
        schedules: pipeline schedules it runs.
        runs: whether it runs a strategy.
        missing: what it leaves out, a line each, told with every plan.
    """

    name: str
    schedules: tuple[Schedule, ...]
    runs: Callable[[Strategy], bool]
    missing: tuple[str, ...] = ()


def _galvatron_runs(strategy: Strategy) -> bool:
    split = strategy.context * strategy.expert
    return split == 1 and strategy.zero_stage != 1 and strategy.offload is Offload.NONE


GALVATRON = Backend("galvatron", EXECUTABLE, _galvatron_runs)
"""What ``auto_parallelize`` trains with."""
ANY = Backend("any", tuple(Schedule), lambda _: True)
"""Everything that is priced: plans for other software, or to see what one would gain."""
BACKENDS = {backend.name: backend for backend in (GALVATRON, ANY)}


def backend_named(name: str) -> Backend:
    """The backend of a name.

    Raises:
        InputError: there is none.
    """
    if name not in BACKENDS:
        raise InputError("--backend", name, f"Give one of {', '.join(BACKENDS)}.")
    return BACKENDS[name]


def check_runs(plan: Plan, backend: Backend = GALVATRON) -> Plan:
    """The plan itself, once the backend can train with it.

    Raises:
        InputError: a strategy or schedule that it does not run.
    """
    if len(plan.stages) > 1 and plan.schedule not in backend.schedules:
        known = ", ".join(schedule.value for schedule in backend.schedules)
        raise InputError("plan, schedule", plan.schedule.value, f"{backend.name} trains with {known}.")
    for index, stage in enumerate(plan.stages):
        for run in stage.runs:
            if not backend.runs(run.strategy):
                field = f"plan, stages.{index}, strategy of {run.first}"
                raise InputError(field, str(run.strategy), f"{backend.name} cannot train with it, only price it.")
    return plan
