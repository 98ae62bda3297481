"""What the closed forms are given, and what they answer. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

from galvatron_lite.errors import InputError
from galvatron_lite.oracle.layers import Network
from galvatron_lite.oracle.network import Wires
from galvatron_lite.oracle.quirks import Quirk


class Kind(StrEnum):
    """The strategies of the paper's table 3."""

    SERIAL = "serial"
    DATA = "data"
    SPATIAL = "spatial"
    LAYER = "layer"
    PIPELINE = "pipeline"
    FILTER = "filter"
    CHANNEL = "channel"
    DATA_FILTER = "data+filter"
    DATA_SPATIAL = "data+spatial"


HYBRIDS = (Kind.DATA_FILTER, Kind.DATA_SPATIAL)
"""Strategies of groups: data parallelism between them, another within."""


@dataclass(frozen=True, slots=True)
class Case:
    """One question to the closed forms.

    Attributes:
        network: what is trained.
        wires: on which links.
        kind: how it is split.
        devices: p.
        batch: samples of a replica: of a device under data, of a group (p2 devices) under hybrids, of all elsewhere.
        group: p2, devices of a group of a hybrid.
        segments: S, micro-batches of a pipeline; 0: as many as devices.
        contention: whether flows that share a link slow each other down.
        quirks: see ``Quirk``.
    """

    network: Network
    wires: Wires
    kind: Kind
    devices: int
    batch: int
    group: int = 4
    segments: int = 0
    contention: bool = True
    quirks: frozenset[Quirk] = frozenset()

    @property
    def replicas(self) -> int:
        """p1: replicas that take samples of their own."""
        if self.kind in HYBRIDS:
            return max(self.devices // self.group, 1)
        return self.devices if self.kind is Kind.DATA else 1

    @property
    def global_batch(self) -> int:
        """B: samples of an iteration."""
        return self.batch * self.replicas

    @property
    def iterations(self) -> int:
        """I: of an epoch, whole ones (D / B rounded up, as the released oracle does)."""
        return ceil(self.network.samples / self.global_batch)

    @property
    def parts(self) -> int:
        """S, at most the batch."""
        return max(min(self.segments or self.devices, self.batch), 1)

    def phi(self, flows: float) -> float:
        """Flows that share a link; 1 where contention is left out."""
        return flows if self.contention else 1.0

    def has(self, quirk: Quirk) -> bool:
        """Whether the released code's way is asked for."""
        return quirk in self.quirks


@dataclass(frozen=True, slots=True)
class Moved:
    """Seconds of communication an epoch, by what they are for.

    Attributes:
        gradients: gradient exchange, once an iteration.
        layers: collectives of each layer.
        halo: borders of pictures.
        messages: between pipeline stages.
        gather: all-gather and scatter where a spatial split ends.
    """

    gradients: float = 0.0
    layers: float = 0.0
    halo: float = 0.0
    messages: float = 0.0
    gather: float = 0.0

    @property
    def total(self) -> float:
        """All together."""
        return self.gradients + self.layers + self.halo + self.messages + self.gather

    def times(self, count: float) -> Moved:
        """So many times as much."""
        parts = (self.gradients, self.layers, self.halo, self.messages, self.gather)
        return Moved(*(part * count for part in parts))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a strategy costs on so many devices.

    Attributes:
        compute: seconds of an epoch.
        moved: communication of an epoch.
        memory: bytes a device.
        update: the part of ``compute`` that is weight update.
    """

    compute: float
    moved: Moved
    memory: float
    update: float = 0.0

    @property
    def epoch(self) -> float:
        """Seconds of an epoch: nothing overlaps."""
        return self.compute + self.moved.total


def group_of(case: Case) -> Case:
    """The case with a group that its devices fill.

    Raises:
        InputError: devices that make no whole groups.
    """
    if case.kind not in HYBRIDS or case.devices % case.group == 0:
        return case
    if case.devices < case.group:
        return replace(case, group=case.devices)
    raise InputError("--gpus", case.devices, f"{case.kind.value} takes whole groups of {case.group}; see --group.")
