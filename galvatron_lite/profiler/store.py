"""Profiles on disk: one folder a machine, one file a model, and which was made last."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import from_data, read_data, read_text, to_data, write_text, write_value
from galvatron_lite.limits import FILE_BYTES, PARAMETERS
from galvatron_lite.profiler.schema import PROFILE_VERSION, Profile

LAST = "last"  # file in the profiles folder that holds the relative path of the profile made last


def profile_path(folder: Path, machine: str, name: str) -> Path:
    """Where the profile of a model on a machine is kept: ``folder/machine/name.yaml``."""
    return folder / _slug(machine) / f"{_slug(name)}.yaml"


def journal_path(folder: Path, machine: str, name: str) -> Path:
    """Where finished points are kept while a profile is being made."""
    return profile_path(folder, machine, name).with_suffix(".journal.jsonl")


def read_profile(path: Path) -> Profile:
    """A profile from a YAML or JSON file.

    Raises:
        FileFormatError: no such file, truncated, corrupt, of another version, or without points for a layer.
    """
    data = read_data(Path(path))
    version = data.get("version") if isinstance(data, dict) else None
    if version != PROFILE_VERSION:
        remedy = f"This version reads profiles of version {PROFILE_VERSION}; make the profile anew."
        raise FileFormatError(f"{path}, version", version, remedy)
    profile = from_data(Profile, data, str(path))
    _check_whole(profile, path)
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as YAML or JSON, atomically."""
    write_value(Path(path), profile)


def unwritable(folder: Path) -> InputError | None:
    """Why no profile can be kept in a folder; None where one can. Makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        remedy = f"No profile can be written there ({error.strerror}). Give one that can be written to: folder=PATH."
        return InputError("folder", str(folder), remedy)


def save_profile(profile: Profile, folder: Path, machine: str, *, remember: bool = True) -> Path:
    """Write a profile to its place in the profiles folder and remember it as the last one made; its path."""
    if (refused := unwritable(folder)) is not None:
        raise refused
    path = profile_path(folder, machine, profile.name)
    write_profile(profile, path)
    if remember or not (folder / LAST).is_file():
        write_text(folder / LAST, f"{path.relative_to(folder).as_posix()}\n")
    return path


def last_profile(folder: Path = Path("profiles")) -> Path:
    """The path of the profile made last here."""
    try:
        name = read_text(folder / LAST, FILE_BYTES).strip()
    except FileFormatError as error:
        remedy = (
            "No profile was made here yet; run `galvatron profile MODEL`, name one with --profile, or plan without "
            "one: --model NAME --cluster NAME."
        )
        raise InputError("profile", str(folder), remedy) from error
    path = folder / name
    if not name or not path.is_file():
        raise FileFormatError("profile", str(path), "The profile made last is gone; name another with --profile.")
    return path


def profile_hash(profile: Profile) -> str:
    """Sixteen hex digits that change with anything in the profile."""
    return data_hash(to_data(profile))


def data_hash(data: Any) -> str:
    """Sixteen hex digits (SHA-256) of plain data, whatever the order of its keys."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_hardware(profile: Profile, cluster: Cluster) -> list[str]:
    """Warnings for people where a profile was measured on other hardware than ``cluster``; empty where it fits."""
    from galvatron_lite.cluster.probe import differs

    return [
        f"Profile {profile.name} was measured on other hardware: {difference}. Its times may not hold here."
        for difference in differs(profile.cluster.fingerprint, cluster.fingerprint)
    ]


def _check_whole(profile: Profile, path: Path) -> None:
    place = {layer.name: number for number, layer in enumerate(profile.graph.layers)}
    if len(place) < len(profile.graph.layers):
        raise FileFormatError(f"{path}, graph.layers", len(place), "Give every layer a name of its own.")
    for tie in profile.graph.ties:
        if not place.keys() >= {tie.first, tie.second} or tie.first == tie.second:
            raise FileFormatError(f"{path}, graph.ties", tie.first, "A tie joins two layers of the model by name.")
    for tensor in profile.graph.tensors:
        after = place.get(tensor.producer, len(place))
        if not tensor.readers or any(place.get(reader, -1) <= after for reader in tensor.readers):
            remedy = "It and its readers are layers of the model, which run after it."
            raise FileFormatError(f"{path}, graph.tensors", tensor.producer, remedy)
    measured = {point.kind for point in profile.layers}
    for layer in profile.graph.layers:
        if layer.kind not in profile.graph.kinds or layer.kind not in measured:
            remedy = "The file has no points for this kind of layer; make the profile anew."
            raise FileFormatError(f"{path}, layers", layer.kind, remedy)
    if profile.graph.parameters > PARAMETERS:
        raise FileFormatError(f"{path}, graph.kinds", profile.graph.parameters, f"At most {PARAMETERS} parameters.")


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.") or "unnamed"
