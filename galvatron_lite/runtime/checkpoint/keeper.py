"""Writing and reading checkpoints of a model that is split over the launched world."""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from galvatron_lite.errors import FileFormatError, GalvatronError, InputError, LaunchError
from galvatron_lite.folders import remove_folder
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.checkpoint.content import (
    blank_states,
    check_optimizer,
    check_own_buffers,
    give,
    own_content,
    put_own_buffers,
    state_of,
    states_of,
)
from galvatron_lite.runtime.checkpoint.interfaces import ExtraState, Resumed
from galvatron_lite.runtime.checkpoint.manifest import (
    FORMAT,
    TRAINING,
    Lineage,
    Manifest,
    layout_digest,
    process_file,
    read_manifest,
)
from galvatron_lite.runtime.checkpoint.options import check_members, merged, options_of, put_options, put_schedule
from galvatron_lite.runtime.checkpoint.plain import generators, put_generators, read_plain
from galvatron_lite.runtime.checkpoint.planners import PiecesLoader, PiecesSaver, apportioned, check_loadable
from galvatron_lite.runtime.checkpoint.sealed import META, TORN, checked, content_errors, survey
from galvatron_lite.runtime.checkpoint.storage import FolderWriter, PiecesReader, metadata_of
from galvatron_lite.runtime.checkpoint.written import (
    FIELD,
    Snapshot,
    begin,
    config_text,
    copied_held,
    finish_folder,
    write_own,
)
from galvatron_lite.runtime.peers import ProcessPeers, at_first, together
from galvatron_lite.runtime.phases import Steering
from galvatron_lite.runtime.pieces import Parallel, held_buffers, held_parameters, held_states
from galvatron_lite.runtime.scaling import LossScaler
from galvatron_lite.world import SAVER

TIMEOUT = 1800.0
"""Seconds after which a rank that shows nothing is an error: a slow disk is none."""
ROOM = (
    "Free some space, or save elsewhere. What was saved before is as it was, nothing is left of this attempt, and "
    "training can go on."
)

_LOG = logging.getLogger(__name__)


class SavableModel(Parallel, Protocol):
    """A model that can be saved; see ``ParallelModel``."""

    plan: Plan
    step: int
    module: torch.nn.Module
    scaler: LossScaler | None
    steering: Steering | None


