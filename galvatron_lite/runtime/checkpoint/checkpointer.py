"""Writing and reading the checkpoints of a model that is split over the launched processes."""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from galvatron_lite.errors import FileFormatError, GalvatronError, InputError
from galvatron_lite.files import write_text, write_value
from galvatron_lite.folders import Content, begin_folder, content_of, put_in_place, remove_folder
from galvatron_lite.model.batch import tensors_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.checkpoint.manifest import (
    CONFIG,
    FIELD,
    FORMAT,
    META,
    PLAN,
    TORN,
    TRAINING,
    Lineage,
    Manifest,
    TensorRecord,
    check_arrived,
    checked,
    content_errors,
    layout_digest,
    process_file,
    read_manifest,
    read_together,
    survey,
    tensors_file,
    write_sealed,
    write_together,
)
from galvatron_lite.runtime.checkpoint.optimizer import (
    blank_states,
    check_members,
    check_optimizer,
    merged,
    options_of,
    put_options,
    put_schedule,
)
from galvatron_lite.runtime.checkpoint.plain import (
    alone,
    generators,
    put_generators,
    put_state,
    read_plain,
    state_of,
    write_plain,
)
from galvatron_lite.runtime.checkpoint.saving import ExtraState, Resumed
from galvatron_lite.runtime.checkpoint.tensors import (
    StoredTensor,
    assign_pieces,
    check_readable,
    copied,
    merge_records,
    read_tensors,
    stored_tensors,
    write_pieces,
)
from galvatron_lite.runtime.parameters.pieces import (
    LocalShard,
    Parallel,
    held_buffers,
    held_parameters,
    held_states,
    stateful_modules,
)
from galvatron_lite.runtime.peers import Peers, at_first, shares_samples, together
from galvatron_lite.runtime.phases import Steering
from galvatron_lite.runtime.scaling import LossScaler
from galvatron_lite.world import SAVER

TIMEOUT = 1800.0
"""Seconds that a rank waits for the others: more than a slow disk takes."""
_DISK_FULL = (
    "Free some space, or save elsewhere. Earlier checkpoints are unchanged, nothing is left of this attempt, and "
    "training can go on."
)

_LOG = logging.getLogger(__name__)


class SavableModel(Parallel, Protocol):
    """A model that can be saved; see ``ParallelModel``."""

    plan: Plan | None
    step: int
    module: nn.Module
    scaler: LossScaler | None
    steering: Steering | None
    streams: Sequence[Any]  # random streams beside the generators of the process

    def resume_at(self, step: int) -> None:
        """See ``saving.Saving``."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The part of a checkpoint that this process writes."""

    shards: list[LocalShard]  # pieces of tensors
    plain: dict[str, Any]  # contents of files of plain data, by name
    manifest: Manifest  # without tensors and files
    plan: Plan
    config: str | None  # the configuration of a transformers model


@dataclass(frozen=True, slots=True)
class _Contents:
    """The contents of a checkpoint that this process needs; tensors are read later."""

    stored: dict[str, StoredTensor]
    training: dict[str, Any]  # state of all processes
    process: dict[str, Any]  # state of this process
    random: dict[str, Any]  # states of the random generators


