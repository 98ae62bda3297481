"""Folders that are written atomically (beside their place, then moved), and folders that ship with the package."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import IO, TYPE_CHECKING, ClassVar

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import STRICT, check_regular
from galvatron_lite.limits import Name, Size

if TYPE_CHECKING:
    from pydantic import ConfigDict

_CHUNK = 1 << 20
_PART = ".part-"  # in the names of unfinished folders
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Content:
    """Size and checksum of a file."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    bytes: Size
    sha256: Name  # in hexadecimal digits


class FileSink:
    """An open file that computes its size and checksum while it is written.

    Errors of the disk are raised at the end, in ``content``, as writers in C may turn them into others.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._digest, self._bytes = stream, hashlib.sha256(), 0
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes, and return their number."""
        count = memoryview(data).nbytes
        if self._error is None:
            try:
                self._stream.write(data)
            except OSError as error:
                self._error = error
        self._digest.update(data)
        self._bytes += count
        return count

    def flush(self) -> None:
        """Do nothing, as writes are not buffered here."""

    def content(self) -> Content:
        """Return size and checksum, once everything is on the disk.

        Raises:
            OSError: the disk is full, or broken.
        """
        if self._error is not None:
            raise self._error
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return Content(self._bytes, self._digest.hexdigest())


def write_file(path: Path, fill: Callable[[FileSink], None]) -> Content:
    """Write a new file; ``fill`` writes to the sink.

    Raises:
        OSError: the disk is full, or broken.
    """
    with path.open("xb") as stream:
        sink = FileSink(stream)
        fill(sink)
        return sink.content()


def content_of(path: Path) -> Content:
    """Size and checksum of an existing file.

    Raises:
        OSError: it cannot be read.
    """
    return Content(path.stat().st_size, _checksum(path))


def check_file(path: Path, expected: Content, remedy: str) -> Path:
    """Return the path of a file if its content is the expected one.

    Args:
        path: of the file.
        expected: size and checksum when it was written.
        remedy: for the error, what to do.

    Raises:
        FileFormatError: the file is missing, shorter, longer, or changed.
    """
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            raise FileFormatError("file", path, f"It holds {size} of {expected.bytes} bytes. {remedy}")
        if _checksum(path) != expected.sha256:
            raise FileFormatError("file", path, f"Its content has changed since it was written. {remedy}")
    except OSError as error:
        raise FileFormatError("file", path, f"It cannot be read ({error.strerror}). {remedy}") from error
    return path


def begin_folder(place: Path, seal: str | None = None) -> Path:
    """Make an empty folder beside a place, on the same file system; its name begins with a dot.

    Args:
        place: path to which ``put_in_place`` moves it.
        seal: name of the file that is written last. Folders without it are deleted if the process that wrote them on
            this machine is gone, or if they are of another machine and a day old.

    Raises:
        InputError: another process of this machine is writing this place.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    owner = f"{_host()}-{os.getpid()}-{_start(os.getpid())}-"
    folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=_prefix(place) + owner))
    for other in place.parent.glob(f".*{_PART}*"):
        writer = _writer(other)
        if writer is None and seal is not None and not (other / seal).exists():
            remove_folder(other)
        elif writer not in (None, 0, os.getpid()) and other.name.startswith(_prefix(place)):
            remove_folder(folder)
            raise InputError("folder", place, f"Process {writer} is writing it. Give each job a folder of its own.")
    return folder


def put_in_place(folder: Path, place: Path) -> None:
    """Move a folder of ``begin_folder`` to its place, and delete the old folder and those of broken attempts.

    At every moment the old folder or the new one is complete on the disk, though its name may begin with a dot.

    Raises:
        OSError: the file system refuses.
    """
    folder.chmod(0o755)
    sync_folder(folder)
    before = place.rename(folder.with_name(f"{folder.name}.before")) if place.exists() else None
    try:
        folder.rename(place)
    except OSError:
        if before is not None:
            before.rename(place)
        raise
    sync_folder(place.parent)
    for other in place.parent.glob(f"{_prefix(place)}*"):
        if _writer(other) in (None, os.getpid()):
            remove_folder(other)


def remove_folder(folder: Path) -> None:
    """Delete a folder and its content, as far as the file system allows."""
    shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prefix(place: Path) -> str:
    return f".{place.name}{_PART}"


def _host() -> str:
    return re.sub(r"[^\w.]", "_", socket.gethostname())


def _start(process: int) -> str:
    """The start time of a process, which tells it from a later one of its number; empty: gone, or not on Linux."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _writer(folder: Path) -> int | None:
    """The process that may be writing a folder of ``begin_folder``; 0: on another machine; None: it is gone."""
    owner = re.fullmatch(r"([\w.]+)-(\d+)-(\d*)-.*", folder.name.rpartition(_PART)[2])
    if owner is None:
        return None
    host, process, start = owner[1], int(owner[2]), owner[3]
    if host != _host():
        with suppress(OSError):
            return 0 if time() - folder.stat().st_mtime < _DAY else None
    return process if start == _start(process) else None


def _checksum(path: Path) -> str:
    with check_regular(path).open("rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


_PACKAGE = Path(__file__).resolve().parent


def config_folder(kind: str) -> Path:
    """The folder of shipped files of one kind (``models``, ``clusters``).

    In a wheel it is in the package, in a checkout beside it.

    Raises:
        InputError: the installation holds no such folder.
    """
    return _shipped("configs", kind)


def profile_folder(kind: str) -> Path:
    """The folder of shipped profiles of one kind (``paradl``); see ``config_folder``.

    Raises:
        InputError: the installation holds no such folder.
    """
    return _shipped("profiles", kind)


def _shipped(folder: str, kind: str) -> Path:
    for root in (_PACKAGE / folder, _PACKAGE.parent / folder):
        if (root / kind).is_dir():
            return root / kind
    raise InputError(folder, kind, f"The folder {_PACKAGE / folder / kind} is missing; install the package anew.")