class Checkpointer:
    """Writes and reads the checkpoints of a model; every rank makes one at the same time.

    Args:
        parallel: the model.
        timeout: seconds after which a rank that shows nothing is an error.
    """

    def __init__(self, parallel: SavableModel, timeout: float = TIMEOUT) -> None:
        self._parallel, self._peers = parallel, ProcessPeers(timeout)
        self._pending: Future[None] | None = None
        self._lineage = Lineage()

    def save(self, place: Path, extra_state: ExtraState, step: int, keep: int | None, asynchronous: bool) -> None:
        """Write a checkpoint; all ranks call it.

        Raises:
            InputError: it, or the one before that was written meanwhile, could not be written.
            LaunchError: a process is gone.
        """
        self.finish()
        if place.is_file():
            raise InputError(FIELD, place, "There is a file of that name: give a folder for this checkpoint alone.")
        snapshot = self._snapshot(extra_state, step, asynchronous)
        if not asynchronous:
            self._write(place, snapshot, keep)
            return
        self._pending = pending = Future[None]()
        thread = threading.Thread(target=_run, args=(lambda: self._write(place, snapshot, keep), pending), name=SAVER)
        thread.start()

    def finish(self) -> None:
        """Wait until what is being written is on the disk; all ranks call it. Raises what ``save`` does."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, folder: Path, extra_state: ExtraState) -> Resumed:
        """Take a checkpoint; all ranks call it.

        Raises:
            InputError: it is damaged, or of another model or optimizer; nothing is changed.
            LaunchError: a process is gone.
        """
        self.finish()
        return self._take(folder, self._verified(folder), extra_state)

    def load_latest(self, folder: Path, extra_state: ExtraState, ignore_damaged: bool = False) -> Resumed | None:
        """Take the newest whole checkpoint of a folder; None: there is none. All ranks call it.

        Raises:
            InputError: there are damaged ones alone, and ``ignore_damaged`` is not set; or what ``load`` raises.
        """
        self.finish()
        readable, damaged = at_first(self._peers, lambda: _checkpoints(folder), FIELD)
        errors: list[InputError] = list(damaged)
        for place, step in readable:
            try:
                manifest = self._verified(place)
            except InputError as error:
                errors.append(error)
                continue
            self._warn(errors, f"{place.name} (step {step}) is loaded instead.")
            return self._take(place, manifest, extra_state)
        if errors and not ignore_damaged:
            remedy = "No checkpoint is whole. Repair or delete them, or give ignore_damaged=True to begin anew."
            raise InputError(FIELD, folder, f"{' '.join(map(str, errors))} {remedy}")
        self._warn(errors, "Training begins anew.")
        return None

    def _warn(self, errors: Sequence[InputError], instead: str) -> None:
        if errors and self._peers.rank == 0:
            warnings.warn(f"{' '.join(map(str, errors))} {instead}", stacklevel=5)

    def _snapshot(self, extra_state: ExtraState, step: int, copied: bool) -> Snapshot:
        parallel, peers = self._parallel, self._peers
        parts = together(peers, lambda: self._plain(extra_state), FIELD)
        own = parts[peers.rank]
        plain = {process_file(peers.rank): own["own"]}
        if peers.rank == 0:
            options = None if extra_state.optimizer is None else merged([part["options"] for part in parts])
            steps = step if parallel.steering is None else parallel.steering.step
            plain[TRAINING] = {"optimizer": options, "scaler": own["scaler"], "extra": own["extra"], "steered": steps}
        buffers = held_buffers(parallel)
        held = [*held_parameters(parallel), *buffers]
        held += [] if extra_state.optimizer is None else held_states(parallel, extra_state.optimizer)
        first = {one.name for one in buffers}
        mine = apportioned(held, first, peers)
        manifest = Manifest(
            FORMAT, step, layout_digest(parallel.plan), dist.get_world_size(), dict(parallel.entries.names), {}, {},
            _kind(extra_state.optimizer), _kind(extra_state.scheduler),
        )  # fmt: skip
        return Snapshot(
            [copied_held(one) for one in mine] if copied else mine,
            plain,
            manifest,
            parallel.plan,
            config_text(parallel.module),
        )

    def _plain(self, extra_state: ExtraState) -> dict[str, Any]:
        parallel = self._parallel
        options = (
            None
            if extra_state.optimizer is None
            else options_of(parallel, extra_state.optimizer, extra_state.scheduler)
        )
        scaler = parallel.scaler
        return {
            "own": own_content(parallel, extra_state.data),
            "options": options,
            "scaler": None if scaler is None else state_of(scaler, "scaler"),
            "extra": states_of(extra_state.extra),
        }

    def _write(self, place: Path, snapshot: Snapshot, keep: int | None) -> None:
        peers = self._peers
        folder = at_first(peers, lambda: begin(place), FIELD)
        try:
            writer = FolderWriter(folder, peers.rank)
            with _explained(place, ROOM):
                save({}, storage_writer=writer, planner=PiecesSaver(snapshot.held), process_group=peers.group)
            with _explained(place, ROOM):
                parts = together(peers, lambda: write_own(folder, snapshot, writer, peers.rank), FIELD)
                at_first(
                    peers, lambda: finish_folder(folder, place, snapshot, writer, parts, keep, self._lineage), FIELD
                )
        except GalvatronError:
            if peers.rank == 0:
                remove_folder(folder)
            raise

    def _verified(self, folder: Path) -> Manifest:
        """The manifest of a checkpoint whose files are whole; each rank looks at some."""
        peers = self._peers

        def look() -> Manifest:
            manifest = read_manifest(folder)
            for number, name in enumerate(manifest.files):
                if number % dist.get_world_size() == peers.rank:
                    checked(folder, manifest, name)
            return manifest

        manifest, *others = together(peers, look, FIELD)
        if any(other.digest != manifest.digest for other in others):
            raise InputError(FIELD, folder, "Processes see different ones under this name. Give all the same folder.")
        return manifest

    def _take(self, folder: Path, manifest: Manifest, extra_state: ExtraState) -> Resumed:
        """Take a checkpoint whose files are whole. Ranks agree before anything is changed, and before tensors are."""
        parallel, optimizer = self._parallel, extra_state.optimizer
        exact = manifest.layout == layout_digest(parallel.plan)
        source = self._peers.rank if manifest.processes == dist.get_world_size() else 0
        read: list[tuple[Metadata, dict[str, Any], dict[str, Any], dict[str, Any], Resumed]] = []

        def look() -> None:
            check_optimizer(manifest, optimizer, extra_state.scheduler)
            metadata = metadata_of(folder, manifest)
            training, own = read_plain(folder / TRAINING), read_plain(folder / process_file(source))
            check_loadable([*held_parameters(parallel), *held_buffers(parallel)], metadata)
            if exact:
                check_own_buffers(parallel, own)
            if optimizer is not None:
                check_members(parallel, optimizer, training["optimizer"])
            random = own if exact else read_plain(folder / process_file(self._random_source(manifest)))
            resumed = Resumed(folder, manifest.step, own["data"], training["extra"], exact)
            read.append((metadata, training, own, random["random"], resumed))

        self._agreed(folder, look)
        ((metadata, training, own, random, resumed),) = read
        go_back = _backed_up(parallel, extra_state)

        def put() -> None:
            if optimizer is not None:
                blanks = blank_states(parallel, manifest, training["optimizer"]["values"])
                put_options(parallel, optimizer, training["optimizer"], blanks)
                check_loadable(held_states(parallel, optimizer), metadata)
                if extra_state.scheduler is not None:
                    put_schedule(parallel, optimizer, extra_state.scheduler, training["optimizer"])
            if training["scaler"] is not None:
                give(parallel.scaler, training["scaler"])
            put_generators(random)
            if exact:
                for stream, state in zip(getattr(parallel, "streams", ()), own["streams"], strict=True):
                    stream.set_state(state)
            give(extra_state.data, own["data"])
            for name, target in (extra_state.extra or {}).items():
                if name in training["extra"]:
                    give(target, training["extra"][name])

        try:
            self._agreed(folder, put)
        except GalvatronError:
            go_back()
            raise
        held = [*held_parameters(parallel), *held_buffers(parallel)]
        held += [] if optimizer is None else held_states(parallel, optimizer)
        with _explained(folder, TORN), torch.no_grad():
            load({}, storage_reader=PiecesReader(metadata), planner=PiecesLoader(held), process_group=self._peers.group)
            if exact:
                put_own_buffers(parallel, own)
            for runtime in parallel.runtimes:
                runtime.updates.take()
        self._lineage.follow(manifest)
        parallel.step = manifest.step
        if parallel.steering is not None:
            parallel.steering.step = training["steered"]
        return resumed

    def _agreed(self, folder: Path, act: Callable[[], None]) -> None:
        """Do this rank's part of loading; no rank goes on unless all could."""

        def shielded() -> None:
            with content_errors(folder):
                act()

        together(self._peers, shielded, FIELD)

    def _random_source(self, manifest: Manifest) -> int:
        """The process whose generators this one goes on with under another plan: by turns; that of rank 0 where ranks
        that have the same samples must draw alike.
        """
        runs = [run for stage in self._parallel.plan.stages for run in stage.runs]
        alike = any(run.strategy.devices > run.strategy.batch_degree for run in runs)
        return 0 if alike else self._peers.rank % manifest.processes


