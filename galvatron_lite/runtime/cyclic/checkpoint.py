"""Checkpoints of cyclic data parallelism: what the next training step needs, delay included, in one folder.

    meta.json        rule, workers, training step, names and shapes, checksums of the other files
    stage-0.pt       of each stage: its parameters by version, states of optimizer and scheduler
    process-0.pt     of each process: buffers (batch-norm statistics) by stage, random generators

All processes write into one folder, which they all must see. It is written beside its place and moved there once all of
it is on the disk, so a process or a machine that is lost leaves the checkpoints from before as they were. It can be
continued in any setting with as many workers and the same rule. Parameters and optimizer states after t updates are
the same on all processes of a stage, so one of them writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import STRICT
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
from galvatron_lite.runtime.cyclic.setup import CyclicRuntime, between, loose_buffers
from galvatron_lite.runtime.peers import Peers, together

if TYPE_CHECKING:
    from pydantic import ConfigDict

FORMAT = 1


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What a checkpoint holds of a stage."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    parameters: dict[str, str]  # dtype and shape, by name in the user's model
    optimizer: str | None = None  # its class
    scheduler: str | None = None  # its class


@dataclass(frozen=True, slots=True)
class CyclicManifest:
    """A checkpoint."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    format: int  # of the folder
    rule: CyclicRule
    setting: CyclicSetting  # where passes ran when it was written; it may be continued in any
    workers: int  # N
    step: int  # training steps done: parameters have had so many updates
    base: int  # oldest version that the next training step uses: ``step`` - 1, or ``step`` after a flush
    seed: int | None  # of what passes draw; None where they drew as it came
    processes: int  # that wrote it
    stages: tuple[StageRecord, ...]  # in order
    names: dict[str, str]  # every entry of the model's ``state_dict()``, and the first name of the tensor behind it
    files: dict[str, Content]  # what they hold, by name
    sequence: int = 0  # counts checkpoints in the order in which they were written
    digest: str = ""  # checksum of all this


def check_complete(folder: Path) -> CyclicManifest:
    """The manifest of a checkpoint all of whose files are as they were written; raises FileFormatError if not."""
    return check_all(folder, read_sealed(CyclicManifest, folder, FORMAT))


def latest(folder: Path | str) -> Path | None:
    """The checkpoint written last among a folder's folders, leaving out those that are not whole.

    A folder that a lost process left under a temporary name counts if it is whole.
    """
    for place, _ in survey(CyclicManifest, Path(folder), FORMAT)[0]:
        try:
            check_complete(place)
        except FileFormatError:
            continue
        return place
    return None


