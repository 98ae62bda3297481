"""Attaching observers (logs, traces, the live display) and steering (phases, adaptation) to a model."""

from __future__ import annotations

import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from galvatron_lite import __version__
from galvatron_lite.cluster.budget import DEFAULT_BUDGET, budget_on, bytes_on
from galvatron_lite.errors import InputError
from galvatron_lite.files import read_data
from galvatron_lite.plans.io import check_plan, check_runs, is_phased, plan_in
from galvatron_lite.plans.phases import PhasedPlan, check_phased, phased_plan_in
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import write_profile
from galvatron_lite.runs.schema import (
    PROFILE,
    RUN_VERSION,
    CollectiveRecord,
    EndRecord,
    PlanRecord,
    RankHeader,
    RankRecord,
    Record,
    RunDevice,
    RunHeader,
    StepRecord,
)
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.monitor.adaptive import Monitor
from galvatron_lite.runtime.monitor.clock import StepClock, Tracer
from galvatron_lite.runtime.monitor.correct import corrected
from galvatron_lite.runtime.monitor.decide import read_log
from galvatron_lite.runtime.monitor.observer import StepObserver, plan_digest, resident_bytes
from galvatron_lite.runtime.monitor.schema import Adapt, Corrections, Decided, Exhausted
from galvatron_lite.runtime.monitor.sinks import (
    TENSORBOARD_FOLDER,
    Display,
    LineFiles,
    RecordWriter,
    Scalars,
    Sink,
    scalar_writer,
)
from galvatron_lite.runtime.peers import everyone
from galvatron_lite.runtime.phases import Phases

_READ_INTERVAL = 2.0
"""Seconds after which rank 0 reads the other ranks' peak memory again."""


@dataclass(frozen=True, slots=True)
class ObserverOptions:
    """How a run is observed."""

    log: Path | None = None  # folder that the run is written to
    live: bool = False  # whether to display the current step
    profile_steps: range = range(0)  # steps to trace


def observer_options(log: Path | str | None, live: bool, profile_steps: range | None) -> ObserverOptions | None:
    """Check and combine the options; None if nothing is to be observed."""
    steps = range(0) if profile_steps is None else profile_steps
    if not isinstance(steps, range) or steps.step != 1 or (steps and steps.start < 0):
        raise InputError("profile_steps", str(profile_steps), "Give steps in a row, as range(10, 13).")
    if steps and log is None:
        raise InputError("profile_steps", str(profile_steps), "Traces go into the folder of the run: give log=FOLDER.")
    if log is None and not live:
        return None
    return ObserverOptions(None if log is None else Path(log), live, steps)


def observe(model: Any, options: ObserverOptions | None, profile: Profile | None = None) -> RecordWriter | None:
    """Observe the training steps of a model from now on. All ranks call it together.

    Args:
        model: the model that trains; None: this run does not train.
        options: None: observe nothing.
        profile: the profile that the plan was made from, if known.

    Returns:
        The thread that writes the records; call its ``finish`` if the run ends before the process does.

    Raises:
        InputError: the run does not train, or the folder cannot be written.
    """
    if options is None:
        return None
    if model is None:
        field = "live" if options.log is None else "log"
        raise InputError(field, options.log or True, "There are no training steps to see: it is for training alone.")
    rank, clock, memory = dist.get_rank(), StepClock(model.device), _PeakMemory(model)
    head = _header(model)
    recorder = RecordWriter(_sinks(model, options, head, memory, profile))
    tracer = None
    if options.log and options.profile_steps:
        stage, world = head.devices[rank].stage, len(head.devices)
        metadata = {"version": RUN_VERSION, "digest": head.digest, "stage": stage, "world": world, "rank": rank}
        tracer = Tracer(options.log, options.profile_steps, lambda: _layers(model), clock, metadata, recorder.put)
    is_parallel = isinstance(model, ParallelModel)
    layers = is_parallel and options.log is not None
    model.observer = StepObserver(model, recorder.put, clock, tracer, lambda: memory.peak, layers)
    recorder.closing = model.observer.close
    if is_parallel:
        model.watch.clock = clock.begin_phase
    if rank == 0:
        recorder.put(head)
    return recorder


class _PeakMemory:
    """Tracks the peak memory over all ranks: a sink of rank 0, so that its thread does the reading.

    Attributes:
        peak: bytes of the fullest rank; 0: not known.
    """

    def __init__(self, model: Any) -> None:
        self._watch, self._read_at, self.peak = getattr(model, "watch", None), -_READ_INTERVAL, 0

    def take(self, records: Sequence[Record]) -> None:
        """Take this rank's peak from the records, and every few seconds those of the others from their notes."""
        self.peak = max([self.peak, *(record.reserved for record in records if isinstance(record, RankRecord))])
        if self._watch is not None and self.peak and monotonic() - self._read_at >= _READ_INTERVAL:
            self._read_at = monotonic()
            self.peak = max([self.peak, *(note.memory for note in self._watch.notes() if note is not None)])

    def close(self) -> None:
        """Do nothing."""


def _sinks(
    model: Any, options: ObserverOptions, head: RunHeader, memory: _PeakMemory, profile: Profile | None
) -> list[Sink]:
    files = [] if options.log is None else _run_files(options.log, head)
    if dist.get_rank() != 0:
        return [*files]
    sinks: list[Sink] = [memory, *files]
    if options.log is not None:
        if profile is not None:
            write_profile(profile, options.log / PROFILE)
        writer = scalar_writer(options.log / TENSORBOARD_FOLDER)
        sinks += [] if writer is None else [Scalars(writer, model.plan)]
    return [*sinks, Display(model.plan)] if options.live else sinks


