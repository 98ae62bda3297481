"""Stores profiles on disk, in a folder for each machine and a file for each model, and finds the profile of a model."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.errors import LOG, FileFormatError, InputError
from galvatron_lite.files import from_data, read_data, read_text, to_data, write_text, write_value
from galvatron_lite.limits import FILE_BYTES, PARAMETERS
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.profiler.schema import PROFILE_VERSION, OriginKind, PlanNeeds, Profile
from galvatron_lite.units import format_count

if TYPE_CHECKING:
    from torch import nn


LAST = "last"  # file in the profiles folder with the relative path of the latest profile


def profile_path(folder: Path, machine: str, name: str) -> Path:
    """Return the path of the profile of a model on a machine: ``folder/machine/name.yaml``."""
    return folder / _slug(machine) / f"{_slug(name)}.yaml"


def journal_path(folder: Path, machine: str, name: str) -> Path:
    """Return the path of the journal of finished points while a profile is measured."""
    return profile_path(folder, machine, name).with_suffix(".journal.jsonl")


def read_profile(path: Path) -> Profile:
    """Read a profile from a YAML or JSON file.

    Raises:
        FileFormatError: a missing, truncated or corrupt file, another version, or no points for a layer.
    """
    data = read_data(Path(path))
    version = data.get("version") if isinstance(data, dict) else None
    if version != PROFILE_VERSION:
        remedy = f"This version reads profiles of version {PROFILE_VERSION}; make the profile anew."
        raise FileFormatError(f"{path}, version", version, remedy)
    profile = from_data(Profile, data, str(path))
    _check_complete(profile, path)
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as YAML or JSON, atomically."""
    write_value(Path(path), profile)


def unwritable(folder: Path) -> InputError | None:
    """Create a folder for profiles; return the error if it cannot be written, else None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        remedy = f"No profile can be written there ({error.strerror}). Give one that can be written to: folder=PATH."
        return InputError("folder", str(folder), remedy)


def save_profile(profile: Profile, folder: Path, machine: str, *, remember: bool = True) -> Path:
    """Write a profile to its path in the profiles folder and return the path.

    Args:
        profile: the profile.
        folder: the profiles folder.
        machine: name of the machine.
        remember: whether this becomes the latest profile if there is one already.
    """
    if (refused := unwritable(folder)) is not None:
        raise refused
    path = profile_path(folder, machine, profile.name)
    write_profile(profile, path)
    if remember or not (folder / LAST).is_file():
        write_text(folder / LAST, f"{path.relative_to(folder).as_posix()}\n")
    return path


def last_profile(folder: Path = Path("profiles")) -> Path:
    """Return the path of the latest profile.

    Raises:
        InputError: there is none.
        FileFormatError: it was deleted.
    """
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
    """Return sixteen hex digits that change with anything in the profile but ``needs``, which no cost depends on."""
    return data_hash(to_data(replace(profile, needs=PlanNeeds())))


def data_hash(data: Any) -> str:
    """Return sixteen hex digits (SHA-256) of plain data, independent of the order of keys."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_complete(profile: Profile, path: Path) -> None:
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


def profile_name(model: nn.Module) -> str:
    """Return the name of a model's profile in this world: its class, a hash of its shapes, and the world size."""
    from galvatron_lite.world import world_size

    shapes = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in model.named_parameters()]
    return f"{type(model).__name__.lower()}-{data_hash(shapes)[:8]}-{world_size()}"


def kept_profile(model: nn.Module, graph: ModelGraph, folder: Path) -> Profile | None:
    """Return the stored profile of a model whose graph is ``graph``, measured on this machine and world, else None.

    Profiles that scripts measured come first, then the latest of ``galvatron profile``, then all others of this
    machine. The log says which profile is used; warnings say which profiles of scripts cannot be read or are of another
    graph.
    """
    here = _this_machine()
    for path, stored in (*_script_profiles(model, graph, folder, here), *_other_profiles(model, folder, here)):
        if stored.graph == graph:
            LOG.info(f"profile {path} is of this model on this machine: taken")
            return stored
    return None


