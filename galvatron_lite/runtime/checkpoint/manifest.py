"""The manifest of a checkpoint folder.

meta.json            this: training step, names, shapes and places of tensors, checksums of the other files
rank-0.safetensors   of each process: the pieces of tensors that it wrote
rank-0.pt            of each process: random generators, data position, its own running statistics
training.pt          options of the optimizer, scheduler, loss scaler, extra state
plan.json            the plan it was written under
config.json          of a transformers model: its configuration
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import Strict, to_data
from galvatron_lite.folders import Content
from galvatron_lite.limits import Devices, Size
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.checkpoint.sealed import META, TORN, check_all, read_sealed, survey

FORMAT = 1
TRAINING, PLAN, CONFIG = "training.pt", "plan.json", "config.json"


@dataclass(frozen=True, slots=True)
class Piece(Strict):
    """Items of a tensor in one file."""

    at: tuple[Size, ...]  # place of the first item in the tensor, dim by dim
    size: tuple[Size, ...]
    file: str  # that holds them, under ``key_of``


@dataclass(frozen=True, slots=True)
class TensorRecord(Strict):
    """A tensor, and the pieces that hold every item of it once."""

    dtype: str  # such as ``float32``
    shape: tuple[Size, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Manifest(Strict):
    """A checkpoint."""

    format: int
    step: Size  # training steps done
    layout: str  # see ``layout_digest``
    processes: Devices  # that wrote it
    names: dict[str, str]  # every entry of the model's ``state_dict()``, and the first name of the tensor behind it
    # parameters and buffers by their first name, states of the optimizer as ``PARAMETER/exp_avg``
    tensors: dict[str, TensorRecord]
    files: dict[str, Content]
    optimizer: str | None = None  # its class
    scheduler: str | None = None  # its class
    run: str = ""  # id of the training that wrote it; "" in checkpoints of versions without it
    sequence: Size = 0  # counts checkpoints in the order in which they were written
    # trainings that it continues, and the sequence of the last checkpoint of each that belongs to it
    ancestors: dict[str, Size] = field(default_factory=dict)
    digest: str = ""  # checksum of all this


def tensors_file(rank: int) -> str:
    """The file with a process's pieces of tensors."""
    return f"rank-{rank}.safetensors"


def process_file(rank: int) -> str:
    """The file with the rest of a process's state."""
    return f"rank-{rank}.pt"


def key_of(name: str, at: tuple[int, ...]) -> str:
    """The key of a piece in its file."""
    return f"{name}@{','.join(map(str, at))}"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint; raises ``FileFormatError`` where it is missing or damaged."""
    manifest = read_sealed(Manifest, folder, FORMAT)
    needed = {TRAINING, *(process_file(rank) for rank in range(min(manifest.processes, len(manifest.files) + 1)))}
    unknown = {first for first in manifest.names.values() if first not in manifest.tensors}
    if unknown or not needed <= manifest.files.keys():
        missing = ", ".join(sorted(unknown or needed - manifest.files.keys())[:5])
        raise FileFormatError("file", folder / META, f"It does not describe a checkpoint: {missing}. {TORN}")
    return manifest


def check_files(folder: Path) -> Manifest:
    """Read the manifest and every other file; raises ``FileFormatError`` naming the first damaged file."""
    return check_all(folder, read_manifest(folder))


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints of a folder whose manifest can be read, newest first."""
    return [place for place, _ in survey(Manifest, folder, FORMAT)[0]]


class Lineage:
    """The training that checkpoints belong to, and the order in which they are written."""

    def __init__(self) -> None:
        self._run, self._sequence, self._ancestors = uuid4().hex, 0, dict[str, int]()
        self._surveyed = set[Path]()

    def follow(self, manifest: Manifest) -> None:
        """Continue from a checkpoint; later checkpoints of its training are not ancestors of this one."""
        self._run, self._ancestors = uuid4().hex, dict(manifest.ancestors)
        if manifest.run:
            self._ancestors[manifest.run] = manifest.sequence
        self._surveyed.clear()

    def record(self, manifest: Manifest, folder: Path) -> Manifest:
        """The manifest, as the newest among the checkpoints of a folder."""
        if folder not in self._surveyed:
            self._surveyed.add(folder)
            self._sequence = max(
                self._sequence, *(other.sequence for _, other in survey(Manifest, folder, FORMAT)[0]), 0
            )
        self._sequence += 1
        return replace(manifest, run=self._run, sequence=self._sequence, ancestors=self._ancestors)

    def checkpoints(self, folder: Path) -> list[Path]:
        """The checkpoints of a folder that this training wrote or continues, newest first."""
        last = {**self._ancestors, self._run: self._sequence}
        readable, _ = survey(Manifest, folder, FORMAT)
        return [place for place, own in readable if own.sequence <= last.get(own.run, -1) and not place.is_symlink()]


def layout_digest(plan: Plan) -> str:
    """Equal for plans that split model, samples and passes alike: their runs are equal bit for bit."""
    runs = [[to_data(run) for run in stage.runs] for stage in plan.stages]
    branches = [to_data(branch) for branch in plan.branches]
    order = None if plan.order is None else to_data(plan.order)
    passes = [plan.microbatches, plan.schedule.value, plan.virtual_stages, order]
    data = [plan.devices, plan.precision, *passes, runs, branches]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
