"""What a checkpoint folder of cyclic data parallelism says of itself; whether it is whole. No torch here.

meta.json        this: rule, workers, training step, names and shapes, checksums of the other files
stage-0.pt       of each stage: its parameters by version, states of optimizer and scheduler
process-0.pt     of each process: buffers (batch-norm statistics) by stage, random generators
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import STRICT, read_value, to_data, write_value
from galvatron_lite.folders import Content, check_file
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting

if TYPE_CHECKING:
    from pydantic import ConfigDict

META = "meta.json"
FORMAT = 1
TORN = "The checkpoint is damaged: delete it and resume from the one before, which load_latest(folder) finds."


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What a checkpoint holds of a stage.

    Attributes:
        parameters: dtype and shape, by name in the user's model.
        optimizer: its class; None where there is none.
        scheduler: its class; None where there is none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    parameters: dict[str, str]
    optimizer: str | None = None
    scheduler: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint.

    Attributes:
        format: of the folder.
        rule: which parameters a micro-batch uses.
        setting: where passes ran when it was written; it may be continued in any.
        workers: N.
        step: training steps done: parameters have had so many updates.
        base: oldest version that the next training step uses: ``step`` - 1, or ``step`` after a flush.
        seed: of what passes draw; None where they drew as it came.
        processes: that wrote it.
        stages: in order.
        names: every entry of the model's ``state_dict()``, and the first name of the tensor behind it.
        files: what they hold, by name.
        digest: checksum of all this.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    format: int
    rule: CyclicRule
    setting: CyclicSetting
    workers: int
    step: int
    base: int
    seed: int | None
    processes: int
    stages: tuple[StageRecord, ...]
    names: dict[str, str]
    files: dict[str, Content]
    digest: str = ""


def stage_file(stage: int) -> str:
    """Name of a stage's file."""
    return f"stage-{stage}.pt"


def process_file(process: int) -> str:
    """Name of a process's file."""
    return f"process-{process}.pt"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it, with its checksum.

    Raises:
        OSError: the disk is full, or broken.
    """
    write_value(folder / META, replace(manifest, digest=_digest(manifest)))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder; the other files are not looked at.

    Raises:
        FileFormatError: there is no such folder; or no manifest, so it was not written to its end; or it is changed,
            or of another format.
    """
    if not folder.is_dir():
        remedy = "There is no such folder. Give one that save(folder) wrote; load_latest(folder) finds the newest."
        raise FileFormatError("checkpoint", folder, remedy)
    if not (folder / META).is_file():
        raise FileFormatError("checkpoint", folder, f"There is no {META} in it, so it is not whole. {TORN}")
    manifest = read_value(Manifest, folder / META)
    if manifest.digest != _digest(manifest):
        raise FileFormatError("file", folder / META, f"Its content has changed since it was written. {TORN}")
    if manifest.format != FORMAT:
        remedy = f"Format {FORMAT} can be read. Use the version of galvatron_lite that wrote it."
        raise FileFormatError("checkpoint", folder, remedy)
    return manifest


def checked(folder: Path, manifest: Manifest, name: str) -> Path:
    """The path of one of the other files, which holds what it held when it was written.

    Raises:
        FileFormatError: it does not.
    """
    return check_file(folder / name, manifest.files[name], TORN)


def check_whole(folder: Path) -> Manifest:
    """The manifest of a checkpoint all of whose files are as they were written.

    Raises:
        FileFormatError: they are not; names the file.
    """
    manifest = read_manifest(folder)
    for name in manifest.files:
        checked(folder, manifest, name)
    return manifest


def latest(folder: Path | str) -> Path | None:
    """The checkpoint with most training steps among a folder's folders, leaving out those that are not whole.

    A folder that a lost process left under a temporary name counts if it is whole.
    """
    found = sorted(_candidates(Path(folder)), key=lambda one: (one[1], not one[0].name.startswith(".")), reverse=True)
    return next((place for place, _ in found if _is_whole(place)), None)


def _candidates(folder: Path) -> Iterator[tuple[Path, int]]:
    """Folders whose manifest can be read, with their training steps."""
    for meta in folder.glob(f"*/{META}"):
        try:
            yield meta.parent, read_manifest(meta.parent).step
        except FileFormatError:
            continue


def _is_whole(folder: Path) -> bool:
    try:
        check_whole(folder)
    except FileFormatError:
        return False
    return True


def _digest(manifest: Manifest) -> str:
    data: Mapping[str, object] = to_data(replace(manifest, digest=""))
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