def _backed_up(parallel: SavableModel, extra_state: ExtraState) -> Callable[[], None]:
    """What puts everything back that is changed before tensors are; what ``extra`` names is not."""
    random = generators()
    streams = [(stream, stream.state()) for stream in getattr(parallel, "streams", ())]
    optimizer = extra_state.optimizer
    # torch replaces both when it takes a state
    before = None if optimizer is None else (optimizer.state, optimizer.param_groups)
    takers: list[Any] = [
        one for one in (extra_state.scheduler, parallel.scaler, extra_state.data) if hasattr(one, "load_state_dict")
    ]
    states = [(one, copy.deepcopy(one.state_dict())) for one in takers]

    def go_back() -> None:
        put_generators(random)
        for stream, state in streams:
            stream.set_state(state)
        if optimizer is not None and before is not None:
            optimizer.state, optimizer.param_groups = before
        for one, state in states:
            with suppress(Exception):
                one.load_state_dict(state)

    return go_back


def _checkpoints(folder: Path) -> tuple[list[tuple[Path, int]], list[FileFormatError]]:
    """The checkpoints of a folder and their training steps, the newest first; what is wrong with others."""
    if (folder / META).exists():
        raise InputError("folder", folder, "It is a checkpoint itself. Take it with load(folder).")
    if folder.exists() and not folder.is_dir():
        raise InputError("folder", folder, "It is a file. Give the folder of the checkpoints.")
    readable, damaged = survey(Manifest, folder, FORMAT)
    return [(place, manifest.step) for place, manifest in readable], damaged


@contextmanager
def _explained(place: Path, remedy: str) -> Iterator[None]:
    """Turns the errors of ``torch.distributed.checkpoint``, of the disk and of lost processes into ours."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, InputError):
            raise InputError(cause.field, cause.value, f"Rank {rank}: {cause.remedy}") from error
        reason = cause.strerror if isinstance(cause, OSError) else f"{type(cause).__name__}: {cause}"
        raise InputError(FIELD, place, f"Rank {rank}: {reason}. {remedy}") from error
    except InputError as error:
        if error.field != FIELD:
            raise
        raise InputError(FIELD, place, f"{error.remedy} {remedy}") from error
    except GalvatronError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise LaunchError(
            f"Checkpoint {place}: another process is gone, or was silent for too long ({reason}). Start all processes "
            "again and resume with load_latest(folder): what was saved before is as it was."
        ) from error


def _run(act: Callable[[], None], pending: Future[None]) -> None:
    try:
        act()
    except BaseException as error:
        # whoever waits is told; a process that ends without waiting has it in its log
        _LOG.error("%s", error)
        pending.set_exception(error)
    else:
        pending.set_result(None)


def _kind(one: object) -> str | None:
    return None if one is None else type(one).__name__
