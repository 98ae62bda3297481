"""Plans of one model side by side, all priced with one profile."""

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

NOWHERE = "–"  # A layer that a plan does not have


def compare_plans(plans: Mapping[str, Plan], profile: Profile, mem: str | int | None = None) -> Comparison:
    """Plans side by side.

    Args:
        plans: by name; two or more, of the profile's model and at most its devices.
        profile: what all are priced with.
        mem: budget a device that all are held against; None: the first one's own, else that of ``evaluate``.
    """
    first = next(iter(plans.values()))
    if mem is None and first.provenance is not None and first.provenance.budget:
        mem = first.provenance.budget
    done = {name: priced(plan, profile, mem) for name, plan in plans.items()}
    compared = tuple(_compared(name, plans[name], plan, profile) for name, plan in done.items())
    budget = next(iter(done.values())).provenance
    return Comparison(
        model=profile.graph.name,
        basis=f"{profile.name}: {profile.origin.kind.value}, {profile.origin.source}",
        budget_bytes=0 if budget is None else budget.budget,
        plans=compared,
        layers=tuple(_differences(list(done.values()), profile)),
        buys=tuple(_buys(compared[0], other) for other in compared[1:]),
        notes=(*_notes(plans, profile), *_other_groups(compared)),
    )


def _other_groups(compared: Sequence[Compared]) -> Iterator[str]:
    """Where the parts of the steps are those of different groups of devices: of each plan, of its busiest one."""
    groups = {one.name: one.parts.group for one in compared if one.parts is not None}
    if len(set(groups.values())) > 1:
        differences = ", ".join(f"group {group} of {name}" for name, group in groups.items())
        yield f"the parts of a step are those of the devices that work longest: {differences}"


def _compared(name: str, original: Plan, plan: Plan, profile: Profile) -> Compared:
    prediction = plan.prediction
    assert prediction is not None
    fullest = max(plan.stages, key=lambda stage: stage.memory.total)
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
        memory=fullest.memory,
        time={part.name: float(getattr(prediction.time, part.name)) for part in fields(prediction.time)},
        parts=parts,
        made_from="" if original.provenance is None else original.provenance.profile,
        notes=plan.provenance.notes if plan.provenance else (),
    )


def _notes(plans: Mapping[str, Plan], profile: Profile) -> Iterator[str]:
    """Where plans were made from something else than what they are priced with, or are of unlike batches or devices."""
    digest = profile_hash(profile)
    for name, plan in plans.items():
        made_from = plan.provenance
        if made_from is None:
            yield f"{name}: written by hand, priced with {profile.name}"
        elif made_from.profile_hash != digest:
            yield f"{name}: made from {made_from.profile} ({made_from.profile_origin}), priced anew with {profile.name}"
    for what, values in (
        ("batches", {plan.global_batch for plan in plans.values()}),
        ("numbers of devices", {plan.devices for plan in plans.values()}),
        ("modes", {plan.mode.value for plan in plans.values()}),
    ):
        if len(values) > 1:
            yield f"the plans are of unlike {what} ({', '.join(map(str, sorted(values)))}): hold samples/s side by side"


def _buys(first: Compared, other: Compared) -> Buys:
    seconds, size = other.step_seconds - first.step_seconds, other.peak_bytes - first.peak_bytes
    gain = other.samples_per_second / first.samples_per_second - 1.0
    change = _more(seconds, format_seconds(abs(seconds)), " a step", "takes as long a step")
    held = _more(size, format_bytes(abs(size)), "", "takes as much memory")
    rate = f" ({gain:+.1%} samples/s)" if round(gain, 3) else ""
    sentence = f"{change}{rate} and {held} on the fullest device"
    if not seconds and not size and not rate:
        sentence = "takes the same time and memory"
    return Buys(other.name, seconds, size, sentence)


def _more(difference: float, words: str, per: str, same: str) -> str:
    """``saves 3 ms a step``, ``takes 3 ms a step more``, or what to say where there is no difference."""
    if not difference:
        return same
    return f"saves {words}{per}" if difference < 0 else f"takes {words}{per} more"


def _differences(plans: Sequence[Plan], profile: Profile) -> Iterator[LayerDifference]:
    names = [layer.name for layer in profile.graph.layers]
    columns = [_by_layer(plan, names) for plan in plans]
    rows = [tuple(column.get(name, NOWHERE) for column in columns) for name in names]
    for row, group in groupby(zip(names, rows, strict=True), key=lambda pair: pair[1]):
        numbers = [name for name, _ in group]
        if len(set(row)) > 1:
            yield LayerDifference(numbers[0], numbers[-1], len(numbers), row)


def _by_layer(plan: Plan, names: Sequence[str]) -> dict[str, str]:
    strategies: dict[str, str] = {}
    several = len(plan.stages) > 1
    places = [(f"stage {number}: " if several else "", stage.runs) for number, stage in enumerate(plan.stages)]
    for label, runs in (*places, *((f"{branch.name}: ", branch.runs) for branch in plan.branches)):
        for run in runs:
            start = names.index(run.first)
            strategies |= dict.fromkeys(names[start : start + run.count], f"{label}{run.strategy}")
    return strategies
