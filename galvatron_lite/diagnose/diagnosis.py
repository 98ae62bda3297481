"""Compares a run, or traces of a run, with its prediction, and corrects the profile by the run.

A corrected profile has the measured times of layers and optimizer. A slow rank becomes a separate type of device, and
the bandwidth of a level is changed until predicted communication equals the measured one (both by
``runtime.monitor.correct``). All else stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import sqrt
from pathlib import Path
from statistics import median
from typing import TypeVar

from galvatron_lite.analysis.step_time import explained_in_parts
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.communication import Links
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.step import device_memory
from galvatron_lite.diagnose.expected import ExpectedGroup, RankTimes, WaitPlace, expect, times_from_log
from galvatron_lite.diagnose.findings import GLOO, NCCL, Cause, Finding, findings, measured_runs
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
"""How often (n - 1) / n of the bytes cross a link in a ring of n ranks, as NCCL's tests count; else once."""


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Collectives of one kind on one group, in a step."""

    collective: Collective
    ranks: tuple[int, ...]
    calls: float  # calls in a step
    bytes: int  # bytes of all calls, see ``CollectiveRecord``
    seconds: float  # seconds of all calls on the rank that arrives last, which waits for nobody
    predicted: float  # predicted seconds of all calls alone
    bandwidth: float  # bytes a second over each link of the ring (bus bandwidth)
    slowest: int  # the rank that arrives last
    waited: float  # mean seconds that the others wait for it


def collective_rows(records: Sequence[CollectiveRecord], profile: Profile) -> tuple[CollectiveRow, ...]:
    """Return the rows of the records of all ranks, those that take longest first."""
    rows = list[CollectiveRow]()
    links, devices = Links(profile), profile.cluster.devices
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[CollectiveRecord]]] = {}
    for record in records:
        groups.setdefault((record.collective, record.ranks), {}).setdefault(record.rank, []).append(record)
    for (kind, ranks), members in groups.items():
        taken = {rank: _mean_per_step(member, "seconds") for rank, member in members.items()}
        last = min(taken, key=taken.__getitem__)
        calls, size = (_mean_per_step(members[last], name) for name in ("calls", "bytes"))
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


def _mean_per_step(records: Sequence[CollectiveRecord], name: str) -> float:
    """Return the mean of a field of records for each step."""
    return float(sum(getattr(record, name) for record in records) / sum(record.steps for record in records))


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Memory of the devices of one group of stages."""

    ranks: tuple[int, int]  # first and last
    measured: int  # peak bytes of the allocator on the fullest device
    predicted: int  # bytes without the driver's context, which the allocator does not count


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The differences between a run and its prediction."""

    source: str  # folder of the run
    steps: int  # steps with measurements
    seconds: float  # measured seconds of a step
    predicted: float  # predicted seconds of a step
    traced: bool  # whether the times are from traces rather than from the log
    findings: tuple[Finding, ...]  # the most expensive first; those quicker than predicted last, without advice
    unexplained: float  # seconds of the difference without a cause
    memory: tuple[MemoryRow, ...] = ()  # of each group of devices; empty if it was not measured
    notes: tuple[str, ...] = ()  # what could not be examined, and why
    untraced: float | None = None  # seconds of a step without the profiler, which slows steps down; None: unknown
    collectives: tuple[CollectiveRow, ...] = ()  # of profiled steps


@dataclass(frozen=True, slots=True)
class DiagnosisInput:
    """A run to diagnose."""

    name: str  # folder or file
    run: RecordedRun | None  # the log; None: traces only
    plan: Plan  # the last plan of the run
    times: tuple[RankTimes, ...]  # one for each rank
    notes: tuple[str, ...] = ()  # what could not be examined


def open_source(path: Path, plan: Plan | None = None) -> DiagnosisInput:
    """Read the folder of a run, a trace, or a folder of traces.

    Raises:
        FileFormatError: no run and no trace.
        InputError: traces without a plan.
    """
    if is_run(path):
        return _from_run(read_run(path))
    traces = [path] if path.is_file() else sorted(path.glob("*.json*")) if path.is_dir() else []
    if not traces:
        remedy = "Give the folder of auto_parallelize(..., log=FOLDER), a trace of torch.profiler, or a folder of them."
        raise FileFormatError("run", str(path), f"It holds no run and no trace. {remedy}")
    if plan is None:
        raise InputError("--plan", "none", "Traces by themselves do not say what was planned: give --plan PLAN.")
    return DiagnosisInput(str(path), None, plan, *_read_traces(traces))


def _from_run(run: RecordedRun) -> DiagnosisInput:
    """Read the traces of a run, or its log if there are none."""
    notes = [f"{name}: its last line was cut off, and is left out." for name in run.torn]
    logged = [times_from_log(records, run.plan.microbatches) for records in run.ranks if records]
    traces = list[Path]()
    for path in run.traces:  # skip our traces of earlier plans, whose step is in their name
        step = path.name.partition("-step-")[2].partition(".")[0]
        traces += [path] if not step.isdigit() or int(step) >= run.since else []
    if traces:
        times, more = _read_traces(traces)
        between = {rank_times.rank: rank_times.between for rank_times in logged}
        times = tuple(replace(rank_times, between=between.get(rank_times.rank, 0.0)) for rank_times in times)
        return DiagnosisInput(str(run.folder), run, run.plan, times, (*notes, *more))
    if not logged:
        remedy = "It ended before anything was measured: train some steps more."
        raise FileFormatError("run", str(run.folder), remedy)
    notes.append("No traces: layers' backward passes and communication inside layers are not told apart.")
    return DiagnosisInput(str(run.folder), run, run.plan, tuple(logged), tuple(notes))


def _read_traces(paths: Sequence[Path]) -> tuple[tuple[RankTimes, ...], tuple[str, ...]]:
    """Return the times of the last trace of each rank, and a note if they are not by layer and part."""
    by_rank = {times.rank: times for times in (times_of(read_trace(path)) for path in paths)}
    times = tuple(by_rank[rank] for rank in sorted(by_rank))
    if all(rank_times.has_layers and rank_times.has_parts for rank_times in times):
        return times, ()
    return times, (
        "A trace without galvatron's ranges: layers and parts of a step are not told apart. Have it made by "
        "auto_parallelize(..., log=FOLDER, profile_steps=range(10, 13)).",
    )


def profile_beside(source: DiagnosisInput) -> Profile | None:
    """Return the profile that is stored with a run; None if there is none."""
    path = None if source.run is None else source.run.folder / PROFILE
    return read_profile(path) if path is not None and path.is_file() else None


def diagnose(source: DiagnosisInput, profile: Profile) -> Diagnosis:
    """Compare a run with the prediction of its plan.

    Raises:
        InputError: traces of more ranks than the plan has.
    """
    steps = max(times.steps for times in source.times)
    if not explained_in_parts(source.plan):
        prediction = evaluate(profile, source.plan).prediction
        assert prediction is not None
        seconds, predicted = median(times.seconds for times in source.times), prediction.step_seconds
        note = "Of plans with cyclic data parallelism or branches only whole steps are compared."
        notes = (*source.notes, note)
        return Diagnosis(source.name, steps, seconds, predicted, False, (), seconds - predicted, notes=notes)
    expected = expect(profile, source.plan)
    for times in source.times:
        if times.rank >= expected.plan.devices:
            remedy = f"The plan is for {expected.plan.devices} ranks: give traces of its run."
            raise InputError("rank", times.rank, remedy)
    causes = findings(source.times, expected, _backend(source, profile))
    if not all(times.has_layers and times.has_parts for times in source.times):  # host time is not separate
        causes = [cause for cause in causes if cause.cause is not Cause.HOST]
    seconds, traced = max(times.seconds for times in source.times), any(times.traced for times in source.times)
    return Diagnosis(
        source.name, steps, seconds, expected.seconds, traced, tuple(causes),
        seconds - expected.seconds - _explained_seconds(causes), _memory(source.run, expected.plan), source.notes,
        _untraced(source.run) if traced else None,
        () if source.run is None else collective_rows(source.run.collectives, profile),
    )  # fmt: skip


def _backend(source: DiagnosisInput, profile: Profile) -> str:
    """Return the backend of collectives by the devices of the run, or of the profile: gloo on CPUs."""
    devices = [] if source.run is None else [device.name for device in source.run.header.devices]
    on_cpus = "cpu" in devices if devices else profile.cluster.device.name.startswith("CPU ")
    return GLOO if on_cpus else NCCL


def _untraced(run: RecordedRun | None) -> float | None:
    """Return the median seconds of a run's steps without the profiler, except the first one."""
    seconds = [] if run is None else [plan_step.seconds for plan_step in run.plan_steps[1:] if not plan_step.profiled]
    return median(seconds) if seconds else None


