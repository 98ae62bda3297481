"""What can run a plan: the strategies and schedules that a backend trains with. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.base import Offload, Strategy, Strided
from galvatron_lite.parallelism.pipeline.schedule import EXECUTABLE
from galvatron_lite.plans.schema import Mode, Plan, Schedule


@dataclass(frozen=True, slots=True)
class Backend:
    """What a way to train supports.

    Attributes:
        name: as given to ``--backend``.
        schedules: pipeline schedules it runs.
        values: what fields of ``Strategy`` may be; a field that is absent may have any value.
        missing: what it leaves out, a line each, told with every plan.
        rule: what it asks of fields together; None: nothing.
        pipelines: the modes in which it runs several stages.
    """

    name: str
    schedules: tuple[Schedule, ...]
    values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    rule: Callable[[Strategy], bool] | None = None
    pipelines: tuple[Mode, ...] = tuple(Mode)

    def leaves_out(self, mode: Mode) -> tuple[str, ...]:
        """What is missing in a mode, a line each."""
        if mode in self.pipelines:
            return self.missing
        return (*self.missing, f"{self.name} runs no pipelines in {mode.value} (--backend {ANY.name} prices them)")

    def runs(self, strategy: Strategy) -> bool:
        """Whether it trains with a strategy."""
        return all(getattr(strategy, name) in values for name, values in self.values.items()) and self.says(strategy)

    def says(self, strategy: Strategy) -> bool:
        """Whether the fields of a strategy, each of which it runs, go together."""
        return self.rule is None or self.rule(strategy)


GALVATRON = Backend(
    "galvatron",
    EXECUTABLE,
    {
        "context": (1,),
        "expert": (1,),
        "zero_stage": (0, 2, 3),
        "offload": (Offload.NONE,),
        "strided": (Strided.NONE,),
    },
    (
        "galvatron cannot yet run and leaves out: context and expert parallelism, ZeRO-1, offload, ranks in another "
        "order, interleaved and zero-bubble schedules (--backend any offers them)",
    ),
    rule=lambda strategy: [strategy.tensor, strategy.spatial, strategy.filters, strategy.channels].count(1) >= 3,
    pipelines=(Mode.TRAINING,),
)
"""What ``auto_parallelize`` trains with."""
ANY = Backend(
    "any",
    tuple(schedule for schedule in Schedule if schedule is not Schedule.CYCLIC),
    missing=("any offers all that is priced; host memory is taken as large enough for what is offloaded",),
)
"""Everything that is priced: plans for other software, or to see what one would gain."""
BACKENDS = {backend.name: backend for backend in (GALVATRON, ANY)}


def in_mode(backend: Backend, mode: Mode) -> Backend:
    """A backend with what it has no use for in a mode left out: nothing is computed again, or waits for a backward."""
    if mode is Mode.TRAINING:
        return backend
    return replace(backend, values={**backend.values, "recompute": (Recompute.NONE,), "offload": (Offload.NONE,)})


def backend_named(name: str) -> Backend:
    """The backend of a name.

    Raises:
        InputError: there is none.
    """
    if name not in BACKENDS:
        raise InputError("--backend", name, f"Give one of {', '.join(BACKENDS)}.")
    return BACKENDS[name]


def check_runs(plan: Plan, backend: Backend = GALVATRON) -> Plan:
    """The plan itself, once the backend can train with it, or run forward passes where it is for inference.

    Raises:
        InputError: a strategy or schedule that it does not run, a pipeline in inference.
    """
    if len(plan.stages) > 1 and plan.mode not in backend.pipelines:
        remedy = f"{backend.name} runs no pipelines in {plan.mode.value}, only prices them: plan with --fix pp=1."
        raise InputError("plan, stages", len(plan.stages), remedy)
    if len(plan.stages) > 1 and plan.cyclic is None and plan.schedule not in backend.schedules:
        known = ", ".join(schedule.value for schedule in backend.schedules)
        raise InputError("plan, schedule", plan.schedule.value, f"{backend.name} trains with {known}.")
    parts = [(f"stages.{number}", stage.runs) for number, stage in enumerate(plan.stages)]
    parts += [(f"branches.{number}", one.runs) for number, one in enumerate(plan.branches)]
    for part, runs in parts:
        for run in runs:
            if not backend.runs(run.strategy):
                place = f"plan, {part}, strategy of {run.first}"
                raise InputError(place, str(run.strategy), f"{backend.name} cannot train with it, only price it.")
    return plan
