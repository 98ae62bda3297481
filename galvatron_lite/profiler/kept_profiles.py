"""The profile of a model as it runs now on this world, among those that were kept."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.cluster.probe import probe
from galvatron_lite.errors import LOG, FileFormatError, InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.profiler.schema import OriginKind, Profile
from galvatron_lite.profiler.store import check_hardware, data_hash, last_profile, read_profile
from galvatron_lite.units import format_count
from galvatron_lite.world import world_size


def profile_name(model: nn.Module) -> str:
    """What the profile of a model on this world is called: its class, its shape, and how many processes share it."""
    shapes = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in model.named_parameters()]
    return f"{type(model).__name__.lower()}-{data_hash(shapes)[:8]}-{world_size()}"


def kept_profile(model: nn.Module, graph: ModelGraph, folder: Path) -> Profile | None:
    """The profile of this very model, as it runs now, measured on this very machine and world; None where there is
    none.

    Looked at are those that a script itself has measured, then the last one that ``galvatron profile`` wrote, and all
    others of this machine. A line says which was taken. One that a script has measured and that cannot be read, or is
    of another forward pass, shape of a sample or loss, is told and passed over.
    """
    here = probe(world_size())
    for path, known in (*_measured_shapes(model, graph, folder, here), *_others(model, folder, here)):
        if known.graph == graph:
            LOG.info(f"profile {path} is of this model on this machine: taken")
            return known
    return None


_OTHER = 0.05
"""Share of the parameters by which those that train may differ between a profile and the model."""


def check_trainable(model: nn.Module, profile: Profile) -> None:
    """Refuse a profile that was made while other parameters trained: backward, gradients and states were others.

    Raises:
        InputError: the share of parameters that train is not the model's.
    """
    items = [(one.numel(), one.requires_grad) for one in model.parameters()]
    trained, total = sum(size for size, trains in items if trains), sum(size for size, _ in items)
    graph = profile.graph
    if abs(trained / max(total, 1) - graph.trainable / max(graph.parameters, 1)) > _OTHER:
        counts = f"{format_count(graph.trainable)} of {format_count(graph.parameters)}"
        remedy = (
            f"Of its parameters {counts} trained; of this model {format_count(trained)} of {format_count(total)} do. "
            "Profile the model as it trains, or leave the profile out."
        )
        raise InputError("profile", profile.name, remedy)


def other_hardware(profile: Profile, here: Cluster | None = None) -> list[str]:
    """What differs between the machine of a profile and this one, for people; nothing for data sheets."""
    return check_hardware(profile, here or probe(world_size())) if profile.cluster.fingerprint else []


def _measured_shapes(
    model: nn.Module, graph: ModelGraph, folder: Path, here: Cluster
) -> Iterator[tuple[Path, Profile]]:
    """What scripts have measured of models of these shapes."""
    for path in sorted(folder.glob(f"*/{profile_name(model)}.yaml")):
        try:
            known = read_profile(path)
        except FileFormatError as error:
            _warn(f"{error} It is measured anew.")
            continue
        if other_hardware(known, here):
            continue
        if known.graph != graph:
            before = f"{graph.name} as it ran before: {_change(known.graph, graph)}"
            _warn(f"Profile {path} is of {before}. It is passed over.")
        yield path, known


def _others(model: nn.Module, folder: Path, here: Cluster) -> Iterator[tuple[Path, Profile]]:
    """What ``galvatron profile`` has measured on this machine, the last one first; files of other machines, which do
    not have its fingerprint in them, are not parsed."""
    host, own = here.fingerprint.get("host", ""), f"{profile_name(model)}.yaml"
    for path in dict.fromkeys((*_last(folder), *sorted(folder.glob("*/*.yaml")))):
        if path.name == own or not host or host not in path.read_text(encoding="utf-8", errors="replace"):
            continue
        try:
            known = read_profile(path)
        except FileFormatError:
            continue
        if known.origin.kind is OriginKind.MEASURED and known.cluster.fingerprint and not other_hardware(known, here):
            yield path, known


def _last(folder: Path) -> tuple[Path, ...]:
    try:
        return (last_profile(folder),)
    except (InputError, FileFormatError):
        return ()


def _change(before: ModelGraph, now: ModelGraph) -> str:
    """Where two graphs of a model first differ, for people."""
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
