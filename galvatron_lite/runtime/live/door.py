"""How training comes to be seen: what takes its times, writes and shows them on this rank."""

from __future__ import annotations

import platform
import socket
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from galvatron_lite import __version__
from galvatron_lite.errors import InputError
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import write_profile
from galvatron_lite.runs.read import PROFILE
from galvatron_lite.runs.schema import (
    RUN_VERSION,
    EndRecord,
    PlanRecord,
    RankHeader,
    RankRecord,
    Record,
    RunDevice,
    RunHeader,
    StepRecord,
)
from galvatron_lite.runtime.adapt.clock import LayerClock
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.live.board import FOLDER, Scalars, writer
from galvatron_lite.runtime.live.clock import StepClock
from galvatron_lite.runtime.live.files import LineFiles
from galvatron_lite.runtime.live.options import ObserverOptions
from galvatron_lite.runtime.live.recorder import RecordWriter, Sink
from galvatron_lite.runtime.live.show import Display
from galvatron_lite.runtime.live.traces import Tracer
from galvatron_lite.runtime.live.watcher import Watcher, digest_of, resident

_LISTEN = 2.0
"""Seconds between two times that rank 0 hears how much memory the others took."""


def open_run(model: Any, seen: ObserverOptions, profile: Profile | None = None) -> RecordWriter:
    """Have a model's steps seen from now on; all ranks call it together.

    Args:
        model: the model.
        seen: what is wanted.
        profile: what the plan was made from, where it is known.

    Returns:
        What writes and shows it; ``finish`` it where the run ends before the process does.

    Raises:
        InputError: the folder cannot be written.
    """
    rank, clock = dist.get_rank(), StepClock(model.device)
    listening = _Listening(model)
    devices = _devices(model)
    head = _head(model, devices)
    sinks = _sinks(model, seen, head, listening, profile)
    recorder = RecordWriter(sinks)
    about = {"version": RUN_VERSION, "digest": head.digest, "stage": devices[rank].stage, "world": len(devices)}
    steps = seen.profile_steps
    tracer = Tracer(seen.log, steps, rank, lambda: _layers(model), clock, about) if seen.log and steps else None
    model.observer = Watcher(model, rank, recorder.put, clock, lambda: _timed(model, seen), tracer, listening)
    recorder.closing = model.observer.close
    if isinstance(model, ParallelModel):
        model.watch.clock = model.observer.phase
    if rank == 0:
        recorder.put(head)
    return recorder


class _Listening:
    """Hears how much memory all ranks took; a sink of rank 0's, as its thread has the time."""

    def __init__(self, model: Any) -> None:
        self._watch, self._since, self.memory = getattr(model, "watch", None), -_LISTEN, 0

    def take(self, records: Sequence[Record]) -> None:
        """Whatever comes, it is time to listen now and then."""
        own = [record.reserved for record in records if isinstance(record, RankRecord)]
        self.memory = max([self.memory, *own])
        if self._watch is not None and self.memory and monotonic() - self._since >= _LISTEN:
            self._since = monotonic()
            self.memory = max([self.memory, *(note.memory for note in self._watch.notes() if note is not None)])

    def close(self) -> None:
        """Nothing is left."""

    def __call__(self) -> int:
        """Peak bytes of the fullest rank that was heard."""
        return self.memory


class _Files:
    """The files of a rank; a sink."""

    def __init__(self, folder: Path, rank: int, head: RunHeader) -> None:
        own = RankHeader(RUN_VERSION, rank, head.digest, head.time, head.step)
        self._steps = LineFiles(folder, "steps", [head]) if rank == 0 else None
        self._rank = LineFiles(folder, f"rank-{rank:05d}", [own])

    def take(self, records: Sequence[Record]) -> None:
        """Lines, each for its file."""
        own = [one for one in records if isinstance(one, (RankHeader, RankRecord))]
        steps = [one for one in records if isinstance(one, (StepRecord, PlanRecord, EndRecord))]
        if own:
            self._rank.write(own)
        if steps and self._steps is not None:
            self._steps.write(steps)
        for one in records:
            if isinstance(one, RankHeader):
                self._rank.head = [one]
            elif isinstance(one, PlanRecord) and self._steps is not None:
                self._steps.head = [self._steps.head[0], one]

    def close(self) -> None:
        """No more lines come."""
        for files in (self._steps, self._rank):
            if files is not None:
                files.close()


def _sinks(
    model: Any, seen: ObserverOptions, head: RunHeader, listening: _Listening, profile: Profile | None
) -> list[Sink]:
    rank = dist.get_rank()
    found: list[Sink] = [listening] if rank == 0 else []
    if seen.log is not None:
        found.append(_files(seen.log, head))
    if rank == 0 and seen.log is not None:
        if profile is not None:
            write_profile(profile, seen.log / PROFILE)
        board = writer(seen.log / FOLDER)
        found += [] if board is None else [Scalars(board, model.plan)]
    if rank == 0 and seen.live:
        found.append(Display(model.plan))
    return found


def _files(folder: Path, head: RunHeader) -> _Files:
    """The files of this rank; an error on all ranks where any cannot make its own."""
    rank, made, reason = dist.get_rank(), None, ""
    try:
        made = _Files(folder, rank, head)
    except OSError as error:
        reason = f"{error.strerror} (rank {rank})"
    every: list[Any] = [""] * dist.get_world_size()
    dist.all_gather_object(every, reason)
    bad = next((one for one in every if one), "")
    if bad or made is None:
        raise InputError("log", str(folder), f"The folder of the run cannot be written: {bad}.")
    return made


def _head(model: Any, devices: tuple[RunDevice, ...]) -> RunHeader:
    versions = {"galvatron_lite": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    name = type(model).__name__
    return RunHeader(
        RUN_VERSION, model.plan, digest_of(model.plan), round(time(), 3), devices, versions, int(model.step), name
    )


def _devices(model: Any) -> tuple[RunDevice, ...]:
    """What all ranks run on; they speak to one another."""
    device, stage = model.device, 0
    if isinstance(model, ParallelModel):
        stage = model.runtime.meshes.stage_index
    name, memory = "cpu", 0
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    own = RunDevice(dist.get_rank(), socket.gethostname(), name, stage, memory, resident())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return tuple(every)


def _layers(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules of this rank's layers, each with the layer's name."""
    if not isinstance(model, ParallelModel):
        return []
    return [
        (placed.layer.name, structure.get_submodule(path))
        for runtime, structure in zip(model.runtimes, model.structures, strict=True)
        for placed in runtime.stage
        for path in placed.layer.modules
    ]


def _timed(model: Any, seen: ObserverOptions) -> LayerClock | None:
    return LayerClock(model) if isinstance(model, ParallelModel) and seen.log is not None else None
