"""What a checkpoint folder of cyclic data parallelism says of itself; whether it is whole. No torch here.

meta.json        this: rule, workers, training step, names and shapes, checksums of the other files
stage-0.pt       of each stage: its parameters by version, states of optimizer and scheduler
process-0.pt     of each process: buffers (batch-norm statistics) by stage, random generators
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import STRICT
from galvatron_lite.folders import Content
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.runtime.checkpoint.sealed import check_all, read_sealed, survey, write_sealed

if TYPE_CHECKING:
    from pydantic import ConfigDict

FORMAT = 1


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What a checkpoint holds of a stage."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    parameters: dict[str, str]  # dtype and shape, by name in the user's model
    optimizer: str | None = None  # its class; None where there is none
    scheduler: str | None = None  # its class; None where there is none


@dataclass(frozen=True, slots=True)
class CyclicManifest:
    """A checkpoint."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    format: int  # of the folder
    rule: CyclicRule  # which parameters a micro-batch uses
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


def stage_file(stage: int) -> str:
    """Name of a stage's file."""
    return f"stage-{stage}.pt"


def process_file(process: int) -> str:
    """Name of a process's file."""
    return f"process-{process}.pt"


def write_manifest(folder: Path, manifest: CyclicManifest) -> None:
    """Write it, with its checksum.

    Raises:
        OSError: the disk is full, or broken.
    """
    write_sealed(folder, manifest)


def read_manifest(folder: Path) -> CyclicManifest:
    """The manifest of a checkpoint folder; see ``read_sealed``.

    Raises:
        FileFormatError: there is none, or it is damaged.
    """
    return read_sealed(CyclicManifest, folder, FORMAT)


def next_sequence(folder: Path) -> int:
    """Of a checkpoint that is written next among those of a folder."""
    return 1 + max((one.sequence for _, one in survey(CyclicManifest, folder, FORMAT)[0]), default=0)


def check_whole(folder: Path) -> CyclicManifest:
    """The manifest of a checkpoint all of whose files are as they were written.

    Raises:
        FileFormatError: they are not; names the file.
    """
    return check_all(folder, read_manifest(folder))


def latest(folder: Path | str) -> Path | None:
    """The checkpoint written last among a folder's folders, leaving out those that are not whole.

    A folder that a lost process left under a temporary name counts if it is whole.
    """
    found, _ = survey(CyclicManifest, Path(folder), FORMAT)
    return next((place for place, _ in found if _is_whole(place)), None)


def _is_whole(folder: Path) -> bool:
    try:
        check_whole(folder)
    except FileFormatError:
        return False
    return True