def flushed_state(folder: Path | str) -> dict[str, Tensor]:
    """The full model of a checkpoint, without its delay, for any other plan or for one process.

    It is what ``full_state_dict()`` gave just after it was written: all updates are in it; running statistics are the
    mean of the processes'. Optimizer states are left out.

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
"""What a process wrote: contents of files by name, and records of stages by number."""


@dataclass(frozen=True, slots=True)
class CyclicCheckpointer:
    """Writes and reads checkpoints of a process between whose passes nothing is left."""

    runtime: CyclicRuntime  # of the process
    peers: Peers  # all processes

    def write(self, place: Path, step: int) -> None:
        """Write a checkpoint before training step ``step``; all processes call it."""
        write_together(
            self.peers,
            lambda: begin_folder(place),
            lambda folder: self._write_files(folder, step),
            lambda folder, parts: self._finish(folder, place, step, parts),
        )

    def read(self, folder: Path) -> int:
        """Take a checkpoint; returns its training step. All processes call it."""
        manifest = read_together(self.peers, folder, lambda: self._checked(folder))
        together(self.peers, lambda: self._take(folder, manifest), FIELD)
        return manifest.step

    def _write_files(self, folder: Path, step: int) -> _Written:
        runtime, programme = self.runtime, self.runtime.executor.programme
        contents: dict[str, Any] = {_process_file(runtime.process): partial(_process_content, runtime)}
        records = {}
        for stage, states in runtime.executor.states.items():
            if _writer_of(programme, stage, step) == runtime.process:
                contents[_stage_file(stage)] = partial(_stage_content, states)
                records[stage] = _record(states)
        return {name: write_plain(folder / name, make()) for name, make in contents.items()}, records

    def _finish(self, folder: Path, place: Path, step: int, parts: list[_Written]) -> None:
        files = {name: content for contents, _ in parts for name, content in contents.items()}
        check_arrived(folder, place, files)
        stages = {stage: record for _, records in parts for stage, record in records.items()}
        programme, draws = self.runtime.executor.programme, self.runtime.executor.draws
        sequence = 1 + max((one.sequence for _, one in survey(CyclicManifest, place.parent, FORMAT)[0]), default=0)
        manifest = CyclicManifest(
            FORMAT, programme.rule, programme.setting, programme.workers, step, programme.base,
            draws.seed, programme.processes,
            tuple(record for _, record in sorted(stages.items())), dict(self.runtime.entries.names), files, sequence,
        )  # fmt: skip
        write_sealed(folder, manifest)
        put_in_place(folder, place)

    def _checked(self, folder: Path) -> CyclicManifest:
        """The manifest of a checkpoint that this process can take; the files that it needs are whole."""
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
        """Processes whose buffers this one takes: its own, or in another setting all that ran its stages."""
        same = manifest.setting is self.runtime.executor.programme.setting
        return [self.runtime.process] if same else range(manifest.processes)

    def _take(self, folder: Path, manifest: CyclicManifest) -> None:
        runtime, executor, step = self.runtime, self.runtime.executor, manifest.step
        programme = replace(executor.programme, begin=step, base=manifest.base)
        older, numbers = dict[int, dict[str, Tensor]](), range(step * programme.workers, (step + 1) * programme.workers)
        for stage, states in executor.states.items():
            content = read_plain(folder / _stage_file(stage))
            _put_stage(states, content)
            first = next((number for number in numbers if programme.process_of(stage, number) == runtime.process), None)
            if first is not None and programme.version(stage, first) < step:
                older[stage] = {name: one.to(states.masters[name].device) for name, one in content["older"].items()}
        executor.restart(step, manifest.base, older)
        if manifest.seed is not None:
            executor.draws = SeededDraws(manifest.seed, runtime.device)
        contents = [read_plain(folder / _process_file(process)) for process in self._sources(manifest)]
        buffers = loose_buffers(runtime)
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
    """The process that writes a stage before training step ``step``: one that still uses the older parameters, if any.

    It is that of the last worker who does, so that under ``data`` every process writes one stage.
    """
    last = programme.workers - 1
    return programme.process_of(stage, step * programme.workers + (last if stage == last else last - 1 - stage))


def _stage_content(states: StageStates) -> dict[str, Any]:
    """What a checkpoint holds of a stage."""
    older = states.newest - 1
    content = {
        "newest": {name: alone(master) for name, master in states.masters.items()},
        # those that training does not change are the same in every version
        "older": {name: alone(one) for name, one in states.at(older).items() if one.requires_grad}
        if older in states.versions
        else None,
        "optimizer": None if states.optimizer is None else states.optimizer.state_dict(),
        "scheduler": None if states.scheduler is None else states.scheduler.state_dict(),
    }
    for what in ("optimizer", "scheduler"):
        check_plain(content[what], what)
    return content | {"optimizer": map_tensors(content["optimizer"], alone)}


def _process_content(runtime: CyclicRuntime) -> dict[str, Any]:
    buffers = {stage: {name: alone(one) for name, one in part.buffers()} for stage, part in runtime.parts.items()}
    rest = {name: alone(loose_buffer) for name, loose_buffer in loose_buffers(runtime).items()}
    return {"buffers": buffers, "rest": rest, "random": generators()}


def _mean_buffers(processes: Sequence[Mapping[str, Any]], stage: int) -> dict[str, Tensor]:
    """A stage's buffers: means of running statistics where several processes had them."""
    having = [process["buffers"][stage] for process in processes if stage in process["buffers"]]
    return {name: between([one[name] for one in having]) for name in (having[0] if having else ())}


def _record(states: StageStates) -> StageRecord:
    parameters = {
        name: f"{str(master.dtype).removeprefix('torch.')} {list(master.shape)}"
        for name, master in states.masters.items()
    }
    kinds = (None if one is None else type(one).__name__ for one in (states.optimizer, states.scheduler))
    return StageRecord(parameters, *kinds)


def _check_stage(stage: int, written: StageRecord, record: StageRecord) -> None:
    """Raise InputError where a stage has other parameters, optimizer or scheduler; it names the first that differs."""
    for name in sorted(written.parameters.keys() ^ record.parameters.keys()):
        where = "the checkpoint" if name in written.parameters else "this plan"
        remedy = f"Only {where} has it in stage {stage}. Use the same model, cut into the same stages."
        raise InputError("parameter", name, remedy)
    for name, described in record.parameters.items():
        if written.parameters[name] != described:
            remedy = f"{name} is {described} in this model. Use the same model and precision."
            raise InputError("parameter", written.parameters[name], remedy)
    for what in ("optimizer", "scheduler"):
        there, here = getattr(written, what), getattr(record, what)
        if there is not None and there != here:
            remedy = f"The checkpoint has the states of a {there}. Make one with optimizer(factory, ...) before load."
            raise InputError(what, here, remedy)


def _put_stage(states: StageStates, content: Mapping[str, Any]) -> None:
    """Give a stage its newest parameters, and its optimizer and scheduler their states."""
    written = content["optimizer"]
    if states.optimizer is not None and written is not None:
        groups = written["param_groups"], states.optimizer.param_groups
        there, here = ([len(group["params"]) for group in one] for one in groups)
        if there != here:
            remedy = "Its parameter groups are others than the checkpoint's. Rebuild it as in the original run."
            raise InputError("optimizer", type(states.optimizer).__name__, remedy)
        states.optimizer.load_state_dict(written)
        if states.scheduler is not None and content["scheduler"] is not None:
            states.scheduler.load_state_dict(content["scheduler"])
    with torch.no_grad():
        for name, master in states.masters.items():
            master.data.copy_(content["newest"][name])
