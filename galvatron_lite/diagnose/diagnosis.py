"""Compares a run, or traces of one, with its prediction; and corrects the profile by it.

In a corrected profile kinds of layers take the time that their layers took, the optimizer what it took; a slow rank
becomes a device of its own type, and a level of the cluster gets the time a byte takes with which predicted
communication equals the measured one (``runtime.monitor.correct`` does both). The rest stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import prod, sqrt
from pathlib import Path
from statistics import median
from typing import TypeVar

from galvatron_lite.analysis.step_time import explained_in_parts
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.communication import Links
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.step import device_memory
from galvatron_lite.diagnose.expected import GroupExpected, RankTimes, Where, expect, times_logged
from galvatron_lite.diagnose.findings import GLOO, NCCL, Cause, Finding, findings, runs_measured
from galvatron_lite.diagnose.traces import read_trace, times_of
from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import DeviceFigures, Origin, OriginKind, Profile
from galvatron_lite.profiler.store import read_profile
from galvatron_lite.runs.schema import PROFILE, CollectiveRecord, RecordedRun, is_run, read_run
from galvatron_lite.runtime.monitor.correct import corrected
from galvatron_lite.runtime.monitor.schema import Corrections, LinkFactor

_PASSES = {Collective.ALL_REDUCE: 2}
"""Times that (n - 1) / n of the bytes cross a link in a ring of n ranks, as NCCL's tests count; 1 of the others."""


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Collectives of one kind on one group, in a step."""

    collective: Collective
    ranks: tuple[int, ...]
    calls: float  # a step
    bytes: int  # of all of them, see ``CollectiveRecord``
    seconds: float  # of all of them on the rank that comes last, which waits for nobody
    predicted: float  # seconds that they take alone
    bandwidth: float  # bytes a second over each link of the ring (bus bandwidth)
    slowest: int  # rank that comes last
    waited: float  # seconds that the others wait for it, their mean


def collective_rows(records: Sequence[CollectiveRecord], profile: Profile) -> tuple[CollectiveRow, ...]:
    """Rows of the records of all ranks, those that take longest first; what waits for one rank is not transfer."""
    rows = list[CollectiveRow]()
    links, devices = Links(profile), profile.cluster.devices
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[CollectiveRecord]]] = {}
    for record in records:
        groups.setdefault((record.collective, record.ranks), {}).setdefault(record.rank, []).append(record)
    for (kind, ranks), members in groups.items():
        taken = {rank: _a_step(member, "seconds") for rank, member in members.items()}
        last = min(taken, key=taken.__getitem__)
        calls, size = (_a_step(members[last], name) for name in ("calls", "bytes"))
        count, collective = len(ranks), Collective(kind)
        others = [seconds - taken[last] for rank, seconds in taken.items() if rank != last]
        group = RankGroup(count, ranks[1] - ranks[0], max(devices // count, 1))
        call = Communication(collective, size / calls, group, Moment.STEP, overlaps=False)
        moved = _PASSES.get(collective, 1) * (count - 1) / count * size
        rows.append(CollectiveRow(
            collective, ranks, calls, round(size), taken[last], float(links.timed([call])[0]) * calls,
            moved / taken[last] if taken[last] else 0.0, last, sum(others) / max(len(others), 1),
        ))  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _a_step(records: Sequence[CollectiveRecord], name: str) -> float:
    """Mean of a figure in a step."""
    return float(sum(getattr(record, name) for record in records) / sum(record.steps for record in records))


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Memory of the devices of one place in the pipeline."""

    ranks: tuple[int, int]  # first and last
    measured: int  # peak bytes that the allocator of the fullest held
    predicted: int  # bytes, without the driver's context, which no allocator sees


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where a run and its prediction part ways."""

    source: str  # folder of the run
    steps: int  # that were looked at
    seconds: float  # of a step, measured
    predicted: float  # seconds of a step
    traced: bool  # whether it is from traces; else from the log
    # causes, those that cost most first; what is quicker than predicted last, without advice
    findings: tuple[Finding, ...]
    unexplained: float  # seconds of the difference that no cause holds
    memory: tuple[MemoryRow, ...] = ()  # of each group of devices; empty where it was not measured
    notes: tuple[str, ...] = ()  # what could not be looked at, and why
    # seconds of a step without the profiler, which makes steps slower; None: not from traces, or not known
    untraced: float | None = None
    collectives: tuple[CollectiveRow, ...] = ()  # in profiled steps; empty where none was


@dataclass(frozen=True, slots=True)
class DiagnosisInput:
    """What is diagnosed."""

    name: str  # folder or file
    run: RecordedRun | None  # the log; None: traces alone
    plan: Plan  # that was in force
    times: tuple[RankTimes, ...]  # of the ranks
    notes: tuple[str, ...] = ()  # what could not be looked at


def open_source(place: Path, plan: Plan | None = None) -> DiagnosisInput:
    """What a folder of a run, a trace, or a folder of traces holds."""
    if is_run(place):
        return _of_run(read_run(place))
    paths = [place] if place.is_file() else sorted(place.glob("*.json*")) if place.is_dir() else []
    if not paths:
        remedy = "Give the folder of auto_parallelize(..., log=FOLDER), a trace of torch.profiler, or a folder of them."
        raise FileFormatError("run", str(place), f"It holds no run and no trace. {remedy}")
    if plan is None:
        raise InputError("--plan", "none", "Traces by themselves do not say what was planned: give --plan PLAN.")
    return DiagnosisInput(str(place), None, plan, *_traced(paths))


def _of_run(run: RecordedRun) -> DiagnosisInput:
    """A run's traces where there are some, else its log."""
    notes = [f"{name}: its last line was cut off, and is left out." for name in run.torn]
    logged = [times_logged(records, run.plan.microbatches) for records in run.ranks if records]
    traces = list[Path]()
    for path in run.traces:  # those of ours that were made under the plan that was last in force; others as they are
        number = path.name.partition("-step-")[2].partition(".")[0]
        traces += [path] if not number.isdigit() or int(number) >= run.since else []
    if traces:
        times, more = _traced(traces)
        between = {one.rank: one.between for one in logged}
        times = tuple(replace(time_, between=between.get(time_.rank, 0.0)) for time_ in times)
        return DiagnosisInput(str(run.folder), run, run.plan, times, (*notes, *more))
    if not logged:
        remedy = "It ended before anything was measured: train some steps more."
        raise FileFormatError("run", str(run.folder), remedy)
    notes.append("No traces: layers' backward passes and communication inside layers are not told apart.")
    return DiagnosisInput(str(run.folder), run, run.plan, tuple(logged), tuple(notes))


