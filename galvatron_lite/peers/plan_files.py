"""Predict the cost of existing plans: ours, written by hand, or of other software."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from galvatron_lite.cluster.budget import DEFAULT_BUDGET, budget_on
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.errors import InputError
from galvatron_lite.limits import SAMPLES, check_range
from galvatron_lite.parallelism.backends import DEEPSPEED_FILE, target_named
from galvatron_lite.peers.hetu.plan import UNNAMED, read_hetu_plan, to_plan
from galvatron_lite.plans.describe import layers_of_parts, plan_notes
from galvatron_lite.plans.export.tools import read_settings
from galvatron_lite.plans.schema import Mode, Plan, Proof
from galvatron_lite.plans.written import plan_from
from galvatron_lite.profiler.schema import Profile, spread_note
from galvatron_lite.search.pins import read_pins
from galvatron_lite.search.result import provenance


def any_plan(data: object, path: Path, profile: Profile, batch: int | None = None) -> Plan:
    """Parse the content of a file as a plan: ours, one written by hand (``plans.written``), or Hetu-Galvatron's.

    Args:
        data: the content.
        path: of the file, for errors.
        profile: of the model.
        batch: samples a step, if Hetu-Galvatron's file does not say.
    """
    if isinstance(data, Mapping) and ("tp_sizes_enc" in data or "global_tp_deg" in data):
        return to_plan(read_hetu_plan(dict(data), str(path), profile.cluster.devices, batch or 0), profile)
    try:
        return plan_from(data, profile.graph, str(path))
    except InputError as error:
        name = data.get("model") if isinstance(data, Mapping) else None
        if name in (None, profile.graph.name):
            raise
        models = f"The plan is of {name}, profile {profile.name} of {profile.graph.name}."
        remedy = f"{error.remedy} {models} Give --profile or --model of the plan's own model."
        raise InputError(error.field, error.value, remedy) from error


def priced_settings(
    path: Path, target: str, find: Callable[[str], Profile], mem: str | int | None = None, batch: int | None = None
) -> Plan:
    """Read settings of other software as a plan, and predict its cost under that software.

    Args:
        path: of the settings.
        target: name of the software.
        find: returns the profile of a software stack.
        mem: see ``priced``.
        batch: samples a step; by default those of the file.
    """
    stack = target_named(target).stack
    profile = find(stack)
    plan, reading = read_settings(path, target, profile.graph, profile.cluster.devices, batch)
    if reading.settings.deepspeed and stack != DEEPSPEED_FILE.stack:
        profile = find(DEEPSPEED_FILE.stack)
    plan = priced(plan, profile, mem, batch)
    assert plan.provenance is not None
    ignored = (f"not looked at: {', '.join(reading.ignored)}",) if reading.ignored else ()
    notes = (f"read: {', '.join(reading.read)}", *ignored, *reading.notes, *plan.provenance.notes)
    return replace(plan, provenance=replace(plan.provenance, notes=notes))


def _at_batch(plan: Plan, batch: int) -> Plan:
    """The plan at another batch, with another number of micro-batches of the same size."""
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
    """Raise ``InputError`` if a plan is not for ``gpus`` devices, or the cluster has fewer than the plan."""
    if gpus is not None and gpus != plan.devices:
        raise InputError("--gpus", gpus, f"The plan is for {plan.devices} devices: plan anew for {gpus}.")
    if plan.devices > profile.cluster.devices:
        remedy = f"Cluster {profile.cluster.name} has {profile.cluster.devices}."
        raise InputError("plan, devices", plan.devices, remedy)


def priced(plan: Plan, profile: Profile, mem: str | int | None = None, batch: int | None = None) -> Plan:
    """Predict the cost of a plan; its provenance names the profile, and notes differences from the plan.

    Args:
        plan: for the profile's model and at most its devices.
        profile: what layers and communication cost.
        mem: budget a device: a size, a share, or bytes; by default 95 % of its memory.
        batch: samples a step; by default the plan's.

    Raises:
        InputError: more devices than the cluster has, or a batch that the plan's micro-batches do not divide.
    """
    check_devices(plan, profile)
    changed = plan if batch is None else _at_batch(plan, batch)
    budget = budget_on(profile.cluster, DEFAULT_BUDGET if mem is None else mem)
    done = evaluate(profile, replace(changed, model=profile.graph.name, precision=profile.graph.precision))
    notes = (
        *_difference_notes(plan, changed, profile), *needs_notes(done, profile), *plan_notes(profile.graph, done),
        *spread_note(profile.origin),
    )  # fmt: skip
    source = replace(provenance(profile, budget, 0.0), proof=Proof.GIVEN, notes=notes)
    return replace(done, provenance=source, alternatives=(), left_out=())


def needs_notes(plan: Plan, profile: Profile) -> tuple[str, ...]:
    """Return a note if a plan breaks what its model needs to train like in one process (``Profile.needs``)."""
    graph, needs = profile.graph, profile.needs
    if plan.mode is not Mode.TRAINING or not needs.restrict:
        return ()
    fixed = read_pins(needs.fix, needs.forbid, graph).fixed
    runs = [[run for stage in plan.stages for run in stage.runs], *(branch.runs for branch in plan.branches)]
    keeps = all(
        fixed.at_layer(layer.name).allows(strategy)
        for part, layers in zip(runs, layers_of_parts(graph, plan), strict=True)
        for layer, strategy in zip(layers, [run.strategy for run in part for _ in range(run.count)], strict=True)
    )
    keeps &= fixed.pipeline in (None, len(plan.stages)) and not ("branches" in fixed.forbidden and plan.branches)
    keeps &= fixed.microbatches is None or (fixed.microbatches == plan.microbatches and plan.cyclic is None)
    if keeps:
        return ()
    return (f"auto_parallelize refuses this plan: {'; '.join(needs.reasons)} (check=False leaves this out)",)


def _difference_notes(plan: Plan, changed: Plan, profile: Profile) -> Iterator[str]:
    graph, cluster = profile.graph, profile.cluster
    if plan.global_batch != changed.global_batch:
        before = f"the plan is of batch {plan.global_batch} in {plan.microbatches} micro-batches"
        yield f"{before}, priced at {changed.global_batch} in {changed.microbatches}"
    if plan.model not in (graph.name, UNNAMED):
        yield f"the plan is of {plan.model}, priced for {graph.name}"
    if plan.precision != graph.precision:
        yield f"the plan is in {plan.precision}, priced in {graph.precision}"
    if plan.devices < cluster.devices:
        yield f"the plan takes {plan.devices} of the {cluster.devices} devices of {cluster.name}"