class Checkpointer:
    """Writes and reads the checkpoints of a model. Every rank creates one and calls its methods at the same time.

    Args:
        parallel: the model. A plain model has no plan, and loading leaves the random generators unchanged.
        timeout: seconds that a rank waits for the others; None: there is one process only.
    """

    def __init__(self, parallel: SavableModel, timeout: float | None = TIMEOUT) -> None:
        self._parallel, self._peers = parallel, Peers(timeout)
        self._pending: Future[None] | None = None
        self._lineage = Lineage()

    def save(self, place: Path, state: ExtraState, step: int, keep: int | None, asynchronous: bool) -> None:
        """Write a checkpoint; see ``Saving.save``."""
        self.finish()
        if place.is_file():
            raise InputError(FIELD, place, "There is a file of that name: give a folder for this checkpoint alone.")
        snapshot = self._snapshot(state, step, asynchronous)
        if not asynchronous:
            self._write(place, snapshot, keep)
            return
        self._pending = pending = Future[None]()

        def write() -> None:
            try:
                self._write(place, snapshot, keep)
            except BaseException as error:
                _LOG.error("%s", error)  # the process may end without calling ``finish``
                pending.set_exception(error)
            else:
                pending.set_result(None)

        threading.Thread(target=write, name=SAVER).start()

    def finish(self) -> None:
        """Wait until an asynchronous save is on disk, and raise its error if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, folder: Path, state: ExtraState) -> Resumed:
        """Load a checkpoint; see ``Saving.load``."""
        self.finish()
        return self._load(folder, self._verified(folder), state)

    def load_latest(self, folder: Path, state: ExtraState, ignore_damaged: bool = False) -> Resumed | None:
        """Load the newest intact checkpoint of a folder; see ``Saving.load_latest``."""
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
            return self._load(place, manifest, state)
        if errors and not ignore_damaged:
            remedy = "No checkpoint is intact. Repair or delete them, or give ignore_damaged=True to start anew."
            raise InputError(FIELD, folder, f"{' '.join(map(str, errors))} {remedy}")
        self._warn(errors, "Training starts anew.")
        return None

    def _warn(self, errors: Sequence[InputError], instead: str) -> None:
        if errors and self._peers.rank == 0:
            warnings.warn(f"{' '.join(map(str, errors))} {instead}", stacklevel=5)

    def _snapshot(self, state: ExtraState, step: int, asynchronous: bool) -> Snapshot:
        parallel, peers, optimizer = self._parallel, self._peers, state.optimizer
        assert parallel.plan is not None
        states = together(peers, lambda: self._plain_state(state), FIELD)
        if peers.rank == 0:
            _warn_of_unequal([rank_state["extra"] for rank_state in states])
        this = states[peers.rank]
        plain = {process_file(peers.rank): this["process"]}
        if peers.rank == 0:
            plain[TRAINING] = {
                "optimizer": None if optimizer is None else merged([rank_state["options"] for rank_state in states]),
                "scaler": this["scaler"],
                "extra": this["extra"],
                "modules": {
                    path: module_state
                    for rank_state in reversed(states)
                    for path, module_state in rank_state["process"]["modules"].items()
                },
                "steered": step if parallel.steering is None else parallel.steering.step,
            }
        buffers = {buffer.name for buffer in held_buffers(parallel)}
        shards = assign_pieces(self._shards(state), buffers, peers)
        manifest = Manifest(
            FORMAT, step, layout_digest(parallel.plan), peers.size, dict(parallel.entries.names), {}, {},
            optimizer=None if optimizer is None else type(optimizer).__name__,
            scheduler=None if state.scheduler is None else type(state.scheduler).__name__,
        )  # fmt: skip
        config = getattr(getattr(parallel.module, "config", None), "to_json_string", lambda: None)()
        return Snapshot(list(map(copied, shards)) if asynchronous else shards, plain, manifest, parallel.plan, config)

    def _shards(self, state: ExtraState) -> list[LocalShard]:
        """All shards that this rank holds of parameters, buffers and states of the optimizer."""
        shards = [*held_parameters(self._parallel), *held_buffers(self._parallel)]
        return shards if state.optimizer is None else shards + held_states(self._parallel, state.optimizer.state)

    def _plain_state(self, state: ExtraState) -> dict[str, Any]:
        """The state of this process, apart from the tensors that are written in pieces."""
        parallel, optimizer = self._parallel, state.optimizer
        modules = stateful_modules(parallel).items()
        process = {
            "random": generators(),
            "streams": [stream.state() for stream in parallel.streams],
            "data": state_of(state.data, "data"),
            "modules": {path: state_of(module.get_extra_state(), path) for path, module in modules},
            # running statistics depend on the samples of the rank; integer buffers (masks) are equal on all ranks
            "buffers": {
                buffer.name: alone(buffer.tensor).clone()
                for buffer in held_buffers(parallel)
                if buffer.tensor.is_floating_point()
            },
        }
        return {
            "process": process,
            "options": None if optimizer is None else options_of(parallel, optimizer, state.scheduler),
            "scaler": None if parallel.scaler is None else state_of(parallel.scaler, "scaler"),
            "extra": {name: state_of(value, name) for name, value in (state.extra or {}).items()},
        }

    def _write(self, place: Path, snapshot: Snapshot, keep: int | None) -> None:
        with _disk_errors(place, _DISK_FULL):
            write_together(
                self._peers,
                lambda: _begin(place),
                lambda folder: write_files(folder, snapshot, self._peers.rank),
                lambda folder, written: self._complete(folder, place, snapshot, written, keep),
            )

    def _complete(
        self,
        folder: Path,
        place: Path,
        snapshot: Snapshot,
        written: Sequence[tuple[dict[str, Content], dict[str, TensorRecord]]],
        keep: int | None,
    ) -> None:
        """Write the manifest, move the folder to its place, and delete the oldest checkpoints of this training."""
        files = {name: content for contents, _ in written for name, content in contents.items()}
        check_arrived(folder, place, files)
        write_value(folder / PLAN, snapshot.plan)
        files[PLAN] = content_of(folder / PLAN)
        if snapshot.config is not None:
            write_text(folder / CONFIG, snapshot.config)
            files[CONFIG] = content_of(folder / CONFIG)
        tensors = merge_records([records for _, records in written])
        manifest = self._lineage.record(snapshot.manifest, place.parent)
        write_sealed(folder, replace(manifest, tensors=tensors, files=files))
        put_in_place(folder, place)
        if keep is not None:
            for old in self._lineage.checkpoints(place.parent)[keep:]:
                if old != place:
                    remove_folder(old)

    def _verified(self, folder: Path) -> Manifest:
        """Read the manifest and check that all files are intact; the ranks share the files."""
        peers = self._peers

        def read() -> Manifest:
            manifest = read_manifest(folder)
            for number, name in enumerate(manifest.files):
                if number % peers.size == peers.rank:
                    checked(folder, manifest, name)
            return manifest

        return read_together(peers, folder, read)

    def _load(self, folder: Path, manifest: Manifest, state: ExtraState) -> Resumed:
        """Load a checkpoint with intact files.

        The ranks agree that all can load it before any state is changed, and again before tensors are changed.
        """
        parallel = self._parallel
        exact = parallel.plan is not None and manifest.layout == layout_digest(parallel.plan)
        contents = self._agreed(folder, lambda: self._read(folder, manifest, state, exact))
        restore = _backup(parallel, state)
        try:
            self._agreed(folder, lambda: self._put(manifest, state, contents, exact))
        except GalvatronError:
            restore()
            raise
        shards = self._shards(state)
        with _disk_errors(folder, TORN):
            self._agreed(folder, lambda: read_tensors(shards, contents.stored))
        if exact:
            for buffer in held_buffers(parallel):
                if buffer.name in contents.process["buffers"]:
                    buffer.tensor.copy_(contents.process["buffers"][buffer.name])
        for runtime in parallel.runtimes:
            runtime.updates.take()
            runtime.updates.drop_gradients()  # they belong to the previous parameters
        self._lineage.follow(manifest)
        parallel.resume_at(manifest.step)
        if parallel.steering is not None:
            parallel.steering.step = contents.training["steered"]
        return Resumed(folder, manifest.step, contents.process["data"], contents.training["extra"], exact)

    def _read(self, folder: Path, manifest: Manifest, state: ExtraState, exact: bool) -> _Contents:
        """Read and check what this rank needs, without changing anything."""
        parallel, rank = self._parallel, self._peers.rank
        check_optimizer(manifest, state.optimizer, state.scheduler)
        names = parallel.entries.names
        for name, first in manifest.names.items():
            if name not in names or (first == name != names[name]):
                remedy = "The checkpoint has it, and this model has none, or one tied to another. Use the same model."
                raise InputError("tensor", name, remedy)
        stored, training = stored_tensors(folder, manifest), read_plain(folder / TRAINING)
        process = read_plain(folder / process_file(rank if manifest.processes == self._peers.size else 0))
        buffers = held_buffers(parallel)
        check_readable([*held_parameters(parallel), *buffers], stored)
        for buffer in buffers if exact else ():
            if process["buffers"].get(buffer.name, buffer.tensor).shape != buffer.tensor.shape:
                remedy = "The checkpoint has it of another shape. Use one of the same model."
                raise InputError("buffer", buffer.name, remedy)
        if state.optimizer is not None:
            check_members(parallel, state.optimizer, training["optimizer"])
        random = process
        if parallel.plan is not None and not exact:  # ranks that share samples must draw the same numbers
            source = 0 if shares_samples(parallel.plan) else rank % manifest.processes
            random = read_plain(folder / process_file(source))
        _ = process["data"], training["extra"]  # raises KeyError before anything is changed
        return _Contents(stored, training, process, random["random"])

    def _put(self, manifest: Manifest, state: ExtraState, contents: _Contents, exact: bool) -> None:
        """Restore everything but the values of tensors."""
        parallel, optimizer = self._parallel, state.optimizer
        training, process = contents.training, contents.process
        if optimizer is not None:
            saved = training["optimizer"]
            put_options(parallel, optimizer, saved, blank_states(parallel, manifest, saved["values"]))
            check_readable(held_states(parallel, optimizer.state), contents.stored)
            if state.scheduler is not None:
                put_schedule(parallel, optimizer, state.scheduler, saved)
        if training["scaler"] is not None:
            put_state(parallel.scaler, training["scaler"])
        if parallel.plan is not None:
            put_generators(contents.random)
        if exact:
            for stream, saved_stream in zip(parallel.streams, process["streams"], strict=True):
                stream.set_state(saved_stream)
        put_state(state.data, process["data"])
        states = (process if exact else training).get("modules", {})  # early checkpoints have none
        for path, module in stateful_modules(parallel).items():
            if path in states:
                module.set_extra_state(states[path])
        for name, target in (state.extra or {}).items():
            if name in training["extra"]:
                put_state(target, training["extra"][name])

    def _agreed(self, folder: Path, act: Callable[[], Any]) -> Any:
        """Run a function on all ranks and return this rank's result; if it fails on any rank, all raise an error."""
        result: list[Any] = []  # not returned to ``together``, which would send it to the other ranks

        def guarded() -> None:
            with content_errors(folder):
                result.append(act())

        together(self._peers, guarded, FIELD)
        return result[0]