def _explained_seconds(causes: Sequence[Finding]) -> float:
    """Return the sum of causes; of stages, which run in parallel, only the one with the largest sum counts."""
    within = [cause for cause in causes if cause.cause is not Cause.BETWEEN]
    stages = {cause.stage for cause in within if cause.stage >= 0}
    most = max((sum(cause.seconds for cause in within if cause.stage == stage) for stage in stages), default=0.0)
    return most + sum(cause.seconds for cause in within if cause.stage < 0)


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


_LEAST, _MOST = 0.02, 1e4  # bounds of the factor on the time of a byte
_ROUNDS = 40
_TOLERANCE = 0.02  # relative difference below which nothing is corrected


def correct_profile(profile: Profile, source: DiagnosisInput) -> tuple[Profile, tuple[str, ...]]:
    """Correct a profile by a run; return it with the corrections in words.

    Raises:
        InputError: there is nothing to correct.
    """
    expected = expect(profile, source.plan)
    slow = {finding.ranks[0]: finding for finding in findings(source.times, expected) if finding.cause is Cause.RANK}
    usual = [times for times in source.times if times.rank not in slow] or list(source.times)
    pairs = [(times, expected.group_of(times.rank)) for times in usual]
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
        datetime.now(UTC).date().isoformat(), max(times.steps for times in source.times),
    )  # fmt: skip
    return replace(new, origin=origin), tuple(changes)


