"""A profile as a run has shown it to be. No torch here.

Kinds of layers take the time that their layers took, the optimizer what it took; a rank that is slower than others
becomes a device of its own type, and a level of the cluster gets the time a byte takes with which the predicted
communication is the measured one (``runtime.adapt.correct`` does both). What was not measured stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import prod, sqrt
from statistics import median

from galvatron_lite.diagnose.diagnosis import Source
from galvatron_lite.diagnose.expected import GroupExpected, expect
from galvatron_lite.diagnose.findings import Cause, findings, runs_measured
from galvatron_lite.diagnose.times import RankTimes, Where
from galvatron_lite.errors import InputError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import DeviceFigures, LayerPoint, OptimizerCost, Origin, OriginKind, Profile
from galvatron_lite.runtime.adapt.correct import corrected
from galvatron_lite.runtime.adapt.schema import Corrections, LinkFactor

_LEAST, _MOST = 0.02, 1e4
"""Factors on the time a byte takes that are looked for."""
_ROUNDS = 40
_NEAR = 0.02
"""Relative difference below which nothing is corrected."""


def updated(profile: Profile, source: Source) -> tuple[Profile, tuple[str, ...]]:
    """The profile as it was measured to be, and what was changed of it, in words.

    Args:
        profile: what the run was planned from.
        source: the run.

    Raises:
        InputError: nothing of the profile was measured, or a kind of plan whose time is not told apart.
    """
    expected = expect(profile, source.plan)
    slow = {one.ranks[0]: one for one in findings(source.times, expected) if one.cause is Cause.RANK}
    usual = [one for one in source.times if one.rank not in slow] or list(source.times)
    said: list[str] = []
    found = _with_layers(profile, source.plan, usual, said)
    found = _with_optimizer(found, source.plan, usual, said)
    found = _with_links(found, source.plan, usual, said)
    if slow and profile.cluster.alike and profile.cluster.devices == source.plan.devices:
        factors = tuple(
            round(slow[rank].measured / slow[rank].predicted, 3) if rank in slow else 1.0
            for rank in range(source.plan.devices)
        )
        found = corrected(found, Corrections(devices=factors))
        said += [f"rank {rank}: time x {factors[rank]:g}" for rank in slow]
    if not said:
        raise InputError("--update", source.name, "Nothing differs from the profile by more than 2 %: it is right.")
    origin = Origin(
        OriginKind.MEASURED, f"{profile.origin.source}; corrected by run {source.name}",
        datetime.now(UTC).date().isoformat(), max(one.steps for one in source.times),
    )  # fmt: skip
    return replace(found, origin=origin), tuple(said)


def _groups(profile: Profile, plan: Plan, times: Sequence[RankTimes]) -> Iterable[tuple[RankTimes, GroupExpected]]:
    expected = expect(profile, plan)
    return [(one, expected.group_of(one.rank)) for one in times]


def _with_layers(profile: Profile, plan: Plan, times: Sequence[RankTimes], said: list[str]) -> Profile:
    """Points of the kinds that were measured, times measured over predicted.

    A log has communication in the forward of layers, which cannot be taken out: its kinds are only corrected where
    nothing is predicted to be communicated in them; its backward is one factor on all kinds.
    """
    forward, backward = dict[str, list[float]](), dict[str, list[float]]()
    whole: list[float] = []
    for one, group in _groups(profile, plan, times):
        for run, way, now, then in runs_measured(one, group):
            plain = one.traced or not run.forward_communication
            if then > 0 and now > 0 and plain:
                for kind in set(run.kinds):
                    (forward if way == "forward" else backward).setdefault(kind, []).append(now / then)
        predicted = sum(run.backward + run.backward_communication for run in group.layers)
        if not one.traced and one.parted and predicted and not group.inside:
            whole.append(sum(one.backward.values()) / predicted)
    if whole:
        backward = dict.fromkeys(profile.graph.kinds, whole)
    ahead, back = _factors(forward), _factors(backward)
    for kind in dict.fromkeys((*ahead, *back)):
        said.append(f"{kind}: forward x {ahead.get(kind, 1.0):g}, backward x {back.get(kind, 1.0):g}")
    if not ahead and not back:
        return profile

    def scaled(points: Sequence[LayerPoint]) -> tuple[LayerPoint, ...]:
        return tuple(
            replace(
                point, forward=point.forward * ahead.get(point.kind, 1.0),
                backward=point.backward * back.get(point.kind, 1.0),
            )
            for point in points
        )  # fmt: skip

    types = tuple(replace(one, layers=scaled(one.layers)) for one in profile.types)
    return replace(profile, layers=scaled(profile.layers), types=types)


def _factors(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each, where it is another one than 1."""
    factors = {kind: round(median(ratios), 4) for kind, ratios in found.items()}
    return {kind: factor for kind, factor in factors.items() if abs(factor - 1.0) > _NEAR}


