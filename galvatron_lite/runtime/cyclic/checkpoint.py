"""Checkpoints of cyclic data parallelism: what the next training step needs, delay included, in one folder.

All processes write into one folder, which they all must see. It is written beside its place and moved there once all of
it is on the disk, so a process or a machine that is lost leaves the checkpoints from before as they were. It can be
continued in any setting with as many workers and the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.folders import Content, begin_folder, put_in_place, remove_folder
from galvatron_lite.parallelism.cyclic.draws import SeededDraws
from galvatron_lite.runtime.checkpoint.plain import put_generators, read_plain, write_plain
from galvatron_lite.runtime.checkpoint.sealed import checked
from galvatron_lite.runtime.cyclic.checkpoint_fit import FIELD, check_rule, check_stage
from galvatron_lite.runtime.cyclic.checkpoint_state import (
    older_values,
    process_content,
    put_buffers,
    put_rest,
    put_stage,
    stage_content,
    stage_record,
    uses_older,
    writer_of,
)
from galvatron_lite.runtime.cyclic.manifest import (
    FORMAT,
    CyclicManifest,
    StageRecord,
    check_whole,
    next_sequence,
    process_file,
    read_manifest,
    stage_file,
    write_manifest,
)
from galvatron_lite.runtime.cyclic.setup import CyclicRuntime
from galvatron_lite.runtime.cyclic.state import WholeState, between
from galvatron_lite.runtime.peers import Peers, at_first, together


@dataclass(frozen=True, slots=True)
class _Written:
    """What a process wrote: files by name, and what the manifest says of its stages."""

    files: dict[str, Content]
    stages: dict[int, StageRecord]


@dataclass(frozen=True, slots=True)
class CyclicCheckpointer:
    """Writes and reads checkpoints of a process between whose passes nothing is left."""

    runtime: CyclicRuntime  # of the process
    whole: WholeState  # knows the entries of the model's state
    peers: Peers  # all processes

    def write(self, place: Path, step: int) -> None:
        """Write a checkpoint before training step ``step``; all processes call it.

        Raises:
            InputError: some process could not; what was there before is as it was, and training can go on.
            LaunchError: a process is gone.
        """
        folder = at_first(self.peers, lambda: begin_folder(place), FIELD)
        try:
            parts = together(self.peers, lambda: self._write_own(folder, step), FIELD)
            at_first(self.peers, lambda: self._finish(folder, place, step, parts), FIELD)
        except GalvatronError:
            if self.peers.rank == 0:
                remove_folder(folder)
            raise

    def read(self, folder: Path) -> int:
        """Take a checkpoint; returns its training step. All processes call it.

        Raises:
            InputError: it is damaged, or of another model, rule or number of workers; nothing is changed.
            LaunchError: a process is gone.
        """
        manifest, *others = together(self.peers, lambda: self._fitting(folder), FIELD)
        if any(other.digest != manifest.digest for other in others):
            raise InputError(FIELD, folder, "Processes see different ones under this name. Give all the same folder.")
        together(self.peers, lambda: self._take(folder, manifest), FIELD)
        return manifest.step

    def _write_own(self, folder: Path, step: int) -> _Written:
        """This process's files."""
        executor, process = self.runtime.executor, self.runtime.process
        rest = self.whole.rest(self.runtime)
        contents = {process_file(process): partial(process_content, self.runtime, rest)}
        own = {
            stage: states
            for stage, states in executor.states.items()
            if writer_of(executor.programme, stage, step) == process
        }
        contents |= {stage_file(stage): partial(stage_content, states) for stage, states in own.items()}
        files = {name: write_plain(folder / name, make()) for name, make in contents.items()}
        return _Written(files, {stage: stage_record(states) for stage, states in own.items()})

    def _finish(self, folder: Path, place: Path, step: int, parts: list[_Written]) -> None:
        """Write the manifest, and move the folder to its place."""
        files = {name: content for part in parts for name, content in part.files.items()}
        for name in files:
            if not (folder / name).is_file():
                raise InputError(FIELD, place, f"{name} did not come here. Give a folder that all processes see.")
        stages = {stage: record for part in parts for stage, record in part.stages.items()}
        programme, draws = self.runtime.executor.programme, self.runtime.executor.draws
        manifest = CyclicManifest(
            FORMAT, programme.rule, programme.setting, programme.workers, step, programme.base,
            draws.seed if isinstance(draws, SeededDraws) else None, programme.processes,
            tuple(record for _, record in sorted(stages.items())), self.whole.names, files, next_sequence(place.parent),
        )  # fmt: skip
        write_manifest(folder, manifest)
        put_in_place(folder, place)

    def _fitting(self, folder: Path) -> CyclicManifest:
        """The manifest of a checkpoint that this process can take; the files that it needs are whole."""
        manifest = read_manifest(folder)
        executor = self.runtime.executor
        check_rule(folder, manifest, executor.programme.rule, executor.programme.workers)
        for stage, states in executor.states.items():
            check_stage(stage, manifest.stages[stage], stage_record(states))
        stages = [stage_file(stage) for stage in executor.states]
        for name in [*stages, *(process_file(process) for process in self._sources(manifest))]:
            checked(folder, manifest, name)
        return manifest

    def _sources(self, manifest: CyclicManifest) -> list[int]:
        """Processes whose buffers this one takes: its own, or in another setting all that ran its stages."""
        if manifest.setting is self.runtime.executor.programme.setting:
            return [self.runtime.process]
        return list(range(manifest.processes))

    def _take(self, folder: Path, manifest: CyclicManifest) -> None:
        executor, step = self.runtime.executor, manifest.step
        programme = replace(executor.programme, begin=step, base=manifest.base)
        older = dict[int, dict[str, Tensor]]()
        for stage, states in executor.states.items():
            content = read_plain(folder / stage_file(stage), lazily=not states.is_home)
            put_stage(states, content)
            if uses_older(programme, self.runtime.process, stage, step):
                older[stage] = older_values(states, content)
        executor.restart(step, manifest.base, older)
        if manifest.seed is not None:
            executor.draws = SeededDraws(manifest.seed, self.runtime.device)
        contents = [read_plain(folder / process_file(process)) for process in self._sources(manifest)]
        put_buffers(self.runtime, contents)
        put_rest(self.whole.rest(self.runtime), contents[0])
        if manifest.setting is programme.setting:
            put_generators(contents[0]["random"])


def flushed_state(folder: Path | str) -> dict[str, Tensor]:
    """The model of a checkpoint, whole and without its delay, for any other plan or for one process.

    It is what ``full_state_dict()`` gave just after it was written: all updates are in it; running statistics are the
    mean of the processes'. Optimizer states are left out.

    Raises:
        FileFormatError: the checkpoint is damaged.
    """
    place = Path(folder)
    manifest = check_whole(place)
    processes = [read_plain(place / process_file(process)) for process in range(manifest.processes)]
    found: dict[str, Tensor] = dict(processes[0]["rest"])
    for stage in range(len(manifest.stages)):
        found |= read_plain(place / stage_file(stage))["newest"]
        known = [one["buffers"][stage] for one in processes if stage in one["buffers"]]
        for name in known[0] if known else ():
            found[name] = between([one[name] for one in known if name in one])
    return {name: found[first] for name, first in manifest.names.items()}
