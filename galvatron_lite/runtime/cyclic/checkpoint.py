"""Checkpoints of cyclic data parallelism, which include the delay.

A checkpoint is a folder of these files:

    meta.json        the manifest: rule, workers, training step, names and shapes, checksums of the other files
    stage-0.pt       for each stage, its parameters by version, states of optimizer and scheduler
    process-0.pt     for each process, its buffers (batch-norm statistics) by stage, random generators

All processes write into one folder, which must be visible to all. It is written under a temporary name and renamed when
it is complete on disk, so a lost process or machine does not damage earlier checkpoints. Training can continue in any
setting with the same rule and number of workers. After t updates, parameters and optimizer states are equal on all
processes of a stage, so one of them writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import Strict
from galvatron_lite.folders import Content, begin_folder, put_in_place
from galvatron_lite.model.batch import map_tensors
from galvatron_lite.parallelism.cyclic.executor import SeededDraws
from galvatron_lite.parallelism.cyclic.programme import CyclicProgramme
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.cyclic.stages import StageStates
from galvatron_lite.runtime.checkpoint.manifest import (
    FIELD,
    check_all,
    check_arrived,
    checked,
    read_sealed,
    read_together,
    survey,
    write_sealed,
    write_together,
)
from galvatron_lite.runtime.checkpoint.plain import (
    alone,
    check_plain,
    generators,
    put_generators,
    read_plain,
    write_plain,
)
from galvatron_lite.runtime.cyclic.setup import CyclicRuntime, average, shared_buffers
from galvatron_lite.runtime.peers import Peers, together

FORMAT = 1


@dataclass(frozen=True, slots=True)
class StageRecord(Strict):
    """A stage in the manifest."""

    parameters: dict[str, str]  # dtype and shape, by name in the user's model
    optimizer: str | None = None  # class name
    scheduler: str | None = None  # class name


@dataclass(frozen=True, slots=True)
class CyclicManifest(Strict):
    """The manifest of a checkpoint."""

    format: int  # of the folder
    rule: CyclicRule
    setting: CyclicSetting  # under which it was written; training can continue in any setting
    workers: int  # N
    step: int  # training steps done, which is the number of updates
    base: int  # oldest version that the next training step uses: ``step`` - 1, or ``step`` after a flush
    seed: int | None  # of the random numbers in passes; None: not seeded by micro-batch
    processes: int  # number of processes that wrote it
    stages: tuple[StageRecord, ...]  # in order
    names: dict[str, str]  # entries of the model's ``state_dict()``, and the first name of the tensor behind each
    files: dict[str, Content]  # checksums by name
    sequence: int = 0  # counts checkpoints in the order in which they were written
    digest: str = ""  # checksum of the other fields


def check_complete(folder: Path) -> CyclicManifest:
    """Check all files of a checkpoint and return its manifest; raise ``FileFormatError`` for the first damaged file."""
    return check_all(folder, read_sealed(CyclicManifest, folder, FORMAT))


def latest(folder: Path | str) -> Path | None:
    """Return the last intact checkpoint written to a folder of checkpoints; None: there is none.

    Intact checkpoints that a lost process left under a temporary name are included.
    """
    for place, _ in survey(CyclicManifest, Path(folder), FORMAT)[0]:
        try:
            check_complete(place)
        except FileFormatError:
            continue
        return place
    return None


def flushed_state(folder: Path | str) -> dict[str, Tensor]:
    """Return the full ``state_dict()`` of a checkpoint without its delay, for another plan or a plain model.

    It equals ``full_state_dict()`` of the model that wrote it: all updates are applied, and running statistics are the
    mean over the processes. It has no optimizer states.

    Raises:
        FileFormatError: the checkpoint is damaged.
    """
    place = Path(folder)
    manifest = check_complete(place)
    processes = [read_plain(place / _process_file(process)) for process in range(manifest.processes)]
    state: dict[str, Tensor] = dict(processes[0]["rest"])
    for stage in range(len(manifest.stages)):
        state |= read_plain(place / _stage_file(stage))["newest"] | _mean_buffers(processes, stage)
    return {name: state[first] for name, first in manifest.names.items()}


_Written = tuple[dict[str, Content], dict[int, StageRecord]]
"""The files that a process wrote: their checksums by name, and the records of stages by number."""


@dataclass(frozen=True, slots=True)
class CyclicCheckpointer:
    """Writes and reads the checkpoints of a model after ``drain``. All processes call its methods together."""

    runtime: CyclicRuntime  # of this process
    peers: Peers  # all processes

    def write(self, place: Path, step: int) -> None:
        """Write a checkpoint before training step ``step``."""
        write_together(
            self.peers,
            lambda: begin_folder(place),
            lambda folder: self._write_files(folder, step),
            lambda folder, parts: self._finish(folder, place, step, parts),
        )

    def read(self, folder: Path) -> int:
        """Load a checkpoint and return its training step."""
        manifest = read_together(self.peers, folder, lambda: self._check(folder))
        together(self.peers, lambda: self._load(folder, manifest), FIELD)
        return manifest.step

    def _write_files(self, folder: Path, step: int) -> _Written:
        runtime, programme = self.runtime, self.runtime.executor.programme
        name = _process_file(runtime.process)
        contents, records = {name: write_plain(folder / name, _process_content(runtime))}, {}
        for stage, states in runtime.executor.states.items():
            if _writer_of(programme, stage, step) == runtime.process:
                name = _stage_file(stage)
                contents[name] = write_plain(folder / name, _stage_content(states))
                records[stage] = _record(states)
        return contents, records

    def _finish(self, folder: Path, place: Path, step: int, written: list[_Written]) -> None:
        files = {name: content for contents, _ in written for name, content in contents.items()}
        check_arrived(folder, place, files)
        stages = {stage: record for _, records in written for stage, record in records.items()}
        programme, others = self.runtime.executor.programme, survey(CyclicManifest, place.parent, FORMAT)[0]
        manifest = CyclicManifest(
            FORMAT,
            programme.rule,
            programme.setting,
            programme.workers,
            step,
            programme.base,
            self.runtime.executor.draws.seed,
            programme.processes,
            tuple(record for _, record in sorted(stages.items())),
            dict(self.runtime.entries.names),
            files,
            sequence=1 + max((other.sequence for _, other in others), default=0),
        )
        write_sealed(folder, manifest)
        put_in_place(folder, place)

    def _check(self, folder: Path) -> CyclicManifest:
        """Read the manifest, and check that it fits this process and that the files it needs are intact."""
        manifest, executor = read_sealed(CyclicManifest, folder, FORMAT), self.runtime.executor
        rule, workers = executor.programme.rule, executor.programme.workers
        if (manifest.rule, manifest.workers) != (rule, workers):
            remedy = (
                f"It was written under {manifest.rule.value} with {manifest.workers} workers; this plan has "
                f"{rule.value} with {workers}. To go on with its model, without its delay and optimizer states: "
                "load_full_state_dict(flushed_state(folder))."
            )
            raise InputError(FIELD, folder, remedy)
        for stage, states in executor.states.items():
            _check_stage(stage, manifest.stages[stage], _record(states))
        stages = [_stage_file(stage) for stage in executor.states]
        for name in [*stages, *(_process_file(process) for process in self._sources(manifest))]:
            checked(folder, manifest, name)
        return manifest

    def _sources(self, manifest: CyclicManifest) -> Sequence[int]:
        """The processes whose buffers this one loads: only itself, or all of them in another setting."""
        same = manifest.setting is self.runtime.executor.programme.setting
        return [self.runtime.process] if same else range(manifest.processes)

    def _load(self, folder: Path, manifest: CyclicManifest) -> None:
        runtime, executor, step = self.runtime, self.runtime.executor, manifest.step
        programme = replace(executor.programme, begin=step, base=manifest.base)
        older = dict[int, dict[str, Tensor]]()
        microbatches = range(step * programme.workers, (step + 1) * programme.workers)
        for stage, states in executor.states.items():
            content = read_plain(folder / _stage_file(stage))
            _put_stage(states, content)
            of_process = (n for n in microbatches if programme.process_of(stage, n) == runtime.process)
            first = next(of_process, None)
            if first is not None and programme.version(stage, first) < step:
                older[stage] = {name: value.to(states.masters[name].device) for name, value in content["older"].items()}
        executor.restart(step, manifest.base, older)
        if manifest.seed is not None:
            executor.draws = SeededDraws(manifest.seed, runtime.device)
        contents = [read_plain(folder / _process_file(process)) for process in self._sources(manifest)]
        buffers = shared_buffers(runtime)
        values = {name: content for name, content in contents[0]["rest"].items() if name in buffers}
        for stage, part in runtime.parts.items():
            buffers |= part.buffers()
            values |= _mean_buffers(contents, stage)
        for name, value in values.items():
            buffers[name].copy_(value)
        if manifest.setting is programme.setting:
            put_generators(contents[0]["random"])


def _stage_file(stage: int) -> str:
    return f"stage-{stage}.pt"


def _process_file(process: int) -> str:
    return f"process-{process}.pt"


def _writer_of(programme: CyclicProgramme, stage: int, step: int) -> int:
    """The process that writes a stage before training step ``step``: that of the last worker with older parameters.

    So each process writes one stage under ``data``. If no worker uses older parameters, it is that of the last worker.
    """
    last = programme.workers - 1
    return programme.process_of(stage, step * programme.workers + (last if stage == last else last - 1 - stage))


def _stage_content(states: StageStates) -> dict[str, Any]:
    optimizer = None if states.optimizer is None else states.optimizer.state_dict()
    scheduler = None if states.scheduler is None else states.scheduler.state_dict()
    check_plain(optimizer, "optimizer")
    check_plain(scheduler, "scheduler")
    older = None
    if states.newest - 1 in states.versions:
        version = states.at(states.newest - 1)
        # parameters that are not trained are equal in all versions
        older = {name: alone(parameter) for name, parameter in version.items() if parameter.requires_grad}
    newest = {name: alone(master) for name, master in states.masters.items()}
    optimizer = map_tensors(optimizer, alone)
    return {"newest": newest, "older": older, "optimizer": optimizer, "scheduler": scheduler}


def _process_content(runtime: CyclicRuntime) -> dict[str, Any]:
    parts = runtime.parts.items()
    buffers = {stage: {name: alone(buffer) for name, buffer in part.buffers()} for stage, part in parts}
    rest = {name: alone(buffer) for name, buffer in shared_buffers(runtime).items()}
    return {"buffers": buffers, "rest": rest, "random": generators()}


def _mean_buffers(processes: Sequence[Mapping[str, Any]], stage: int) -> dict[str, Tensor]:
    """The buffers of a stage, averaged over the processes that have it."""
    copies = [process["buffers"][stage] for process in processes if stage in process["buffers"]]
    return {name: average([copy[name] for copy in copies]) for name in (copies[0] if copies else ())}


def _record(states: StageStates) -> StageRecord:
    parameters = {
        name: f"{str(master.dtype).removeprefix('torch.')} {list(master.shape)}"
        for name, master in states.masters.items()
    }
    optimizer = None if states.optimizer is None else type(states.optimizer).__name__
    scheduler = None if states.scheduler is None else type(states.scheduler).__name__
    return StageRecord(parameters, optimizer, scheduler)


def _check_stage(stage: int, written: StageRecord, record: StageRecord) -> None:
    """Raise ``InputError`` for the first parameter, optimizer or scheduler of a stage that differs from the record."""
    for name in sorted(written.parameters.keys() ^ record.parameters.keys()):
        where = "the checkpoint" if name in written.parameters else "this plan"
        remedy = f"Only {where} has it in stage {stage}. Use the same model, cut into the same stages."
        raise InputError("parameter", name, remedy)
    for name, described in record.parameters.items():
        if written.parameters[name] != described:
            remedy = f"{name} is {described} in this model. Use the same model and precision."
            raise InputError("parameter", written.parameters[name], remedy)
    for field in ("optimizer", "scheduler"):
        saved, present = getattr(written, field), getattr(record, field)
        if saved is not None and saved != present:
            remedy = f"The checkpoint has the states of a {saved}. Make one with optimizer(factory, ...) before load."
            raise InputError(field, present, remedy)


def _put_stage(states: StageStates, content: Mapping[str, Any]) -> None:
    """Set the newest parameters of a stage, and the states of its optimizer and scheduler."""
    written = content["optimizer"]
    if states.optimizer is not None and written is not None:
        groups = written["param_groups"], states.optimizer.param_groups
        saved_sizes, sizes = ([len(group["params"]) for group in param_groups] for param_groups in groups)
        if saved_sizes != sizes:
            remedy = "Its parameter groups are others than the checkpoint's. Rebuild it as in the original run."
            raise InputError("optimizer", type(states.optimizer).__name__, remedy)
        states.optimizer.load_state_dict(written)
        if states.scheduler is not None and content["scheduler"] is not None:
            states.scheduler.load_state_dict(content["scheduler"])
    with torch.no_grad():
        for name, master in states.masters.items():
            master.data.copy_(content["newest"][name])