def _traced(paths: Sequence[Path]) -> tuple[tuple[RankTimes, ...], tuple[str, ...]]:
    """Times of the traces, the last one of each rank, and what they lack."""
    by_rank = {one.rank: one for one in (times_of(read_trace(path)) for path in paths)}
    times = tuple(by_rank[rank] for rank in sorted(by_rank))
    if all(time_.layered and time_.parted for time_ in times):
        return times, ()
    return times, (
        "A trace without galvatron's ranges: layers and parts of a step are not told apart. Have it made by "
        "auto_parallelize(..., log=FOLDER, profile_steps=range(10, 13)).",
    )


def profile_beside(source: DiagnosisInput) -> Profile | None:
    """What the plan of a run was made from, as far as it lies beside the run."""
    path = None if source.run is None else source.run.folder / PROFILE
    return read_profile(path) if path is not None and path.is_file() else None


def diagnose(source: DiagnosisInput, profile: Profile) -> Diagnosis:
    """Compare a run with the prediction of its plan."""
    steps = max(time_.steps for time_ in source.times)
    if not explained_in_parts(source.plan):
        prediction = evaluate(profile, source.plan).prediction
        assert prediction is not None
        seconds, predicted = median(time_.seconds for time_ in source.times), prediction.step_seconds
        note = "Of plans with cyclic data parallelism or branches only whole steps are compared."
        notes = (*source.notes, note)
        return Diagnosis(source.name, steps, seconds, predicted, False, (), seconds - predicted, notes=notes)
    expected = expect(profile, source.plan)
    for time_ in source.times:
        if time_.rank >= expected.plan.devices:
            remedy = f"The plan is for {expected.plan.devices} ranks: give traces of its run."
            raise InputError("rank", time_.rank, remedy)
    causes = findings(source.times, expected, _backend(source, profile))
    parted = all(time_.layered and time_.parted for time_ in source.times)  # else host time is not told apart
    causes = [cause for cause in causes if parted or cause.cause is not Cause.HOST]
    seconds, traced = max(time_.seconds for time_ in source.times), any(time_.traced for time_ in source.times)
    return Diagnosis(
        source.name, steps, seconds, expected.seconds, traced, tuple(causes),
        seconds - expected.seconds - _explained(causes), _memory(source.run, expected.plan), source.notes,
        _untraced(source.run) if traced else None,
        () if source.run is None else collective_rows(source.run.collectives, profile),
    )  # fmt: skip


