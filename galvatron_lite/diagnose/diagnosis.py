"""A run, or traces of one, held against what was predicted. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from galvatron_lite.cost.plan import evaluate
from galvatron_lite.diagnose.events import read_trace
from galvatron_lite.diagnose.expected import Expected, expect
from galvatron_lite.diagnose.findings import GLOO, NCCL, Cause, Finding, findings
from galvatron_lite.diagnose.logged import times_logged
from galvatron_lite.diagnose.times import RankTimes
from galvatron_lite.diagnose.traced import times_of
from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import profile_hash, read_profile
from galvatron_lite.runs.read import PROFILE, Run, is_run, read_run


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Memory of the devices of one place in the pipeline.

    Attributes:
        ranks: first and last.
        measured: peak bytes that the allocator of the fullest held.
        predicted: bytes, without the driver's context, which no allocator sees.
    """

    ranks: tuple[int, int]
    measured: int
    predicted: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where a run and its prediction part ways.

    Attributes:
        source: folder of the run.
        steps: that were looked at.
        seconds: of a step, measured.
        predicted: seconds of a step.
        traced: whether it is from traces; else from the log.
        findings: causes, those that cost most first; what is quicker than predicted last, without advice.
        unexplained: seconds of the difference that no cause holds.
        memory: of each group of devices; empty where it was not measured.
        notes: what could not be looked at, and why.
        untraced: seconds of a step without the profiler, which makes steps slower; None: not from traces, or not known.
    """

    source: str
    steps: int
    seconds: float
    predicted: float
    traced: bool
    findings: tuple[Finding, ...]
    unexplained: float
    memory: tuple[MemoryRow, ...] = ()
    notes: tuple[str, ...] = ()
    untraced: float | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """What is diagnosed.

    Attributes:
        name: folder or file.
        run: the log; None: traces alone.
        plan: that was in force.
        times: of the ranks.
        notes: what could not be looked at.
    """

    name: str
    run: Run | None
    plan: Plan
    times: tuple[RankTimes, ...]
    notes: tuple[str, ...] = ()


def open_source(place: Path, plan: Plan | None = None) -> Source:
    """What a folder of a run, a trace, or a folder of traces holds.

    Args:
        place: it.
        plan: under which traces alone were made.

    Raises:
        FileFormatError: it holds neither, or is damaged.
        InputError: traces alone, and no plan.
    """
    if is_run(place):
        return _of_run(read_run(place))
    paths = [place] if place.is_file() else sorted(place.glob("*.json*")) if place.is_dir() else []
    if not paths:
        remedy = "Give the folder of auto_parallelize(..., log=FOLDER), a trace of torch.profiler, or a folder of them."
        raise FileFormatError("run", str(place), f"It holds no run and no trace. {remedy}")
    if plan is None:
        raise InputError("--plan", "none", "Traces by themselves do not say what was planned: give --plan PLAN.")
    return Source(str(place), None, plan, *_traced(paths))


def _of_run(run: Run) -> Source:
    """A run's traces where there are some, else its log."""
    notes = [f"{name}: its last line was cut off, and is left out." for name in run.torn]
    logged = times_logged(run)
    traces = [path for path in run.traces if _is_of(path, run.since)]
    if traces:
        times, more = _traced(traces)
        between = {one.rank: one.between for one in logged}
        times = tuple(replace(one, between=between.get(one.rank, 0.0)) for one in times)
        return Source(str(run.folder), run, run.plan, times, (*notes, *more))
    if not logged:
        remedy = "It ended before anything was measured: train some steps more."
        raise FileFormatError("run", str(run.folder), remedy)
    notes.append("No traces: layers' backward passes and communication inside layers are not told apart.")
    return Source(str(run.folder), run, run.plan, tuple(logged), tuple(notes))


def _is_of(path: Path, since: int) -> bool:
    """Whether a trace of ours was made under the plan that was last in force; others are taken as they are."""
    number = path.name.partition("-step-")[2].partition(".")[0]
    return not number.isdigit() or int(number) >= since


def _traced(paths: Sequence[Path]) -> tuple[tuple[RankTimes, ...], tuple[str, ...]]:
    """Times of the traces, the last one of each rank, and what they lack."""
    found = {one.rank: one for one in (times_of(read_trace(path)) for path in paths)}
    times = tuple(found[rank] for rank in sorted(found))
    notes = []
    if not all(one.layered and one.parted for one in times):
        notes.append(
            "A trace without galvatron's ranges: layers and parts of a step are not told apart. Have it made by "
            "auto_parallelize(..., log=FOLDER, profile_steps=range(10, 13))."
        )
    return times, tuple(notes)


