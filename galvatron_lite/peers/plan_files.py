"""Prices plans that somebody gives: ours, written by hand, or of another planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from galvatron_lite.cluster.budget import DEFAULT_BUDGET, budget_on
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.errors import InputError
from galvatron_lite.limits import SAMPLES, check_range
from galvatron_lite.parallelism.backends import DEEPSPEED_FILE, target_named
from galvatron_lite.peers.hetu.plan import UNNAMED, read_hetu_plan, to_plan
from galvatron_lite.plans.describe import plan_notes
from galvatron_lite.plans.export.tools import read_settings
from galvatron_lite.plans.schema import Plan, Proof
from galvatron_lite.plans.written import plan_from
from galvatron_lite.profiler.schema import Profile, spread_note
from galvatron_lite.search.result import provenance


def any_plan(data: object, path: Path, profile: Profile, batch: int | None = None) -> Plan:
    """A plan from what a file holds: ours, one written by hand (``plans.written``), or Hetu-Galvatron's."""
    if isinstance(data, Mapping) and ("tp_sizes_enc" in data or "global_tp_deg" in data):
        return to_plan(read_hetu_plan(dict(data), str(path), profile.cluster.devices, batch or 0), profile)
    try:
        return plan_from(data, profile.graph, str(path))
    except InputError as error:
        name = data.get("model") if isinstance(data, Mapping) else None
        if name in (None, profile.graph.name):
            raise
        other = f"The plan is of {name}, profile {profile.name} of {profile.graph.name}."
        other = f"{other} Give --profile or --model of the plan's own model."
        raise InputError(error.field, error.value, f"{error.remedy} {other}") from error


def priced_settings(
    path: Path, target: str, find: Callable[[str], Profile], mem: str | int | None = None, batch: int | None = None
) -> Plan:
    """A plan from another tool's settings with its prediction, priced as that software runs it.

    Args:
        path: of the settings.
        target: whose.
        find: the profile of a stack.
        mem: see ``priced``.
        batch: samples a step, where the file does not say, or where they are to be others.
    """
    stack = target_named(target).stack
    settings = find(stack)
    plan, reading = read_settings(path, target, settings.graph, settings.cluster.devices, batch)
    if reading.settings.deepspeed and stack != DEEPSPEED_FILE.stack:
        settings = find(DEEPSPEED_FILE.stack)
    done = priced(plan, settings, mem, batch)
    assert done.provenance is not None
    ignored = (f"not looked at: {', '.join(reading.ignored)}",) if reading.ignored else ()
    notes = (f"read: {', '.join(reading.read)}", *ignored, *reading.notes, *done.provenance.notes)
    return replace(done, provenance=replace(done.provenance, notes=notes))


def _at_batch(plan: Plan, batch: int) -> Plan:
    """The plan at another number of samples a step: as many micro-batches of the same size as make it up."""
    if batch == plan.global_batch:
        return plan
    check_range("--batch", batch, SAMPLES)
    if plan.cyclic is not None:
        if batch % plan.microbatches:
            raise InputError("--batch", batch, f"The plan has {plan.microbatches} micro-batches: give a multiple.")
        return replace(plan, global_batch=batch)
    if batch % plan.microbatch:
        remedy = f"The plan's micro-batches have {plan.microbatch} samples: give a multiple of that."
        raise InputError("--batch", batch, remedy)
    return replace(plan, global_batch=batch, microbatches=batch // plan.microbatch)


def check_devices(plan: Plan, profile: Profile, gpus: int | None = None) -> None:
    """Whether a cluster has the devices that a plan is made for."""
    if gpus is not None and gpus != plan.devices:
        raise InputError("--gpus", gpus, f"The plan is for {plan.devices} devices: plan anew for {gpus}.")
    if plan.devices > profile.cluster.devices:
        remedy = f"Cluster {profile.cluster.name} has {profile.cluster.devices}."
        raise InputError("plan, devices", plan.devices, remedy)


def _notes_of(plan: Plan, at: Plan, profile: Profile) -> tuple[str, ...]:
    graph, cluster = profile.graph, profile.cluster
    notes = (
        (plan.global_batch != at.global_batch,
         f"the plan is of batch {plan.global_batch} in {plan.microbatches} micro-batches, "
         f"priced at {at.global_batch} in {at.microbatches}"),
        (plan.model not in (graph.name, UNNAMED), f"the plan is of {plan.model}, priced for {graph.name}"),
        (plan.precision != graph.precision, f"the plan is in {plan.precision}, priced in {graph.precision}"),
        (plan.devices < cluster.devices,
         f"the plan takes {plan.devices} of the {cluster.devices} devices of {cluster.name}"),
    )  # fmt: skip
    return tuple(line for holds, line in notes if holds)


def priced(plan: Plan, profile: Profile, mem: str | int | None = None, batch: int | None = None) -> Plan:
    """The plan with its prediction, and what it was priced with.

    Args:
        plan: for the profile's model and at most its devices.
        profile: what layers and communication cost.
        mem: budget a device to compare its memory with: a size, a share, or bytes; 95 % of its memory if not given.
        batch: samples a step, where they are to be others than the plan's.
    """
    check_devices(plan, profile)
    at = plan if batch is None else _at_batch(plan, batch)
    budget = budget_on(profile.cluster, DEFAULT_BUDGET if mem is None else mem)
    done = evaluate(profile, replace(at, model=profile.graph.name, precision=profile.graph.precision))
    notes = (*_notes_of(plan, at, profile), *plan_notes(profile.graph, done), *spread_note(profile.origin))
    made_from = replace(provenance(profile, budget, 0.0), proof=Proof.GIVEN, notes=notes)
    return replace(done, provenance=made_from, alternatives=(), left_out=())
