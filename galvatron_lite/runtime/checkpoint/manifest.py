"""The manifest of a checkpoint, and what is common to the checkpoints of all kinds of models.

A checkpoint is a folder of these files:

    meta.json            the manifest: training step, names, shapes and pieces of tensors, checksums of the other files
    rank-0.safetensors   for each process, the pieces of tensors that it wrote
    rank-0.pt            for each process, its random generators, position in the data and running statistics
    training.pt          options of the optimizer, scheduler, loss scaler, extra state
    plan.json            the plan under which it was written
    config.json          the configuration of a transformers model
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from galvatron_lite.errors import FileFormatError, GalvatronError, InputError
from galvatron_lite.files import Strict, read_value, to_data, write_value
from galvatron_lite.folders import Content, check_file, remove_folder
from galvatron_lite.limits import Devices, Size
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.peers import Peers, at_first, together

META = "meta.json"
TRAINING, PLAN, CONFIG = "training.pt", "plan.json", "config.json"
FORMAT = 1
FIELD = "checkpoint"
TORN = "The checkpoint is damaged: delete it and resume from the one before, which load_latest(folder) finds."
_CHECKPOINT_FILE = re.compile(r"meta\.json|(rank|process|stage)-\d+\.(pt|safetensors)")
"""Names of files that make a folder a checkpoint, damaged or not."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Part = TypeVar("Part")
Kind = TypeVar("Kind")
"""A manifest: a frozen dataclass with ``format``, ``step``, ``sequence``, ``files`` and ``digest``."""


def write_sealed(folder: Path, manifest: Any) -> None:
    """Write a manifest with its checksum."""
    write_value(folder / META, replace(manifest, digest=_digest(manifest)))


def read_sealed(kind: type[Kind], folder: Path, version: int) -> Kind:
    """Read and check the manifest of a folder, without looking at the other files.

    Raises:
        FileFormatError: the folder or the manifest is missing, changed, or of another kind or format.
    """
    if not folder.is_dir():
        remedy = "There is no such folder. Give one that save(folder) wrote; load_latest(folder) finds the newest."
        raise FileFormatError("checkpoint", folder, remedy)
    if not (folder / META).is_file():
        raise FileFormatError("checkpoint", folder, _no_manifest(folder))
    manifest: Any = read_value(kind, folder / META)
    if manifest.digest != _digest(manifest):
        raise FileFormatError("file", folder / META, f"Its content has changed since it was written. {TORN}")
    if manifest.format != version:
        remedy = f"Format {version} can be read. Use the version of galvatron_lite that wrote it."
        raise FileFormatError("checkpoint", folder, remedy)
    if manifest.step < 0:
        raise FileFormatError("file", folder / META, f"Its step is {manifest.step}. {TORN}")
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name) or name == META:
            raise FileFormatError("file", folder / META, f"It names {name!r}, which is no file of this folder. {TORN}")
    result: Kind = manifest
    return result


def checked(folder: Path, manifest: Any, name: str) -> Path:
    """Return the path of a file of a checkpoint; raise ``FileFormatError`` if its content has changed."""
    return check_file(folder / name, manifest.files[name], TORN)


def check_all(folder: Path, manifest: Kind) -> Kind:
    """Return the manifest; raise ``FileFormatError`` if the content of any file has changed."""
    for name in manifest.files:  # type: ignore[attr-defined]
        checked(folder, manifest, name)
    return manifest


