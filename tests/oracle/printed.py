"""Figures that the released ParaDL oracle printed (``profiles/paradl/golden.yaml``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from galvatron_lite.files import STRICT, from_data, read_data
from galvatron_lite.folders import profile_folder
from galvatron_lite.oracle.closed_form import Case, quirks_named
from galvatron_lite.oracle.layers import Fabric, Network, fabric_links
from galvatron_lite.oracle.rows import Method

if TYPE_CHECKING:
    from pydantic import ConfigDict


@dataclass(frozen=True, slots=True)
class Printed:
    """Figures that the released oracle printed."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    model: str  # name of a table of layers
    strategy: Method  # how it was split
    batch: int  # see ``Case``
    source: str  # the log
    # by devices: seconds of compute and communication an epoch, bytes a device
    rows: dict[int, tuple[float, float, float]]
    network: str = ""  # setting of the links; empty for the default
    contention: bool = True  # see ``Case``
    quirks: tuple[str, ...] = ()  # what the code did otherwise

    def case(self, network: Network, fabric: Fabric, devices: int) -> Case:
        """The question whose answer was printed."""
        wires, quirks = fabric_links(fabric, self.network or None), quirks_named(self.quirks)
        return Case(
            self.strategy, devices, self.batch, network.samples, network=network, wires=wires, quirks=quirks,
            contention=self.contention,
        )  # fmt: skip


def printed() -> tuple[Printed, ...]:
    """All of them."""
    path = profile_folder("paradl") / "golden.yaml"
    return tuple(from_data(Printed, data, f"{path}, {number}") for number, data in enumerate(read_data(path)))