def _with_optimizer(profile: Profile, plan: Plan, times: Sequence[RankTimes], said: list[str]) -> Profile:
    ratios = [
        one.optimizer / group.optimizer
        for one, group in _groups(profile, plan, times)
        if one.parted and one.optimizer and group.optimizer
    ]
    factor = _factors({"optimizer": ratios}).get("optimizer") if ratios else None
    if factor is None:
        return profile
    said.append(f"optimizer: x {factor:g}")

    def scaled(cost: OptimizerCost) -> OptimizerCost:
        return replace(
            cost, seconds_per_item=cost.seconds_per_item * factor, seconds_per_tensor=cost.seconds_per_tensor * factor
        )

    types: tuple[DeviceFigures, ...] = tuple(replace(one, optimizer=scaled(one.optimizer)) for one in profile.types)
    return replace(profile, optimizer=scaled(profile.optimizer), types=types)


def _with_links(profile: Profile, plan: Plan, times: Sequence[RankTimes], said: list[str]) -> Profile:
    """Levels on which the predicted communication is brought to the measured one, the innermost first."""
    found = profile
    for where in (Where.LAYERS, Where.GRADIENTS):
        if where is Where.LAYERS and not all(one.traced for one in times):
            continue
        level = _level(profile, plan, where)
        seconds = min((one.exposed(where) for one in times if one.parted), default=0.0)
        now = _communicated(found, plan, where)
        if not level or not now or not seconds or abs(seconds / now - 1.0) <= _NEAR:
            continue
        factor = _solved(found, plan, where, level, seconds)
        found = corrected(found, Corrections(links=(LinkFactor(level, factor),)))
        said.append(f"level {level}: time a byte x {factor:g}, for {where.value}")
    return found


def _level(profile: Profile, plan: Plan, where: Where) -> str:
    """The outermost level that the groups of such communication go over; empty: none."""
    strategies = [run.strategy for stage in plan.stages for run in stage.runs]
    reach = max(one.devices if where is Where.GRADIENTS else one.tensor * one.slices for one in strategies)
    if where is Where.LAYERS and any(one.zero_stage > 1 or one.context > 1 or one.expert > 1 for one in strategies):
        reach = max(one.devices for one in strategies)
    crossed = [
        level.name
        for place, level in enumerate(profile.cluster.levels)
        if level.size > 1 and prod(below.size for below in profile.cluster.levels[:place]) < reach
    ]
    return crossed[-1] if crossed else ""


def _communicated(profile: Profile, plan: Plan, where: Where) -> float:
    """The least of what the groups of devices are predicted to wait for."""
    groups = expect(profile, plan).groups
    return min(group.inside if where is Where.LAYERS else group.gradients for group in groups)


def _solved(profile: Profile, plan: Plan, where: Where, level: str, seconds: float) -> float:
    """The factor on the time a byte takes over a level with which so much is predicted; halving an interval."""
    low, high = _LEAST, _MOST
    for _ in range(_ROUNDS):
        middle = sqrt(low * high)
        tried = corrected(profile, Corrections(links=(LinkFactor(level, middle),)))
        low, high = (middle, high) if _communicated(tried, plan, where) < seconds else (low, middle)
        if high / low < 1.0005:
            break
    return round(sqrt(low * high), 3)
