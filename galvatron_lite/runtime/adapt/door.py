"""How a model comes to be steered: plans in phases, adapting, and what an earlier run has learnt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from galvatron_lite.cluster.budget import DEFAULT_BUDGET, budget_on, bytes_on
from galvatron_lite.errors import InputError
from galvatron_lite.files import read_data
from galvatron_lite.plans.execution import check_runs
from galvatron_lite.plans.phases import PhasedPlan, check_phased, is_phased, read_phased_plan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runtime.adapt.correct import corrected, corrected_budget
from galvatron_lite.runtime.adapt.log import read_log
from galvatron_lite.runtime.adapt.schema import Adapt, Corrections, Decided, Exhausted
from galvatron_lite.runtime.phases import Phases

if TYPE_CHECKING:
    from galvatron_lite.runtime.engine import ParallelModel


def settings_of(adapt: Adapt | bool, mem: str | int) -> Adapt | None:
    """The settings of adapting, whose budget is that of the first plan where they say none; None: no adapting.

    Raises:
        InputError: settings that cannot be.
    """
    if adapt is False:
        return None
    given = Adapt() if adapt is True else adapt
    for name, least in (("window", 2), ("patience", 1), ("warm_up", 0), ("cool_down", 0), ("horizon", 1)):
        if getattr(given, name) < least:
            raise InputError(f"adapt, {name}", getattr(given, name), f"It is at least {least}.")
    for name in ("threshold", "least_gain"):
        if not 0.0 < getattr(given, name) < 1.0:
            raise InputError(f"adapt, {name}", getattr(given, name), "It is a share, between 0 and 1.")
    return given if given.mem else replace(given, mem=mem)


def opened(plan: Plan | PhasedPlan | str | Path | None) -> tuple[PhasedPlan | None, Plan | str | Path | None]:
    """The plan in phases, where what was given is one or its file; and the plan that training begins with.

    Raises:
        InputError: its numbers contradict one another, or galvatron cannot run a plan of it.
    """
    if isinstance(plan, PhasedPlan):
        found = check_phased(plan)
    elif isinstance(plan, (str, Path)) and is_phased(read_data(Path(plan))):
        found = read_phased_plan(Path(plan))
    else:
        return None, plan
    for phase in found.phases:
        check_runs(phase.plan)
    return found, found.phases[0].plan


def learnt(settings: Adapt | None, profile: Profile) -> Corrections:
    """What an earlier run found out by its log: links, devices of a world as large, memory."""
    if settings is None or not settings.log or not Path(settings.log).is_file():
        return Corrections()
    found = Corrections()
    for record in read_log(Path(settings.log)):
        if isinstance(record, Decided):
            found = record.decision.corrections
        elif isinstance(record, Exhausted):
            found = replace(found, memory=max(found.memory, record.factor))
    levels = {level.name for level in profile.cluster.levels}
    links = tuple(link for link in found.links if link.level in levels)
    devices = found.devices if len(found.devices) == profile.cluster.devices else ()
    return Corrections(links, devices, found.memory)


def planned_from(profile: Profile, corrections: Corrections, mem: str | int) -> tuple[Profile, str | int]:
    """The profile and the budget that a first plan is made with."""
    if corrections == Corrections():
        return profile, mem
    budget = corrected_budget(budget_on(profile.cluster, mem or DEFAULT_BUDGET), corrections.memory)
    return corrected(profile, corrections), mem if corrections.memory == 1.0 else bytes_on(budget, "")


def steer(model: object, phased: PhasedPlan | None, settings: Adapt | None, profile: Profile | None) -> None:
    """Have a model train in phases, or adapt.

    Args:
        model: the model.
        phased: its plans.
        settings: of adapting.
        profile: of the model; needed for adapting.

    Raises:
        InputError: both, or a model whose plan does not change.
    """
    from galvatron_lite.runtime.adapt.monitor import Monitor
    from galvatron_lite.runtime.engine import ParallelModel

    if phased is None and settings is None:
        return
    if phased is not None and settings is not None:
        remedy = "A run in phases has the plans of its file: give adapt or a plan in phases."
        raise InputError("adapt", "with phases", remedy)
    if type(model) is not ParallelModel:
        remedy = "Plans change between steps that train in stages; not cyclic, with branches apart, or under DeepSpeed."
        raise InputError("adapt" if phased is None else "plan", type(model).__name__, remedy)
    parallel: ParallelModel = model
    if phased is not None:
        parallel.steering = Phases(parallel, phased)
    elif settings is not None and profile is not None:
        parallel.steering = Monitor(parallel, profile, settings, corrections=learnt(settings, profile))
