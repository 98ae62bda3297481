"""What ships under ``profiles/paradl``: tables of layers, links, printed and measured figures. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from galvatron_lite.configs_path import profile_folder
from galvatron_lite.errors import InputError
from galvatron_lite.files import STRICT, from_data, read_data, read_value
from galvatron_lite.oracle.case import Case, Kind
from galvatron_lite.oracle.layers import Network
from galvatron_lite.oracle.network import Fabric, wires_of
from galvatron_lite.oracle.quirks import quirks_named

if TYPE_CHECKING:
    from pydantic import ConfigDict


def network_names() -> tuple[str, ...]:
    """Names of the networks with a table of layers."""
    return tuple(sorted(path.stem for path in (_folder() / "models").glob("*.yaml")))


def network_named(name_or_path: str) -> Network:
    """A table of layers by name (``resnet50``) or from a file.

    Raises:
        InputError: no such name.
        FileFormatError: a file that holds none.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".json"):
        return read_value(Network, path)
    names = network_names()
    if name_or_path not in names:
        close = get_close_matches(name_or_path, names, n=3)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise InputError("model", name_or_path, f"{hint}Tables of layers: {', '.join(names)}.")
    return _network(name_or_path)


@cache
def _network(name: str) -> Network:
    return read_value(Network, _folder() / "models" / f"{name}.yaml")


@cache
def fabric_named(name: str) -> Fabric | None:
    """The closed forms' figures of a cluster by its name; None where it has none of its own."""
    path = _folder() / "networks" / f"{name}.yaml"
    return read_value(Fabric, path) if path.is_file() else None


def _folder() -> Path:
    return profile_folder("paradl")


@dataclass(frozen=True, slots=True)
class Printed:
    """Figures that the released oracle printed.

    Attributes:
        model: name of a table of layers.
        strategy: how it was split.
        batch: see ``Case``.
        source: the log.
        rows: by devices: seconds of compute and communication an epoch, bytes a device.
        network: setting of the links; empty for the default.
        contention: see ``Case``.
        quirks: what the code did otherwise.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    model: str
    strategy: Kind
    batch: int
    source: str
    rows: dict[int, tuple[float, float, float]]
    network: str = ""
    contention: bool = True
    quirks: tuple[str, ...] = ()

    def case(self, network: Network, fabric: Fabric, devices: int) -> Case:
        """The question whose answer was printed."""
        return Case(
            network, wires_of(fabric, self.network or None), self.strategy, devices, self.batch,
            contention=self.contention, quirks=quirks_named(self.quirks),
        )  # fmt: skip


def printed() -> tuple[Printed, ...]:
    """All of them."""
    path = _folder() / "golden.yaml"
    return tuple(from_data(Printed, data, f"{path}, {number}") for number, data in enumerate(read_data(path)))