def _run_files(folder: Path, head: RunHeader) -> list[LineFiles]:
    """Create the files of this rank; if any rank fails, every rank raises ``InputError``."""
    rank, files, reason = dist.get_rank(), list[LineFiles](), ""
    rank_header = RankHeader(RUN_VERSION, rank, head.digest, head.time, head.step)
    try:
        files.append(LineFiles(folder, f"rank-{rank:05d}", rank_header, (RankHeader, RankRecord, CollectiveRecord)))
        if rank == 0:
            files.append(LineFiles(folder, "steps", head, (StepRecord, PlanRecord, EndRecord)))
    except OSError as error:
        reason = f"{error.strerror} (rank {rank})"
    reasons = [text for text in everyone(reason) if text]
    if reasons:
        raise InputError("log", str(folder), f"The folder of the run cannot be written: {reasons[0]}.")
    return files


def _header(model: Any) -> RunHeader:
    """The header of the run's log; all ranks call it together."""
    device, name, memory = model.device, "cpu", 0
    stage = model.runtime.meshes.stage_index if isinstance(model, ParallelModel) else 0
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    run_device = RunDevice(dist.get_rank(), socket.gethostname(), name, stage, memory, resident_bytes())
    devices = tuple(everyone(run_device))
    versions = {"galvatron_lite": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    plan = model.plan
    return RunHeader(
        RUN_VERSION, plan, plan_digest(plan), round(time(), 3), devices, versions, int(model.step), type(model).__name__
    )


def _layers(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules of this rank's layers, with the layers' names."""
    if not isinstance(model, ParallelModel):
        return []
    return [
        (placed.layer.name, runtime.model.get_submodule(path))
        for runtime in model.runtimes
        for placed in runtime.stage
        for path in placed.layer.modules
    ]


def adapt_settings(adapt: Adapt | bool, mem: str | int) -> Adapt | None:
    """Check the settings of adaptation, with the budget of the first plan by default; None: the plan is not adapted."""
    if adapt is False:
        return None
    settings = Adapt() if adapt is True else adapt
    for name, least in (("window", 2), ("patience", 1), ("warm_up", 0), ("cool_down", 0), ("horizon", 1)):
        if getattr(settings, name) < least:
            raise InputError(f"adapt, {name}", getattr(settings, name), f"It is at least {least}.")
    for name in ("threshold", "least_gain"):
        if not 0.0 < getattr(settings, name) < 1.0:
            raise InputError(f"adapt, {name}", getattr(settings, name), "It is a share, between 0 and 1.")
    return settings if settings.mem else replace(settings, mem=mem)


def split_phases(plan: Plan | PhasedPlan | str | Path | None) -> tuple[PhasedPlan | None, Plan | None]:
    """Read and check a plan: the plan in phases if it has phases, and the plan that training starts with."""
    if isinstance(plan, (str, Path)):
        path, data = Path(plan), read_data(Path(plan))
        if not is_phased(data):
            return None, plan_in(data, path)
        phased = phased_plan_in(data, path)
    elif isinstance(plan, PhasedPlan):
        phased = check_phased(plan)
    else:
        return None, None if plan is None else check_plan(plan)
    for phase in phased.phases:
        check_runs(phase.plan)
    return phased, phased.phases[0].plan


def earlier_corrections(settings: Adapt | None, profile: Profile) -> Corrections:
    """The last corrections in the log of an earlier run, as far as they apply to the cluster of a profile."""
    if settings is None or not settings.log or not Path(settings.log).is_file():
        return Corrections()
    last = Corrections()
    for record in read_log(Path(settings.log)):
        if isinstance(record, Decided):
            last = record.decision.corrections
        elif isinstance(record, Exhausted):
            last = replace(last, memory=max(last.memory, record.factor))
    levels = {level.name for level in profile.cluster.levels}
    links = tuple(link for link in last.links if link.level in levels)
    devices = last.devices if len(last.devices) == profile.cluster.devices else ()
    return Corrections(links, devices, last.memory)


def correct_inputs(profile: Profile, corrections: Corrections, mem: str | int) -> tuple[Profile, str | int]:
    """Apply the corrections of an earlier run to the profile and the memory budget of the first plan."""
    if corrections == Corrections():
        return profile, mem
    budget = budget_on(profile.cluster, mem or DEFAULT_BUDGET).scaled(1.0 / corrections.memory)
    return corrected(profile, corrections), mem if corrections.memory == 1.0 else bytes_on(budget, "")


def steer(model: object, phased: PhasedPlan | None, settings: Adapt | None, profile: Profile | None) -> None:
    """Let phases or adaptation change the plan of a model while it trains; without either, do nothing.

    Raises:
        InputError: both are requested, or the plan of such a model cannot change.
    """
    if phased is None and settings is None:
        return
    if phased is not None and settings is not None:
        remedy = "A run in phases has the plans of its file: give adapt or a plan in phases."
        raise InputError("adapt", "with phases", remedy)
    if type(model) is not ParallelModel:
        remedy = "Plans change between steps that train in stages; not cyclic, with branches apart, or under DeepSpeed."
        raise InputError("adapt" if phased is None else "plan", type(model).__name__, remedy)
    if phased is not None:
        model.steering = Phases(model, phased)
    elif settings is not None and profile is not None:
        model.steering = Monitor(model, profile, settings, corrections=earlier_corrections(settings, profile))