def find_known_profile(source: Source, folder: Path = Path("profiles")) -> Profile:
    """What the plan of a run was made from: beside the run, else of those that were made here.

    Raises:
        InputError: it is not there.
    """
    if source.run is not None and (source.run.folder / PROFILE).is_file():
        return read_profile(source.run.folder / PROFILE)
    made_from = source.plan.provenance
    for path in sorted(folder.glob("*/*.yaml")) if made_from is not None and folder.is_dir() else ():
        try:
            known = read_profile(path)
        except FileFormatError:
            continue
        if made_from is not None and profile_hash(known) == made_from.profile_hash:
            return known
    wanted = (
        "a plan written by hand" if made_from is None else f"profile {made_from.profile} ({made_from.profile_hash})"
    )
    raise InputError("--profile", "none", f"The run is of {wanted}, which is not here: give --profile FILE.")


def diagnose(source: Source, profile: Profile) -> Diagnosis:
    """Hold a run against what its plan is predicted to do.

    Raises:
        InputError: the plan is not of the profile's model, or a kind of plan whose time is not told apart.
    """
    wanted = evaluate(profile, source.plan) if _is_other(source.plan) else expect(profile, source.plan)
    if isinstance(wanted, Plan):
        return _steps_alone(source, wanted)
    _check_ranks(source, wanted)
    causes = findings(source.times, wanted, _backend(source, profile))
    found = [one for one in causes if _is_told(one, source.times)]
    seconds = max(one.seconds for one in source.times)
    explained = _explained(found)
    steps = max(one.steps for one in source.times)
    traced = any(one.traced for one in source.times)
    return Diagnosis(
        source.name, steps, seconds, wanted.seconds, traced, tuple(found),
        seconds - wanted.seconds - explained, _memory(source.run, wanted.plan), source.notes,
        _untraced(source.run) if traced else None,
    )  # fmt: skip


def _backend(source: Source, profile: Profile) -> str:
    """What carries messages: gloo between processes on CPUs, by what the run says of its devices, or the profile."""
    devices = [] if source.run is None else [one.name for one in source.run.header.devices]
    on_cpus = "cpu" in devices if devices else profile.cluster.device.name.startswith("CPU ")
    return GLOO if on_cpus else NCCL


def _untraced(run: Run | None) -> float | None:
    """Median seconds of a step of a run while no profiler ran; without the first one, which warms up."""
    own = [] if run is None else [one.seconds for one in run.own_steps[1:] if not one.profiled]
    return median(own) if own else None


def _explained(found: Sequence[Finding]) -> float:
    """Seconds that causes add up to: stages work side by side, so those of the stage with most of them count."""
    within = [one for one in found if one.cause is not Cause.BETWEEN]
    stages = {one.stage for one in within if one.stage >= 0}
    most = max((sum(one.seconds for one in within if one.stage == stage) for stage in stages), default=0.0)
    return most + sum(one.seconds for one in within if one.stage < 0)


def _is_other(plan: Plan) -> bool:
    return plan.cyclic is not None or bool(plan.branches)


def _check_ranks(source: Source, wanted: Expected) -> None:
    for one in source.times:
        if one.rank >= wanted.plan.devices:
            raise InputError("rank", one.rank, f"The plan is for {wanted.plan.devices} ranks: give traces of its run.")


def _is_told(one: Finding, times: Sequence[RankTimes]) -> bool:
    """Whether what was measured tells a cause at all."""
    return one.cause is not Cause.HOST or all(rank.layered and rank.parted for rank in times)


def _steps_alone(source: Source, wanted: Plan) -> Diagnosis:
    """The whole step, of plans whose parts are not told apart."""
    assert wanted.prediction is not None
    seconds = median(one.seconds for one in source.times)
    predicted = wanted.prediction.step_seconds
    note = "Of plans with cyclic data parallelism or branches only whole steps are compared."
    return Diagnosis(
        source.name, max(one.steps for one in source.times), seconds, predicted, False, (), seconds - predicted,
        notes=(*source.notes, note),
    )  # fmt: skip


def _memory(run: Run | None, plan: Plan) -> tuple[MemoryRow, ...]:
    from galvatron_lite.cost.step import device_memory

    if run is None:
        return ()
    held = {records[0].rank: max(record.reserved for record in records) for records in run.ranks if records}
    found = []
    for number, memory in enumerate(device_memory(plan)):
        ranks = range(number * plan.stage_devices, (number + 1) * plan.stage_devices)
        most = max((held.get(rank, 0) for rank in ranks), default=0)
        if most:
            found.append(MemoryRow((ranks.start, ranks.stop - 1), most, memory.total - memory.context))
    return tuple(found)