Figures = TypeVar("Figures", Profile, DeviceFigures)
Pairs = Sequence[tuple[RankTimes, ExpectedGroup]]
"""Measured and expected times of ranks."""


def _with_compute(profile: Profile, pairs: Pairs, changes: list[str]) -> Profile:
    """Scale the points of measured kinds, and the optimizer, by measured over predicted times.

    Forward times of layers in a log include communication, so that kinds are corrected only if none is predicted in
    them; backward of a log is one factor on all kinds.
    """
    ratios: dict[str, dict[str, list[float]]] = {"forward": {}, "backward": {}}
    backward_ratios, update_ratios = list[float](), list[float]()
    for times, group in pairs:
        for run, direction, measured, predicted in measured_runs(times, group):
            if predicted > 0 and measured > 0 and (times.traced or not run.forward_communication):
                for kind in {layer.kind for layer in run.layers}:
                    ratios[direction].setdefault(kind, []).append(measured / predicted)
        total = sum(run.backward + run.backward_communication for run in group.layers)
        if not times.traced and times.has_parts and total and not group.inside:
            backward_ratios.append(sum(times.backward.values()) / total)
        if times.has_parts and times.optimizer and group.optimizer:
            update_ratios.append(times.optimizer / group.optimizer)
    if backward_ratios:
        ratios["backward"] = dict.fromkeys(profile.graph.kinds, backward_ratios)
    forward, backward = _factors(ratios["forward"]), _factors(ratios["backward"])
    for kind in dict.fromkeys((*forward, *backward)):
        changes.append(f"{kind}: forward x {forward.get(kind, 1.0):g}, backward x {backward.get(kind, 1.0):g}")
    update = _factors({"optimizer": update_ratios}).get("optimizer", 1.0)
    changes += [f"optimizer: x {update:g}"] if update != 1.0 else []

    def scaled(figures: Figures) -> Figures:
        layers = tuple(
            replace(
                point, forward=point.forward * forward.get(point.kind, 1.0),
                backward=point.backward * backward.get(point.kind, 1.0),
            )
            for point in figures.layers
        )  # fmt: skip
        cost = figures.optimizer
        item, tensor = cost.seconds_per_item * update, cost.seconds_per_tensor * update
        optimizer = replace(cost, seconds_per_item=item, seconds_per_tensor=tensor)
        return replace(figures, layers=layers, optimizer=optimizer)

    return replace(scaled(profile), types=tuple(scaled(figures) for figures in profile.types))


