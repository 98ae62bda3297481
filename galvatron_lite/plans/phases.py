"""Phases of a training run, whose batch and sequence change at certain steps, and the plan of each phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import Strict, from_data, kind_of, read_data, write_value
from galvatron_lite.limits import SAMPLES, Name, Samples, Seconds, Size, Steps
from galvatron_lite.plans.io import check_plan, is_phased, plan_in
from galvatron_lite.plans.schema import Plan

PHASES_VERSION = 1


@dataclass(frozen=True, slots=True)
class PhaseEntry(Strict):
    """A phase in a file. A list of batches or sequences makes it a ramp, of as many equal parts."""

    name: Name
    steps: Steps  # optimizer steps, of all parts together
    batch: Annotated[int, Interval(le=SAMPLES)] | tuple[Annotated[int, Interval(le=SAMPLES)], ...]  # samples a step
    sequence: int | tuple[int, ...] | None = None  # tokens a sample; by default that of the profile
    profile: Name = ""  # file of a profile of that sequence; not needed for a model by name


@dataclass(frozen=True, slots=True)
class PhasesFile(Strict):
    """The content of a file of phases."""

    version: int  # of this schema
    phases: tuple[PhaseEntry, ...]  # in the order of training


@dataclass(frozen=True, slots=True)
class Phase:
    """Consecutive steps of the same batch and sequence."""

    name: str
    steps: int
    batch: int  # samples a step
    sequence: int | None = None  # tokens a sample; None: that of the profile
    profile: str = ""  # file of its profile; empty: the profile of the run


@dataclass(frozen=True, slots=True)
class SwitchCost(Strict):
    """The estimated cost of a switch between two plans during training (``cost.switching``)."""

    seconds: Seconds = 0.0  # from the end of one step to the start of the next
    received: Size = 0  # bytes that the device that receives most gets from others
    moved: Size = 0  # bytes that all devices together get from others


@dataclass(frozen=True, slots=True)
class PlannedPhase(Strict):
    """A phase and its plan."""

    name: Name
    first: Size  # number of its first step, from 0
    steps: Steps
    sequence: Samples  # tokens a sample
    plan: Plan  # with its prediction for this phase; its ``global_batch`` is the phase's
    switch: SwitchCost | None = None  # before its first step; None if the model stays split as it is

    @property
    def seconds(self) -> float:
        """Predicted seconds of the switch and the steps."""
        step = 0.0 if self.plan.prediction is None else self.plan.prediction.step_seconds
        return self.steps * step + (0.0 if self.switch is None else self.switch.seconds)


@dataclass(frozen=True, slots=True)
class PhasedPlan(Strict):
    """The plans of all phases of a run."""

    version: int  # of this schema
    phases: tuple[PlannedPhase, ...]  # in the order of training
    single_seconds: Seconds | None = None  # of the run under one plan for all phases; None if none fits
    always_seconds: Seconds | None = None  # of the run with the fastest plan of every phase, switches included

    @property
    def seconds(self) -> float:
        """Predicted seconds of the run."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return sum(phase.steps for phase in self.phases)

    def at(self, step: int) -> PlannedPhase:
        """The phase of a step, counted from 0; the last phase for steps after the end."""
        return next((phase for phase in self.phases if step < phase.first + phase.steps), self.phases[-1])


def same_split(plan: Plan, other: Plan) -> bool:
    """Whether a model split for one plan is split for the other: they may differ only in batch and micro-batches."""
    return _split(plan) == _split(other)


def _split(plan: Plan) -> tuple[object, ...]:
    stages = tuple(stage.runs for stage in plan.stages)
    branches = tuple((branch.name, branch.roots, branch.first, branch.devices, branch.runs) for branch in plan.branches)
    cyclic = None if plan.cyclic is None else (plan.cyclic, plan.microbatches)
    pipeline = (stages, plan.schedule, plan.virtual_stages)
    return (plan.devices, *pipeline, plan.precision, branches, cyclic, plan.mode, plan.backend)


