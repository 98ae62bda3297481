"""Folders with a manifest that describes every other file, and whether those files are intact."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from galvatron_lite.errors import FileFormatError, GalvatronError
from galvatron_lite.files import read_value, to_data, write_value
from galvatron_lite.folders import check_file

META = "meta.json"
TORN = "The checkpoint is damaged: delete it and resume from the one before, which load_latest(folder) finds."
_CHECKPOINT_FILE = re.compile(r"meta\.json|(rank|process|stage)-\d+\.(pt|safetensors)")
"""Names of files that make a folder a checkpoint, damaged or not."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Kind = TypeVar("Kind")
"""A manifest: a frozen dataclass with ``format``, ``step``, ``sequence``, ``files`` and ``digest``."""


def write_sealed(folder: Path, manifest: Any) -> None:
    """Write a manifest, with its checksum."""
    write_value(folder / META, replace(manifest, digest=_digest(manifest)))


def read_sealed(kind: type[Kind], folder: Path, version: int) -> Kind:
    """Read and check the manifest of a folder; the other files are not looked at.

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
        if not _NAME.fullmatch(name) or name == META:
            raise FileFormatError("file", folder / META, f"It names {name!r}, which is no file of this folder. {TORN}")
    result: Kind = manifest
    return result


def checked(folder: Path, manifest: Any, name: str) -> Path:
    """The path of one of the files; raises ``FileFormatError`` if its content has changed."""
    return check_file(folder / name, manifest.files[name], TORN)


def check_all(folder: Path, manifest: Kind) -> Kind:
    """The manifest itself; raises ``FileFormatError`` if the content of any file has changed."""
    files: Any = manifest
    for name in files.files:
        checked(folder, manifest, name)
    return manifest


@contextmanager
def content_errors(folder: Path) -> Iterator[None]:
    """Turn any error that the contents of an intact checkpoint cause into a ``FileFormatError``."""
    try:
        yield
    except (GalvatronError, OSError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise FileFormatError("checkpoint", folder, f"Its contents do not fit ({reason}). Use another one.") from error


def survey(kind: type[Kind], folder: Path, version: int) -> tuple[list[tuple[Path, Kind]], list[FileFormatError]]:
    """The checkpoints of a folder, newest first, and the errors of those whose manifest cannot be read.

    The newest is the one written last: after going back to an earlier checkpoint, the next one has fewer steps than
    the abandoned ones. Checkpoints without a sequence come after the others, ordered by steps. An intact one that a
    lost process left under a temporary name counts, behind its equals.
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