def _backend(source: DiagnosisInput, profile: Profile) -> str:
    """The backend of collectives: gloo on CPUs, by the devices of the run, or of the profile."""
    devices = [] if source.run is None else [device.name for device in source.run.header.devices]
    on_cpus = "cpu" in devices if devices else profile.cluster.device.name.startswith("CPU ")
    return GLOO if on_cpus else NCCL


def _untraced(run: RecordedRun | None) -> float | None:
    """Median seconds of a run's steps without the profiler; the first one warms up."""
    seconds = [] if run is None else [plan_step.seconds for plan_step in run.plan_steps[1:] if not plan_step.profiled]
    return median(seconds) if seconds else None


def _explained(causes: Sequence[Finding]) -> float:
    """Seconds that causes add up to: stages work side by side, so those of the stage with most of them count."""
    within = [cause for cause in causes if cause.cause is not Cause.BETWEEN]
    stages = {one.stage for one in within if one.stage >= 0}
    most = max((sum(one.seconds for one in within if one.stage == stage) for stage in stages), default=0.0)
    return most + sum(one.seconds for one in within if one.stage < 0)


def _memory(run: RecordedRun | None, plan: Plan) -> tuple[MemoryRow, ...]:
    if run is None:
        return ()
    peaks = {records[0].rank: max(record.reserved for record in records) for records in run.ranks if records}
    rows = []
    for number, memory in enumerate(device_memory(plan)):
        ranks = range(number * plan.stage_devices, (number + 1) * plan.stage_devices)
        most = max((peaks.get(rank, 0) for rank in ranks), default=0)
        if most:
            rows.append(MemoryRow((ranks.start, ranks.stop - 1), most, memory.tensors))
    return tuple(rows)


_LEAST, _MOST = 0.02, 1e4  # factors on the time a byte takes that are looked for
_ROUNDS = 40
_NEAR = 0.02  # relative difference below which nothing is corrected


def updated(profile: Profile, source: DiagnosisInput) -> tuple[Profile, tuple[str, ...]]:
    """The profile as it was measured, and the corrections in words."""
    expected = expect(profile, source.plan)
    slow = {finding.ranks[0]: finding for finding in findings(source.times, expected) if finding.cause is Cause.RANK}
    usual = [time_ for time_ in source.times if time_.rank not in slow] or list(source.times)
    pairs = [(one, expected.group_of(one.rank)) for one in usual]
    changes: list[str] = []
    new = _with_compute(profile, pairs, changes)
    new = _with_links(new, source.plan, usual, changes)
    if slow and profile.cluster.alike and profile.cluster.devices == source.plan.devices:
        factors = tuple(
            round(slow[rank].measured / slow[rank].predicted, 3) if rank in slow else 1.0
            for rank in range(source.plan.devices)
        )
        new = corrected(new, Corrections(devices=factors))
        changes += [f"rank {rank}: time x {factors[rank]:g}" for rank in slow]
    if not changes:
        raise InputError("--update", source.name, "Nothing differs from the profile by more than 2 %: it is right.")
    origin = Origin(
        OriginKind.MEASURED, f"{profile.origin.source}; corrected by run {source.name}",
        datetime.now(UTC).date().isoformat(), max(time_.steps for time_ in source.times),
    )  # fmt: skip
    return replace(new, origin=origin), tuple(changes)


Figures = TypeVar("Figures", Profile, DeviceFigures)
Pairs = Sequence[tuple[RankTimes, GroupExpected]]
"""Ranks, and what is expected of each."""


