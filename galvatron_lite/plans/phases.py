"""Phases of a training run: batches and sequences that change at given steps, and the plan of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import Strict, from_data, kind_of, read_data, write_value
from galvatron_lite.limits import SAMPLES, Name, Samples, Seconds, Size, Steps
from galvatron_lite.plans.io import check_plan, plan_in
from galvatron_lite.plans.schema import Plan

PHASES_VERSION = 1


@dataclass(frozen=True, slots=True)
class PhaseEntry(Strict):
    """A phase as it is written; one with a list of batches or sequences is a ramp of as many equal parts."""

    name: Name  # for people
    steps: Steps  # optimizer steps, of all parts together
    batch: Annotated[int, Interval(le=SAMPLES)] | tuple[Annotated[int, Interval(le=SAMPLES)], ...]  # samples a step
    sequence: int | tuple[int, ...] | None = None  # tokens a sample; that of the profile if not given
    profile: Name = ""  # file of a profile of that sequence; with a model by name there is no need


@dataclass(frozen=True, slots=True)
class PhasesFile(Strict):
    """What a file of phases holds."""

    version: int  # of this schema
    phases: tuple[PhaseEntry, ...]  # in the order of training


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps of equal batch and sequence."""

    name: str  # for people
    steps: int
    batch: int  # samples a step
    sequence: int | None = None  # tokens a sample; None: as profiled
    profile: str = ""  # file of its profile; empty: that of the run


@dataclass(frozen=True, slots=True)
class SwitchCost(Strict):
    """What going from one plan to another while training is estimated to cost (``cost.switching``)."""

    seconds: Seconds = 0.0  # from the end of one step to the start of the next
    received: Size = 0  # bytes that the device that receives most gets from others
    moved: Size = 0  # bytes that all devices together get from others


@dataclass(frozen=True, slots=True)
class PlannedPhase(Strict):
    """A phase and how it is trained."""

    name: Name  # for people
    first: Size  # number of its first step, from 0
    steps: Steps
    sequence: Samples  # tokens a sample
    plan: Plan  # with its prediction for this phase; its ``global_batch`` is the phase's
    # cost of the change before its first step; None where the model stays split as it is
    switch: SwitchCost | None = None

    @property
    def seconds(self) -> float:
        """Predicted seconds of its steps, and of the switch before them."""
        step = 0.0 if self.plan.prediction is None else self.plan.prediction.step_seconds
        return self.steps * step + (0.0 if self.switch is None else self.switch.seconds)


