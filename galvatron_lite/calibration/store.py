"""Calibrated constants on disk (``configs/calibration``) and by name.

One file a kind of constants; the format is described in ``configs/calibration/README.md``.
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
"""The files of a calibration folder and what each one's entries are."""

DEFAULT = "default"
"""The entry for names that have none of their own; every file has it."""

MEASURED = "measured"
"""The device entry for devices whose peak and bandwidth were measured, where no other entry fits their name."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry(Strict):
    """One entry of a file: constants of its own with their origin, or the entry whose constants it shares."""

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
    """The constants of a calibration folder; read once per process.

    Args:
        path: folder with ``devices.json``, ``links.json`` and ``stacks.json``; None: the one that is chosen
            (``chosen_calibration``), else the one that ships with the package.
    """
    return _load((path or _CHOSEN.get() or config_folder("calibration")).resolve())


_CHOSEN: ContextVar[Path | None] = ContextVar("calibration", default=None)


@contextmanager
def chosen_calibration(path: Path) -> Iterator[Calibration]:
    """Estimate with other constants than the shipped ones, inside the ``with`` block.

    Raises:
        FileFormatError: no such folder, or files that are damaged.
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
    constants = {kind: _constants(kind, files[kind], folder) for kind in KINDS}
    named = [(f"{kind}/{name}", entry) for kind, file in files.items() for name, entry in file.entries.items()]
    return Calibration(
        **constants,
        like={name: entry.like for name, entry in named if entry.like is not None},
        origins={name: entry.origin for name, entry in named if entry.origin is not None},
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


def _constants(kind: str, file: _File, folder: Path) -> dict[str, Any]:
    return {
        name: from_data(KINDS[kind], entry.constants, f"{folder / kind}.json, {name}")
        for name, entry in file.entries.items()
        if entry.constants is not None
    }


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration folder; each file is replaced as a whole.

    Processes that have read the folder keep what they read, this one too.
    """
    common = {"provenance": list(calibration.provenance), "expected_error": dict(calibration.expected_error)}
    for kind in KINDS:
        own = {name: {"constants": to_data(value)} for name, value in getattr(calibration, kind).items()}
        shared = {
            name.removeprefix(f"{kind}/"): {"like": other}
            for name, other in calibration.like.items()
            if name.startswith(f"{kind}/")
        }
        entries = own | shared
        for name in entries:
            if (origin := calibration.origins.get(f"{kind}/{name}")) is not None:
                entries[name] |= {"origin": to_data(origin)}
        write_data(path / f"{kind}.json", (common if kind == "stacks" else {}) | {"entries": entries})


def entry_for(calibration: Calibration, kind: str, name: str, fallback: str = DEFAULT) -> str:
    """Name of the entry whose constants serve a name: the longest entry name it begins with, whatever the case.

    Args:
        kind: ``devices``, ``links`` or ``stacks``.
        name: of a device, link type or stack.
        fallback: the entry for a name that none fits.
    """
    if kind not in KINDS:
        raise InputError("kind of constants", kind, f"Known: {', '.join(KINDS)}.")
    shared = {key.removeprefix(f"{kind}/"): other for key, other in calibration.like.items() if key.startswith(kind)}
    entries = {entry: entry for entry in getattr(calibration, kind)} | shared
    fitting = [entry for entry in entries if name.upper().startswith(entry.upper())]
    return entries[max(fitting, key=len)] if fitting else fallback


def constants_for_device(calibration: Calibration, name: str, source: str = "") -> DeviceConstants:
    """The constants of a device type, by the longest entry its name begins with.

    A device that no entry fits has the entry ``measured`` where the source of its figures is that, else ``default``.
    """
    fallback = MEASURED if source == MEASURED and MEASURED in calibration.devices else DEFAULT
    return calibration.devices[entry_for(calibration, "devices", name, fallback)]


def constants_for_link(calibration: Calibration, name: str) -> LinkConstants:
    """The constants of a link type, by the longest entry its name begins with, else the entry ``default``."""
    return calibration.links[entry_for(calibration, "links", name)]


def constants_for_stack(calibration: Calibration, name: str) -> StackConstants:
    """The constants of a software stack, by the longest entry its name begins with, else the entry ``default``."""
    return calibration.stacks[entry_for(calibration, "stacks", name)]


def margin_of(kind: str, calibration: Calibration) -> float:
    """Share of a memory budget that plans keep free, by where their costs come from: ``estimated`` or ``measured``."""
    return calibration.expected_error.get(f"memory_{kind}", 0.0)