def _with_compute(profile: Profile, pairs: Pairs, changes: list[str]) -> Profile:
    """Scale the points of the kinds that were measured, and the optimizer, by measured over predicted times.

    A log has communication in the forward of layers, which cannot be separated: its kinds are only corrected where no
    communication is predicted in them; its backward is one factor on all kinds.
    """
    ratios: dict[str, dict[str, list[float]]] = {"forward": {}, "backward": {}}
    backward: list[float] = []
    for one, group in pairs:
        for run, direction, now, then in runs_measured(one, group):
            if then > 0 and now > 0 and (one.traced or not run.forward_communication):
                for kind in {layer.kind for layer in run.layers}:
                    ratios[direction].setdefault(kind, []).append(now / then)
        predicted = sum(run.backward + run.backward_communication for run in group.layers)
        if not one.traced and one.parted and predicted and not group.inside:
            backward.append(sum(one.backward.values()) / predicted)
    if backward:
        ratios["backward"] = dict.fromkeys(profile.graph.kinds, backward)
    ahead, back = _factors(ratios["forward"]), _factors(ratios["backward"])
    for kind in dict.fromkeys((*ahead, *back)):
        changes.append(f"{kind}: forward x {ahead.get(kind, 1.0):g}, backward x {back.get(kind, 1.0):g}")
    updates = [
        one.optimizer / group.optimizer for one, group in pairs if one.parted and one.optimizer and group.optimizer
    ]
    update = _factors({"optimizer": updates}).get("optimizer", 1.0)
    changes += [f"optimizer: x {update:g}"] if update != 1.0 else []

    def scaled(figures: Figures) -> Figures:
        layers = tuple(
            replace(
                point, forward=point.forward * ahead.get(point.kind, 1.0),
                backward=point.backward * back.get(point.kind, 1.0),
            )
            for point in figures.layers
        )  # fmt: skip
        cost = figures.optimizer
        item, tensor = cost.seconds_per_item * update, cost.seconds_per_tensor * update
        optimizer = replace(cost, seconds_per_item=item, seconds_per_tensor=tensor)
        return replace(figures, layers=layers, optimizer=optimizer)

    return replace(scaled(profile), types=tuple(scaled(figures) for figures in profile.types))


def _factors(ratios: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each, where it differs from 1."""
    factors = {kind: round(median(ratio), 4) for kind, ratio in ratios.items() if ratio}
    return {kind: factor for kind, factor in factors.items() if abs(factor - 1.0) > _NEAR}


def _with_links(profile: Profile, plan: Plan, times: Sequence[RankTimes], changes: list[str]) -> Profile:
    """Bring the predicted communication of levels to the measured one, the innermost first."""
    for where in (Where.LAYERS, Where.GRADIENTS):
        if where is Where.LAYERS and not all(time_.traced for time_ in times):
            continue
        level = _level(profile, plan, where)
        seconds = min((time_.exposed(where) for time_ in times if time_.parted), default=0.0)
        now = _communicated(profile, plan, where)
        if not level or not now or not seconds or abs(seconds / now - 1.0) <= _NEAR:
            continue
        factor = _solved(profile, plan, where, level, seconds)
        profile = corrected(profile, Corrections(links=(LinkFactor(level, factor),)))
        changes.append(f"level {level}: time a byte x {factor:g}, for {where.value}")
    return profile


def _level(profile: Profile, plan: Plan, where: Where) -> str:
    """The outermost level that the groups of such communication go over; empty: none."""
    strategies = [run.strategy for stage in plan.stages for run in stage.runs]
    reach = max(
        strategy.devices if where is Where.GRADIENTS else strategy.tensor * strategy.slices for strategy in strategies
    )
    if where is Where.LAYERS and any(
        strategy.zero_stage > 1 or strategy.context > 1 or strategy.expert > 1 for strategy in strategies
    ):
        reach = max(strategy.devices for strategy in strategies)
    crossed = [
        level.name
        for place, level in enumerate(profile.cluster.levels)
        if level.size > 1 and prod(below.size for below in profile.cluster.levels[:place]) < reach
    ]
    return crossed[-1] if crossed else ""


def _communicated(profile: Profile, plan: Plan, where: Where) -> float:
    """The least predicted communication of the groups of devices."""
    groups = expect(profile, plan).groups
    return min(group.inside if where is Where.LAYERS else group.gradients for group in groups)


def _solved(profile: Profile, plan: Plan, where: Where, level: str, seconds: float) -> float:
    """The factor on the time a byte takes over a level with which so much is predicted, by bisection."""
    low, high = _LEAST, _MOST
    for _ in range(_ROUNDS):
        middle = sqrt(low * high)
        tried = corrected(profile, Corrections(links=(LinkFactor(level, middle),)))
        low, high = (middle, high) if _communicated(tried, plan, where) < seconds else (low, middle)
        if high / low < 1.0005:
            break
    return round(sqrt(low * high), 3)