@dataclass(frozen=True, slots=True)
class PhasedPlan(Strict):
    """The plans of a run."""

    version: int  # of this schema
    phases: tuple[PlannedPhase, ...]  # in the order of training
    # predicted seconds of the run under the best one of the plans for all phases; None where none fits them all
    single_seconds: Seconds | None = None
    always_seconds: Seconds | None = None  # predicted seconds with the fastest plan of every phase, every switch paid

    @property
    def seconds(self) -> float:
        """Predicted seconds of the run."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return sum(phase.steps for phase in self.phases)

    def at(self, step: int) -> PlannedPhase:
        """The phase of a step (0 is the first); the last one beyond the end."""
        return next((phase for phase in self.phases if step < phase.first + phase.steps), self.phases[-1])


def same_split(one: Plan, other: Plan) -> bool:
    """Whether a model split for one plan is split for the other too: they differ in batch and micro-batches at most."""
    return _split(one) == _split(other)


def _split(plan: Plan) -> tuple[object, ...]:
    stages = tuple(stage.runs for stage in plan.stages)
    branches = tuple((branch.name, branch.roots, branch.first, branch.devices, branch.runs) for branch in plan.branches)
    cyclic = None if plan.cyclic is None else (plan.cyclic, plan.microbatches)
    return (
        plan.devices,
        stages,
        plan.schedule,
        plan.virtual_stages,
        plan.precision,
        branches,
        cyclic,
        plan.mode,
        plan.backend,
    )


def read_phases(path: Path) -> tuple[Phase, ...]:
    """The phases of a file, ramps in their parts."""
    data = read_data(path)
    version = data.get("version") if isinstance(data, dict) else None
    if version != PHASES_VERSION:
        remedy = f"Begin it with version: {PHASES_VERSION} and a list of phases, as in configs/phases."
        raise FileFormatError(f"{path}, version", version, remedy)
    entries = from_data(PhasesFile, data, str(path)).phases
    if not entries:
        raise InputError(f"{path}, phases", "none", "Give at least one phase.")
    return tuple(phase for place, entry in enumerate(entries) for phase in _parts(entry, f"{path}, phases.{place}"))


def _parts(entry: PhaseEntry, field: str) -> Iterator[Phase]:
    """The phases of an entry; the first parts of a ramp take the steps that do not divide."""
    count = _count(entry, field)
    if entry.steps < count:
        raise InputError(f"{field}.steps", entry.steps, f"It has {count} parts of at least one step.")
    batches, sequences = _each(entry.batch, count), _each(entry.sequence, count)
    for part, (batch, sequence) in enumerate(zip(batches, sequences, strict=True)):
        for name, value in (("batch", batch), ("sequence", sequence)):
            if value is not None and value < 1:
                raise InputError(f"{field}.{name}", value, "It is at least 1.")
        steps = entry.steps // count + (part < entry.steps % count)
        name = entry.name if count == 1 else f"{entry.name} {part + 1}/{count}"
        yield Phase(name, steps, batch or 1, sequence, entry.profile)


def _count(entry: PhaseEntry, field: str) -> int:
    lengths = {len(value) for value in (entry.batch, entry.sequence) if isinstance(value, tuple)}
    if len(lengths) > 1 or 0 in lengths:
        raise InputError(field, entry.name, "Lists of batches and sequences are of equal length, and not empty.")
    count = lengths.pop() if lengths else 1
    if entry.profile and isinstance(entry.sequence, tuple):
        raise InputError(f"{field}.profile", entry.profile, "A profile is of one sequence: write a phase for each.")
    return count


def _each(value: int | tuple[int, ...] | None, count: int) -> Sequence[int | None]:
    return value if isinstance(value, tuple) else [value] * count


def is_phased(data: object) -> bool:
    """Whether what a file holds is a plan in phases."""
    return isinstance(data, dict) and "phases" in data


def read_training_plan(path: Path) -> Plan | PhasedPlan:
    """A plan, or one in phases, from a YAML or JSON file, checked."""
    data = read_data(path)
    return phased_plan_in(data, path) if is_phased(data) else plan_in(data, path)


def phased_plan_in(data: Any, path: Path) -> PhasedPlan:
    """A plan in phases from what its file holds, checked."""
    version = data.get("version") if isinstance(data, dict) else kind_of(data)
    if version != PHASES_VERSION or not is_phased(data):
        raise FileFormatError(f"{path}, version", version, "Make it anew with galvatron plan --phases FILE.")
    return check_phased(from_data(PhasedPlan, data, str(path)), str(path))


def write_phased_plan(plan: PhasedPlan, path: Path) -> None:
    """Write a plan in phases as YAML (or JSON where the name ends so), whole or not at all."""
    write_value(path, plan)


def check_phased(plan: PhasedPlan, field: str = "plan") -> PhasedPlan:
    """The plan itself, once its phases follow one another, on the same devices."""
    if not plan.phases:
        raise InputError(f"{field}, phases", "none", "A plan in phases has at least one.")
    first, devices = 0, plan.phases[0].plan.devices
    for place, phase in enumerate(plan.phases):
        name = f"{field}, phases.{place}"
        check_plan(phase.plan, f"{name}.plan")
        if phase.steps < 1:
            raise InputError(f"{name}.steps", phase.steps, "It is at least 1.")
        if phase.first != first:
            raise InputError(f"{name}.first", phase.first, f"The phase before it ends before step {first}.")
        if phase.plan.devices != devices:
            raise InputError(f"{name}.plan.devices", phase.plan.devices, f"The first phase has {devices}.")
        first += phase.steps
    return plan


def in_order(phases: Sequence[PlannedPhase]) -> tuple[PlannedPhase, ...]:
    """The phases with the numbers of their first steps."""
    placed: list[PlannedPhase] = []
    first = 0
    for phase in phases:
        placed.append(replace(phase, first=first))
        first += phase.steps
    return tuple(placed)
