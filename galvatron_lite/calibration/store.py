"""Reads and writes calibrated constants (``configs/calibration``), and looks them up by name.

Each kind of constants has a file; ``configs/calibration/README.md`` describes the format.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from galvatron_lite.calibration.schema import (
    Calibration,
    ConstantsOrigin,
    DeviceConstants,
    LinkConstants,
    StackConstants,
)
from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import Strict, from_data, read_data, to_data, write_data
from galvatron_lite.folders import config_folder

KINDS: dict[str, type[Any]] = {"devices": DeviceConstants, "links": LinkConstants, "stacks": StackConstants}
"""Kinds of constants, each a file of a calibration folder, and the type of its entries."""

DEFAULT = "default"
"""The entry for names without an entry; every file has it."""

MEASURED = "measured"
"""The entry for devices without an entry whose peak and bandwidth were measured."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry(Strict):
    """One entry of a file: constants and their origin, or the name of the entry whose constants it shares."""

    constants: dict[str, Any] | None = None
    origin: ConstantsOrigin | None = None
    like: str | None = None


@dataclass(frozen=True, slots=True)
class _File(Strict):
    """A file of entries."""

    entries: dict[str, _Entry]
    provenance: tuple[str, ...] = ()
    expected_error: dict[str, float] = field(default_factory=dict)


def load_calibration(path: Path | None = None) -> Calibration:
    """Return the constants of a calibration folder, which is read once per process.

    Args:
        path: folder with ``devices.json``, ``links.json`` and ``stacks.json``; None: that of ``chosen_calibration``,
            else the one that ships with the package.
    """
    return _load((path or _CHOSEN.get() or config_folder("calibration")).resolve())


_CHOSEN: ContextVar[Path | None] = ContextVar("calibration", default=None)


@contextmanager
def chosen_calibration(path: Path) -> Iterator[Calibration]:
    """Make ``load_calibration`` return the constants of a folder inside the ``with`` block.

    Raises:
        FileFormatError: a missing folder or damaged files.
    """
    constants = load_calibration(path)
    token = _CHOSEN.set(path)
    try:
        yield constants
    finally:
        _CHOSEN.reset(token)


@cache
def _load(folder: Path) -> Calibration:
    files = {kind: _read_file(folder / f"{kind}.json") for kind in KINDS}
    constants = {
        kind: {
            name: from_data(KINDS[kind], entry.constants, f"{folder / kind}.json, {name}")
            for name, entry in file.entries.items()
            if entry.constants is not None
        }
        for kind, file in files.items()
    }
    entries = [(f"{kind}/{name}", entry) for kind, file in files.items() for name, entry in file.entries.items()]
    return Calibration(
        **constants,
        like={name: entry.like for name, entry in entries if entry.like is not None},
        origins={name: entry.origin for name, entry in entries if entry.origin is not None},
        provenance=files["stacks"].provenance,
        expected_error=files["stacks"].expected_error,
    )


def _read_file(path: Path) -> _File:
    file = from_data(_File, read_data(path), str(path))
    if DEFAULT not in file.entries:
        raise FileFormatError(str(path), sorted(file.entries), f"Give an entry {DEFAULT}.")
    for name, entry in file.entries.items():
        shared = file.entries.get(entry.like) if entry.like is not None else None
        if (entry.constants is None) == (shared is None or shared.constants is None):
            raise FileFormatError(f"{path}, {name}", entry.like, "Give constants, or like: an entry that has some.")
    return file


def _shared_entries(calibration: Calibration, kind: str) -> dict[str, str]:
    """Return the entries of a kind that have no constants, and the entries they share."""
    prefix = f"{kind}/"
    return {key.removeprefix(prefix): other for key, other in calibration.like.items() if key.startswith(prefix)}


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration folder; each file is replaced atomically.

    Processes that have read the folder, this one included, keep the constants they read.
    """
    common = {"provenance": list(calibration.provenance), "expected_error": dict(calibration.expected_error)}
    for kind in KINDS:
        entries = {name: {"constants": to_data(value)} for name, value in getattr(calibration, kind).items()}
        entries |= {name: {"like": other} for name, other in _shared_entries(calibration, kind).items()}
        for name in entries:
            if (origin := calibration.origins.get(f"{kind}/{name}")) is not None:
                entries[name] |= {"origin": to_data(origin)}
        write_data(path / f"{kind}.json", (common if kind == "stacks" else {}) | {"entries": entries})


def entry_for(calibration: Calibration, kind: str, name: str, fallback: str = DEFAULT) -> str:
    """Return the entry whose constants serve a name: the longest entry that the name begins with, ignoring case.

    Args:
        kind: ``devices``, ``links`` or ``stacks``.
        name: name of a device, link type or stack.
        fallback: the entry for a name that no entry fits.
    """
    if kind not in KINDS:
        raise InputError("kind of constants", kind, f"Known: {', '.join(KINDS)}.")
    entries = {entry: entry for entry in getattr(calibration, kind)} | _shared_entries(calibration, kind)
    fitting = [entry for entry in entries if name.upper().startswith(entry.upper())]
    return entries[max(fitting, key=len)] if fitting else fallback


def constants_for_device(calibration: Calibration, name: str, source: str = "") -> DeviceConstants:
    """Return the constants of a device by name.

    A device that no entry fits has the entry ``measured`` if its figures were measured, else ``default``.
    """
    fallback = MEASURED if source == MEASURED and MEASURED in calibration.devices else DEFAULT
    return calibration.devices[entry_for(calibration, "devices", name, fallback)]


def constants_for_link(calibration: Calibration, name: str) -> LinkConstants:
    """Return the constants of a link type by name."""
    return calibration.links[entry_for(calibration, "links", name)]


def constants_for_stack(calibration: Calibration, name: str) -> StackConstants:
    """Return the constants of a software stack by name."""
    return calibration.stacks[entry_for(calibration, "stacks", name)]


def margin_of(kind: str, calibration: Calibration) -> float:
    """Return the share of a memory budget that plans keep free if their costs are ``estimated`` or ``measured``."""
    return calibration.expected_error.get(f"memory_{kind}", 0.0)