def write_files(folder: Path, snapshot: Snapshot, rank: int) -> tuple[dict[str, Content], dict[str, TensorRecord]]:
    """Write the files of this process. Return their checksums by name, and the records of the tensors in them."""
    name = tensors_file(rank)
    content, records = write_pieces(folder / name, snapshot.shards)
    plain = {name: write_plain(folder / name, content) for name, content in snapshot.plain.items()}
    return {name: content, **plain}, records


def _warn_of_unequal(extras: Sequence[Mapping[str, Any]]) -> None:
    """Warn of extra state whose tensors differ between ranks, as only those of rank 0 are saved."""
    for name, first in extras[0].items():
        for rank, extra in enumerate(extras):
            pairs = zip_longest(tensors_of(first), tensors_of(extra.get(name)))
            if any(one is None or other is None or not torch.equal(one, other) for one, other in pairs):
                warnings.warn(
                    f"Of extra[{name!r}] the tensors of rank 0 are saved, and those of rank {rank} are others. Give "
                    "what each process has for itself as data=.",
                    stacklevel=8,
                )
                break


def _begin(place: Path) -> Path:
    """Create the folder that the files are written to before they are complete."""
    if place.exists() and not (place / META).is_file() and any(place.iterdir()):
        remedy = "It holds something else. Give a folder of this checkpoint alone, as checkpoints/step-100."
        raise InputError("folder", place, remedy)
    return begin_folder(place, seal=META)