def _factors(ratios: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the medians that differ from 1."""
    factors = {kind: round(median(ratio), 4) for kind, ratio in ratios.items() if ratio}
    return {kind: factor for kind, factor in factors.items() if abs(factor - 1.0) > _TOLERANCE}


def _with_links(profile: Profile, plan: Plan, times: Sequence[RankTimes], changes: list[str]) -> Profile:
    """Correct the levels for communication inside layers, then for gradients, by the measured seconds."""
    for where in (WaitPlace.LAYERS, WaitPlace.GRADIENTS):
        if where is WaitPlace.LAYERS and not all(rank_times.traced for rank_times in times):
            continue
        level = _outermost_level(profile, plan, where)
        seconds = min((rank_times.exposed(where) for rank_times in times if rank_times.has_parts), default=0.0)
        predicted = _predicted_communication(profile, plan, where)
        if not level or not predicted or not seconds or abs(seconds / predicted - 1.0) <= _TOLERANCE:
            continue
        factor = _fit_link_factor(profile, plan, where, level, seconds)
        profile = corrected(profile, Corrections(links=(LinkFactor(level, factor),)))
        changes.append(f"level {level}: time a byte x {factor:g}, for {where.value}")
    return profile


def _outermost_level(profile: Profile, plan: Plan, where: WaitPlace) -> str:
    """Return the outermost level that the groups of such communication cross; empty if there is none."""
    strategies = [run.strategy for stage in plan.stages for run in stage.runs]
    reach = max(
        strategy.devices if where is WaitPlace.GRADIENTS else strategy.tensor * strategy.slices
        for strategy in strategies
    )
    if where is WaitPlace.LAYERS and any(
        strategy.zero_stage > 1 or strategy.context > 1 or strategy.expert > 1 for strategy in strategies
    ):
        reach = max(strategy.devices for strategy in strategies)
    outermost, block = "", 1
    for level in profile.cluster.levels:
        if level.size > 1 and block < reach:
            outermost = level.name
        block *= level.size
    return outermost


def _predicted_communication(profile: Profile, plan: Plan, where: WaitPlace) -> float:
    """Return the least predicted communication of the groups of devices."""
    groups = expect(profile, plan).groups
    return min(group.inside if where is WaitPlace.LAYERS else group.gradients for group in groups)


def _fit_link_factor(profile: Profile, plan: Plan, where: WaitPlace, level: str, seconds: float) -> float:
    """Return, by bisection, the factor on the time of a byte over a level with which ``seconds`` are predicted."""
    low, high = _LEAST, _MOST
    for _ in range(_ROUNDS):
        middle = sqrt(low * high)
        candidate = corrected(profile, Corrections(links=(LinkFactor(level, middle),)))
        low, high = (middle, high) if _predicted_communication(candidate, plan, where) < seconds else (low, middle)
        if high / low < 1.0005:
            break
    return round(sqrt(low * high), 3)
