"""Compare plans of one model, all priced with the same profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby

from galvatron_lite.analysis.explanation import Buys, Compared, Comparison, LayerDifference
from galvatron_lite.analysis.step_time import account, explained_in_parts, price_in_parts
from galvatron_lite.cost.forward_only import for_mode
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.peers.plan_files import priced
from galvatron_lite.plans.describe import headline
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import profile_hash
from galvatron_lite.units import format_bytes, format_seconds

NO_LAYER = "–"  # strategy of a layer that a plan does not have


def compare_plans(plans: Mapping[str, Plan], profile: Profile, mem: str | int | None = None) -> Comparison:
    """Compare plans.

    Args:
        plans: two or more plans by name, for the profile's model and at most its devices.
        profile: what all plans are priced with.
        mem: memory budget a device; None: that of the first plan, or the default of ``evaluate``.
    """
    first = next(iter(plans.values()))
    if mem is None and first.provenance is not None and first.provenance.budget:
        mem = first.provenance.budget
    with_prediction = {name: priced(plan, profile, mem) for name, plan in plans.items()}
    compared = tuple(_compared(name, plans[name], plan, profile) for name, plan in with_prediction.items())
    provenance = with_prediction[next(iter(plans))].provenance
    return Comparison(
        model=profile.graph.name,
        basis=f"{profile.name}: {profile.origin.kind.value}, {profile.origin.source}",
        budget_bytes=0 if provenance is None else provenance.budget,
        plans=compared,
        layers=tuple(_differences(list(with_prediction.values()), profile)),
        buys=tuple(_buys(compared[0], other) for other in compared[1:]),
        notes=(*_notes(plans, profile), *_busiest_groups(compared)),
    )


def _compared(name: str, original: Plan, plan: Plan, profile: Profile) -> Compared:
    prediction = plan.prediction
    assert prediction is not None
    parts = None
    if explained_in_parts(plan):
        parts = account(price_in_parts(LayerPricer(for_mode(profile, plan.mode)), plan))
    return Compared(
        name=name,
        headline=headline(plan),
        devices=plan.devices,
        batch=plan.global_batch,
        microbatches=plan.microbatches,
        step_seconds=prediction.step_seconds,
        samples_per_second=prediction.samples_per_second,
        said_step_seconds=None if original.prediction is None else original.prediction.step_seconds,
        peak_bytes=prediction.peak_memory,
        fits=plan.fits,
        memory=max(plan.stages, key=lambda stage: stage.memory.total).memory,
        time={part.name: float(getattr(prediction.time, part.name)) for part in fields(prediction.time)},
        parts=parts,
        made_from="" if original.provenance is None else original.provenance.profile,
        notes=plan.provenance.notes if plan.provenance else (),
    )


def _differences(plans: Sequence[Plan], profile: Profile) -> Iterator[LayerDifference]:
    names = [layer.name for layer in profile.graph.layers]
    columns = [_strategies_by_layer(plan, names) for plan in plans]
    for row, group in groupby(names, key=lambda name: tuple(column.get(name, NO_LAYER) for column in columns)):
        layers = list(group)
        if len(set(row)) > 1:
            yield LayerDifference(layers[0], layers[-1], len(layers), row)


def _strategies_by_layer(plan: Plan, names: Sequence[str]) -> dict[str, str]:
    strategies: dict[str, str] = {}
    stages = [(f"stage {number}: ", stage.runs) for number, stage in enumerate(plan.stages)]
    if len(stages) == 1:
        stages = [("", stages[0][1])]
    for label, runs in (*stages, *((f"{branch.name}: ", branch.runs) for branch in plan.branches)):
        for run in runs:
            start = names.index(run.first)
            strategies |= dict.fromkeys(names[start : start + run.count], f"{label}{run.strategy}")
    return strategies


def _buys(first: Compared, other: Compared) -> Buys:
    seconds, size = other.step_seconds - first.step_seconds, other.peak_bytes - first.peak_bytes
    gain = other.samples_per_second / first.samples_per_second - 1.0
    time = _difference(seconds, format_seconds(abs(seconds)), " a step") or "takes as long a step"
    memory = _difference(size, format_bytes(abs(size))) or "takes as much memory"
    rate = f" ({gain:+.1%} samples/s)" if round(gain, 3) else ""
    sentence = f"{time}{rate} and {memory} on the fullest device"
    if not seconds and not size and not rate:
        sentence = "takes the same time and memory"
    return Buys(other.name, seconds, size, sentence)


def _difference(difference: float, amount: str, per: str = "") -> str:
    """``saves 3 ms a step`` or ``takes 3 ms a step more``; empty if there is no difference."""
    if not difference:
        return ""
    return f"saves {amount}{per}" if difference < 0 else f"takes {amount}{per} more"


def _notes(plans: Mapping[str, Plan], profile: Profile) -> Iterator[str]:
    """Which plans were made from another profile, and in what the plans cannot be compared."""
    digest = profile_hash(profile)
    for name, plan in plans.items():
        source = plan.provenance
        if source is None:
            yield f"{name}: written by hand, priced with {profile.name}"
        elif source.profile_hash != digest:
            yield f"{name}: made from {source.profile} ({source.profile_origin}), priced anew with {profile.name}"
    for what, values in (
        ("batches", {plan.global_batch for plan in plans.values()}),
        ("numbers of devices", {plan.devices for plan in plans.values()}),
        ("modes", {plan.mode.value for plan in plans.values()}),
    ):
        if len(values) > 1:
            yield f"the plans are of unlike {what} ({', '.join(map(str, sorted(values)))}): hold samples/s side by side"


def _busiest_groups(compared: Sequence[Compared]) -> Iterator[str]:
    """Note that the time by part is of different groups of devices."""
    groups = {plan.name: plan.parts.group for plan in compared if plan.parts is not None}
    if len(set(groups.values())) > 1:
        differences = ", ".join(f"group {group} of {name}" for name, group in groups.items())
        yield f"the parts of a step are those of the devices that work longest: {differences}"