def read_phases(path: Path) -> tuple[Phase, ...]:
    """Read the phases of a file; ramps are divided into their parts.

    Raises:
        FileFormatError: the file is missing, corrupt, or of another version.
        InputError: a phase contradicts itself.
    """
    data = read_data(path)
    version = data.get("version") if isinstance(data, dict) else None
    if version != PHASES_VERSION:
        remedy = f"Begin it with version: {PHASES_VERSION} and a list of phases, as in configs/phases."
        raise FileFormatError(f"{path}, version", version, remedy)
    entries = from_data(PhasesFile, data, str(path)).phases
    if not entries:
        raise InputError(f"{path}, phases", "none", "Give at least one phase.")
    return tuple(phase for number, entry in enumerate(entries) for phase in _parts(entry, f"{path}, phases.{number}"))


def _parts(entry: PhaseEntry, field: str) -> Iterator[Phase]:
    """The parts of a ramp; the first ones take the remaining steps if they do not divide evenly."""
    lengths = {len(value) for value in (entry.batch, entry.sequence) if isinstance(value, tuple)}
    if len(lengths) > 1 or 0 in lengths:
        raise InputError(field, entry.name, "Lists of batches and sequences are of equal length, and not empty.")
    if entry.profile and isinstance(entry.sequence, tuple):
        raise InputError(f"{field}.profile", entry.profile, "A profile is of one sequence: write a phase for each.")
    count = lengths.pop() if lengths else 1
    if entry.steps < count:
        raise InputError(f"{field}.steps", entry.steps, f"It has {count} parts of at least one step.")
    batches = entry.batch if isinstance(entry.batch, tuple) else (entry.batch,) * count
    sequences = entry.sequence if isinstance(entry.sequence, tuple) else (entry.sequence,) * count
    for number, (batch, sequence) in enumerate(zip(batches, sequences, strict=True)):
        for name, value in (("batch", batch), ("sequence", sequence)):
            if value is not None and value < 1:
                raise InputError(f"{field}.{name}", value, "It is at least 1.")
        steps = entry.steps // count + (number < entry.steps % count)
        name = entry.name if count == 1 else f"{entry.name} {number + 1}/{count}"
        yield Phase(name, steps, batch, sequence, entry.profile)


def read_training_plan(path: Path) -> Plan | PhasedPlan:
    """Read and check a plan, or a plan in phases, from a YAML or JSON file."""
    data = read_data(path)
    return phased_plan_in(data, path) if is_phased(data) else plan_in(data, path)


def phased_plan_in(data: Any, path: Path) -> PhasedPlan:
    """Parse and check the content of a file as a plan in phases."""
    version = data.get("version") if isinstance(data, dict) else kind_of(data)
    if version != PHASES_VERSION or not is_phased(data):
        raise FileFormatError(f"{path}, version", version, "Make it anew with galvatron plan --phases FILE.")
    return check_phased(from_data(PhasedPlan, data, str(path)), str(path))


def write_phased_plan(plan: PhasedPlan, path: Path) -> None:
    """Write a plan in phases as YAML, or JSON if the name ends so, atomically."""
    write_value(path, plan)


def check_phased(plan: PhasedPlan, field: str = "plan") -> PhasedPlan:
    """Return the plan if its phases follow each other on the same devices.

    Raises:
        InputError: names the first number that is wrong.
    """
    if not plan.phases:
        raise InputError(f"{field}, phases", "none", "A plan in phases has at least one.")
    first, devices = 0, plan.phases[0].plan.devices
    for number, phase in enumerate(plan.phases):
        name = f"{field}, phases.{number}"
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
    """The phases, each with the number of its first step."""
    numbered: list[PlannedPhase] = []
    for phase in phases:
        first = numbered[-1].first + numbered[-1].steps if numbered else 0
        numbered.append(replace(phase, first=first))
    return tuple(numbered)