@contextmanager
def _disk_errors(place: Path, remedy: str) -> Iterator[None]:
    """Add the checkpoint and a remedy to errors of the disk."""
    try:
        yield
    except InputError as error:
        if error.field != FIELD:
            raise
        raise InputError(FIELD, place, f"{error.remedy} {remedy}") from error


def _backup(parallel: SavableModel, state: ExtraState) -> Callable[[], None]:
    """Return a function that undoes ``_put``, except for objects in ``extra``."""
    random, optimizer = generators(), state.optimizer
    streams = [(stream, stream.state()) for stream in parallel.streams]
    # loading a state replaces both objects
    before = None if optimizer is None else (optimizer.state, optimizer.param_groups)
    targets: list[Any] = [
        target for target in (state.scheduler, parallel.scaler, state.data) if hasattr(target, "load_state_dict")
    ]
    states = [(target.load_state_dict, copy.deepcopy(target.state_dict())) for target in targets]
    modules = stateful_modules(parallel).values()
    states += [(module.set_extra_state, copy.deepcopy(module.get_extra_state())) for module in modules]

    def restore() -> None:
        put_generators(random)
        for stream, stream_state in streams:
            stream.set_state(stream_state)
        if optimizer is not None and before is not None:
            optimizer.state, optimizer.param_groups = before
        for put, before_loading in states:
            with suppress(Exception):
                put(before_loading)

    return restore


def _checkpoints(folder: Path) -> tuple[list[tuple[Path, int]], list[FileFormatError]]:
    """The checkpoints of a folder with their training steps, newest first, and the errors of damaged ones."""
    if (folder / META).exists():
        raise InputError("folder", folder, "It is a checkpoint itself. Take it with load(folder).")
    if folder.exists() and not folder.is_dir():
        raise InputError("folder", folder, "It is a file. Give the folder of the checkpoints.")
    readable, damaged = survey(Manifest, folder, FORMAT)
    return [(place, manifest.step) for place, manifest in readable], damaged
