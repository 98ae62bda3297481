"""Folders with a manifest that says what every other file of them holds; whether they are whole. No torch here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from galvatron_lite.errors import FileFormatError, GalvatronError
from galvatron_lite.files import read_value, to_data, write_value
from galvatron_lite.folders import Content, check_file

if TYPE_CHECKING:
    from dataclasses import Field

META = "meta.json"
"""Name of the manifest."""
TORN = "The checkpoint is damaged: delete it and resume from the one before, which load_latest(folder) finds."
_FILES = re.compile(r"meta\.json|(rank|process|stage)-\d+\.(pt|safetensors)")
"""Names of files that make a folder a checkpoint, damaged or not."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Sealed(Protocol):
    """A manifest: a frozen dataclass.

    Attributes:
        format: of the folder.
        step: training steps done.
        sequence: counts the checkpoints of a folder in the order in which they were written; 0: not recorded.
        files: what the others hold, by name.
        digest: checksum of all this.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def format(self) -> int:
        """Of the folder."""

    @property
    def step(self) -> int:
        """Training steps done."""

    @property
    def sequence(self) -> int:
        """Counts the checkpoints of a folder in the order in which they were written; 0: not recorded."""

    @property
    def files(self) -> Mapping[str, Content]:
        """What the others hold."""

    @property
    def digest(self) -> str:
        """Checksum of all this."""


Kind = TypeVar("Kind", bound=Sealed)


def write_sealed(folder: Path, manifest: Kind) -> None:
    """Write a manifest, with its checksum.

    Raises:
        OSError: the disk is full, or broken.
    """
    write_value(folder / META, replace(manifest, digest=_digest(manifest)))


def read_sealed(kind: type[Kind], folder: Path, size: int) -> Kind:
    """The manifest of a folder; the other files are not looked at.

    Args:
        kind: of manifest.
        folder: a checkpoint.
        size: format that can be read.

    Raises:
        FileFormatError: there is no such folder; or no manifest, so it was not written to its end; or it is changed,
            or of another kind or format.
    """
    if not folder.is_dir():
        remedy = "There is no such folder. Give one that save(folder) wrote; load_latest(folder) finds the newest."
        raise FileFormatError("checkpoint", folder, remedy)
    if not (folder / META).is_file():
        raise FileFormatError("checkpoint", folder, _without_meta(folder))
    manifest = read_value(kind, folder / META)
    if manifest.digest != _digest(manifest):
        raise FileFormatError("file", folder / META, f"Its content has changed since it was written. {TORN}")
    if manifest.format != size:
        remedy = f"Format {size} can be read. Use the version of galvatron_lite that wrote it."
        raise FileFormatError("checkpoint", folder, remedy)
    if manifest.step < 0:
        raise FileFormatError("file", folder / META, f"It is of step {manifest.step}, which cannot be. {TORN}")
    for name in manifest.files:
        if not _NAME.fullmatch(name) or name == META:
            raise FileFormatError("file", folder / META, f"It names {name!r}, which is no file of this folder. {TORN}")
    return manifest


def checked(folder: Path, manifest: Sealed, name: str) -> Path:
    """The path of one of the other files, which holds what it held when it was written.

    Raises:
        FileFormatError: it does not.
    """
    return check_file(folder / name, manifest.files[name], TORN)


def check_all(folder: Path, manifest: Kind) -> Kind:
    """The manifest itself, if all other files are as they were written.

    Raises:
        FileFormatError: they are not; names the file.
    """
    for name in manifest.files:
        checked(folder, manifest, name)
    return manifest


@contextmanager
def content_errors(folder: Path) -> Iterator[None]:
    """Turns whatever else the contents of a checkpoint provoke, once it is found whole, into an error of its own.

    Raises:
        FileFormatError: they are not what save wrote, or do not fit what they are to be given to.
    """
    try:
        yield
    except (GalvatronError, OSError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise FileFormatError("checkpoint", folder, f"Its contents do not fit ({reason}). Use another one.") from error


def survey(kind: type[Kind], folder: Path, size: int) -> tuple[list[tuple[Path, Kind]], list[FileFormatError]]:
    """The checkpoints of a folder, the newest first, and what is wrong with those whose manifest cannot be read.

    Only manifests are looked at. The newest is the one written last: after going back to an earlier checkpoint, what is
    written next has fewer training steps than what was abandoned. Checkpoints without a sequence are older than others,
    and ordered by steps. A whole one that a lost process left under a temporary name counts, behind its equals.
    """
    readable, damaged = [], list[FileFormatError]()
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            if place.is_dir() and any(_FILES.fullmatch(file.name) for file in place.iterdir()):
                readable.append((place, read_sealed(kind, place, size)))
        except FileFormatError as error:
            damaged += [] if place.name.startswith(".") else [error]
        except OSError as error:
            damaged.append(FileFormatError("checkpoint", place, f"It cannot be read ({error.strerror})."))
    readable.sort(key=lambda one: (one[1].sequence, one[1].step, not one[0].name.startswith(".")), reverse=True)
    return readable, damaged


def _digest(manifest: Sealed) -> str:
    data: Mapping[str, object] = to_data(replace(manifest, digest=""))
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _without_meta(folder: Path) -> str:
    """What to do with a folder that is no checkpoint."""
    inside = sorted(path.parent.name for path in folder.glob(f"*/{META}"))
    if inside:
        newest = ", ".join(inside[-3:])
        return f"It is a folder of checkpoints ({newest}): give one of them, or use load_latest(folder)."
    return f"There is no {META} in it, so it is not whole. {TORN}"