@contextmanager
def content_errors(folder: Path) -> Iterator[None]:
    """Turn unexpected errors from the contents of an intact checkpoint into ``FileFormatError``."""
    try:
        yield
    except (GalvatronError, OSError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise FileFormatError("checkpoint", folder, f"Its contents do not fit ({reason}). Use another one.") from error


def survey(kind: type[Kind], folder: Path, version: int) -> tuple[list[tuple[Path, Kind]], list[FileFormatError]]:
    """Return the checkpoints of a folder, newest first, and the errors of those whose manifest cannot be read.

    The newest is the one written last, which may have fewer steps than others if training went back to an earlier
    checkpoint. Checkpoints without a sequence come after the others, ordered by steps. Intact checkpoints that a lost
    process left under a temporary name are included, after others with the same sequence and step.
    """
    readable, damaged = list[tuple[Path, Any]](), list[FileFormatError]()
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            if place.is_dir() and any(_CHECKPOINT_FILE.fullmatch(file.name) for file in place.iterdir()):
                readable.append((place, read_sealed(kind, place, version)))
        except FileFormatError as error:
            damaged += [] if place.name.startswith(".") else [error]
        except OSError as error:
            damaged.append(FileFormatError("checkpoint", place, f"It cannot be read ({error.strerror})."))
    readable.sort(key=lambda item: (item[1].sequence, item[1].step, not item[0].name.startswith(".")), reverse=True)
    return readable, damaged


def _digest(manifest: Any) -> str:
    data = to_data(replace(manifest, digest=""))
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _no_manifest(folder: Path) -> str:
    inside = sorted(path.parent.name for path in folder.glob(f"*/{META}"))
    if inside:
        newest = ", ".join(inside[-3:])
        return f"It is a folder of checkpoints ({newest}): give one of them, or use load_latest(folder)."
    return f"There is no {META} in it, so it is incomplete. {TORN}"


@dataclass(frozen=True, slots=True)
class Piece(Strict):
    """A box of items of a tensor in one file."""

    at: tuple[Size, ...]  # position of the first item in the tensor, by dim
    size: tuple[Size, ...]  # extent by dim
    file: str  # contains the items under the key ``key_of``


@dataclass(frozen=True, slots=True)
class TensorRecord(Strict):
    """A tensor in pieces, which contain each item once."""

    dtype: str  # such as ``float32``
    shape: tuple[Size, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Manifest(Strict):
    """The manifest of a checkpoint."""

    format: int
    step: Size  # training steps done
    layout: str  # ``layout_digest`` of the plan
    processes: Devices  # number of processes that wrote it
    names: dict[str, str]  # entries of the model's ``state_dict()``, and the first name of the tensor behind each
    # parameters and buffers by their first name, states of the optimizer as ``PARAMETER/exp_avg``
    tensors: dict[str, TensorRecord]
    files: dict[str, Content]
    optimizer: str | None = None  # class name
    scheduler: str | None = None  # class name
    run: str = ""  # id of the training that wrote it; "" in checkpoints of versions without it
    sequence: Size = 0  # counts checkpoints in the order in which they were written
    # ids of the trainings that it continues, and the last sequence of each that precedes it
    ancestors: dict[str, Size] = field(default_factory=dict)
    digest: str = ""  # checksum of the other fields


def tensors_file(rank: int) -> str:
    """Return the name of the file with the pieces of tensors that a process wrote."""
    return f"rank-{rank}.safetensors"


def process_file(rank: int) -> str:
    """Return the name of the file with the other state of a process."""
    return f"rank-{rank}.pt"


def key_of(name: str, at: tuple[int, ...]) -> str:
    """Return the key of a piece in its file."""
    return f"{name}@{','.join(map(str, at))}"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint; raise ``FileFormatError`` if it is missing or damaged."""
    manifest = read_sealed(Manifest, folder, FORMAT)
    needed = {TRAINING, *(process_file(rank) for rank in range(min(manifest.processes, len(manifest.files) + 1)))}
    unknown = {first for first in manifest.names.values() if first not in manifest.tensors}
    if unknown or not needed <= manifest.files.keys():
        missing = ", ".join(sorted(unknown or needed - manifest.files.keys())[:5])
        raise FileFormatError("file", folder / META, f"It does not describe a checkpoint: {missing}. {TORN}")
    return manifest


def check_files(folder: Path) -> Manifest:
    """Check all files of a checkpoint and return its manifest; raise ``FileFormatError`` for the first damaged file."""
    return check_all(folder, read_manifest(folder))


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder whose manifest can be read, newest first."""
    return [place for place, _ in survey(Manifest, folder, FORMAT)[0]]


class Lineage:
    """Identifies the training that checkpoints belong to, and numbers its checkpoints."""

    def __init__(self) -> None:
        self._run, self._sequence, self._ancestors = uuid4().hex, 0, dict[str, int]()
        self._surveyed = set[Path]()

    def follow(self, manifest: Manifest) -> None:
        """Begin a new training that continues a checkpoint, but not the later checkpoints of the same training."""
        self._run, self._ancestors = uuid4().hex, dict(manifest.ancestors)
        if manifest.run:
            self._ancestors[manifest.run] = manifest.sequence
        self._surveyed.clear()

    def record(self, manifest: Manifest, folder: Path) -> Manifest:
        """Return the manifest with the next sequence number, larger than those of all checkpoints in a folder."""
        if folder not in self._surveyed:
            self._surveyed.add(folder)
            self._sequence = max(
                self._sequence, *(other.sequence for _, other in survey(Manifest, folder, FORMAT)[0]), 0
            )
        self._sequence += 1
        return replace(manifest, run=self._run, sequence=self._sequence, ancestors=self._ancestors)

    def checkpoints(self, folder: Path) -> list[Path]:
        """Return the checkpoints of a folder that this training wrote or continues, newest first."""
        last = {**self._ancestors, self._run: self._sequence}
        readable, _ = survey(Manifest, folder, FORMAT)
        return [
            place
            for place, manifest in readable
            if manifest.sequence <= last.get(manifest.run, -1) and not place.is_symlink()
        ]


def layout_digest(plan: Plan) -> str:
    """Return a checksum that is equal for plans whose runs are equal bit for bit."""
    runs = [[to_data(run) for run in stage.runs] for stage in plan.stages]
    branches = [to_data(branch) for branch in plan.branches]
    order = None if plan.order is None else to_data(plan.order)
    passes = [plan.microbatches, plan.schedule.value, plan.virtual_stages, order]
    data = [plan.devices, plan.precision, *passes, runs, branches]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def write_together(
    peers: Peers, begin: Callable[[], Path], write: Callable[[Path], Part], complete: Callable[[Path, list[Part]], None]
) -> None:
    """Write a checkpoint on all ranks; nothing is left of an attempt that fails.

    Rank 0 creates the folder (``begin``), all ranks write files into it (``write``), and rank 0 completes it.

    Raises:
        InputError: a rank failed.
        LaunchError: a process is gone.
    """
    folder = at_first(peers, begin, FIELD)
    try:
        parts = together(peers, lambda: write(folder), FIELD)
        at_first(peers, lambda: complete(folder, parts), FIELD)
    except BaseException:
        if peers.rank == 0:
            remove_folder(folder)
        raise


def check_arrived(folder: Path, place: Path, files: Iterable[str]) -> None:
    """Raise ``InputError`` if rank 0 does not see a file that another rank wrote."""
    for name in files:
        if not (folder / name).is_file():
            raise InputError(FIELD, place, f"{name} is missing. Use a folder shared by all ranks.")


def read_together(peers: Peers, folder: Path, read: Callable[[], Part]) -> Part:
    """Read a manifest on all ranks; raise ``InputError`` if a rank fails, or ranks see different manifests."""
    manifests: list[Any] = together(peers, read, FIELD)
    if any(manifest.digest != manifests[0].digest for manifest in manifests):
        raise InputError(FIELD, folder, "Processes see different ones under this name. Use a shared folder.")
    first: Part = manifests[0]
    return first
