"""What the planner's cost model is asked of one row. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.oracle.case import HYBRIDS, Kind
from galvatron_lite.parallelism.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Question:
    """One row that is asked for.

    Attributes:
        kind: how the model is split.
        devices: how many.
        batch: samples of a replica: see ``oracle.case.Case``.
        samples: of an epoch.
        group: devices of a group of a hybrid.
        segments: micro-batches of a pipeline; 0: as many as stages.
        strategy: of every layer, in place of ``kind``'s.
        name: of the row.
    """

    kind: Kind
    devices: int
    batch: int
    samples: int
    group: int = 4
    segments: int = 0
    strategy: Strategy | None = None
    name: str = ""

    @property
    def width(self) -> int:
        """Devices of a group."""
        if self.strategy is not None:
            return self.devices // self.strategy.batch_degree
        if self.kind in HYBRIDS:
            return min(self.group, self.devices)
        return 1 if self.kind in (Kind.DATA, Kind.SERIAL) else self.devices

    @property
    def replicas(self) -> int:
        """Groups that take samples of their own."""
        return self.devices // self.width

    @property
    def global_batch(self) -> int:
        """Samples of an iteration."""
        return self.batch * self.replicas