_TOLERANCE = 0.05
"""Largest difference between the trainable shares of a profile's parameters and of the model's."""


def check_trainable(model: nn.Module, profile: Profile) -> None:
    """Refuse a profile of other trainable parameters, since backward, gradients and states differ.

    Raises:
        InputError: the trainable share of parameters is not the model's.
    """
    items = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained, total = sum(size for size, trains in items if trains), sum(size for size, _ in items)
    graph = profile.graph
    if abs(trained / max(total, 1) - graph.trainable / max(graph.parameters, 1)) > _TOLERANCE:
        counts = f"{format_count(graph.trainable)} of {format_count(graph.parameters)}"
        remedy = (
            f"Of its parameters {counts} trained; of this model {format_count(trained)} of {format_count(total)} do. "
            "Profile the model as it trains, or leave the profile out."
        )
        raise InputError("profile", profile.name, remedy)


def other_hardware(profile: Profile, here: Cluster | None = None) -> list[str]:
    """Return a warning for each difference between the machine of a profile and this one; none for data sheets."""
    from galvatron_lite.cluster.probe import differs

    if not profile.cluster.fingerprint:
        return []
    return [
        f"Profile {profile.name} was measured on other hardware: {difference}. Its times may not hold here."
        for difference in differs(profile.cluster.fingerprint, (here or _this_machine()).fingerprint)
    ]


def _this_machine() -> Cluster:
    from galvatron_lite.cluster.probe import probe
    from galvatron_lite.world import world_size

    return probe(world_size())


def _script_profiles(
    model: nn.Module, graph: ModelGraph, folder: Path, here: Cluster
) -> Iterator[tuple[Path, Profile]]:
    """Yield the profiles that scripts measured of models of these shapes on this machine."""
    for path in sorted(folder.glob(f"*/{profile_name(model)}.yaml")):
        try:
            stored = read_profile(path)
        except FileFormatError as error:
            _warn(f"{error} It is measured anew.")
            continue
        if other_hardware(stored, here):
            continue
        if stored.graph != graph:
            before = f"{graph.name} as it ran before: {_change(stored.graph, graph)}"
            _warn(f"Profile {path} is of {before}. It is passed over.")
        yield path, stored


def _other_profiles(model: nn.Module, folder: Path, here: Cluster) -> Iterator[tuple[Path, Profile]]:
    """Yield the profiles that ``galvatron profile`` measured on this machine, the latest first.

    Files without this machine's fingerprint are not parsed, which saves time.
    """
    host, file_name = here.fingerprint.get("host", ""), f"{profile_name(model)}.yaml"
    paths = sorted(folder.glob("*/*.yaml"))
    with suppress(InputError, FileFormatError):
        paths = [last_profile(folder), *paths]
    for path in dict.fromkeys(paths):
        if path.name == file_name or not host or host not in path.read_text(encoding="utf-8", errors="replace"):
            continue
        with suppress(FileFormatError):
            stored = read_profile(path)
            measured = stored.origin.kind is OriginKind.MEASURED and stored.cluster.fingerprint
            if measured and not other_hardware(stored, here):
                yield path, stored


def _change(before: ModelGraph, now: ModelGraph) -> str:
    """Return where two graphs of a model first differ, for people."""
    if before.layers != now.layers:
        return "it has other layers now, or in another order"
    if before.edges != now.edges or before.ties != now.ties:
        return "its layers read other layers' results now"
    if before.precision != now.precision:
        return f"in {before.precision}, now in {now.precision}"
    other = [kind for kind, figures in now.kinds.items() if before.kinds.get(kind) != figures]
    if not other:
        return "it is traced otherwise now"
    name = next(layer.name for layer in now.layers if layer.kind in other)
    return f"its forward pass, the shape of a sample or the loss has changed (first in layer {name})"


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=5)
