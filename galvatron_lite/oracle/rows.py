"""What both kinds of formulas answer: one strategy on one number of devices. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from galvatron_lite.oracle.case import Moved


@dataclass(frozen=True, slots=True)
class Limit:
    """How far a strategy scales.

    Attributes:
        devices: at most so many; None: no limit of its own.
        reason: why, in words.
    """

    devices: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Loudest:
    """Layers that communicate longest, by what for; empty where none does.

    Attributes:
        gradients: in the gradient exchange.
        layers: in its own collectives.
        messages: with neighbours.
    """

    gradients: str = ""
    layers: str = ""
    messages: str = ""


NOTHING, QUIET = Moved(), Loudest()


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy on so many devices; seconds are of an epoch.

    Attributes:
        strategy: its name.
        devices: how many.
        batch: samples of an iteration.
        iterations: of an epoch.
        compute: forward and backward, what is computed twice included.
        moved: communication that nothing hides.
        update: weight update.
        waiting: of a pipeline's stages for one another; 0 where that is part of ``compute``.
        other: fixed work of the host, and waiting for the slowest of many nodes.
        memory: bytes a device.
        capacity: bytes that a device has.
        whole: the part of ``memory`` that each device of a group holds alike.
        loudest: the layers that communicate longest.
        uneven: the slowest stage's seconds over the mean stage's.
        twice: share of ``compute`` that several devices do alike.
        congested: the part of ``moved`` that is waiting for other flows on the same links.
        shared: devices that split the work of one sample; 1 under data parallelism.
        largest: samples of a replica that a device's memory would hold; 0 where that is not worked out.
        problem: why there are no figures; empty where there are.
    """

    strategy: str
    devices: int
    batch: int
    iterations: int
    compute: float = 0.0
    moved: Moved = NOTHING
    update: float = 0.0
    waiting: float = 0.0
    other: float = 0.0
    memory: float = 0.0
    capacity: float = 0.0
    whole: float = 0.0
    loudest: Loudest = QUIET
    uneven: float = 1.0
    twice: float = 0.0
    congested: float = 0.0
    shared: int = 1
    largest: float = 0.0
    problem: str = ""

    @property
    def busy(self) -> float:
        """Seconds of an epoch that are not communication."""
        return self.compute + self.update + self.waiting + self.other

    @property
    def epoch(self) -> float:
        """Seconds of an epoch."""
        return self.busy + self.moved.total

    @property
    def iteration(self) -> float:
        """Seconds of an iteration."""
        return self.epoch / self.iterations

    @property
    def fits(self) -> bool:
        """Whether a device's memory is enough."""
        return not self.problem and self.memory <= self.capacity


@dataclass(frozen=True, slots=True)
class Line:
    """A strategy over numbers of devices.

    Attributes:
        strategy: its name.
        rows: by devices, ascending.
        limit: how far it scales.
        alone: seconds of compute of an epoch on one device; 0 where it is not known.
    """

    strategy: str
    rows: tuple[Row, ...]
    limit: Limit
    alone: float = 0.0

    @property
    def known(self) -> tuple[Row, ...]:
        """Rows with figures."""
        return tuple(row for row in self.rows if not row.problem)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The whole table.

    Attributes:
        model: its name.
        cluster: its name.
        formulas: ``paradl`` or ``galvatron``.
        samples: of an epoch.
        origin: what the seconds come from, and whether they were measured or estimated.
        notes: what the reader should know.
        lines: the strategies.
    """

    model: str
    cluster: str
    formulas: str
    samples: int
    origin: str
    notes: tuple[str, ...]
    lines: tuple[Line, ...]


def gpus(count: int) -> str:
    """A number of them, for people."""
    return f"{count:,} GPU" + ("" if count == 1 else "s")


def beyond(limit: Limit) -> str:
    """What a row beyond a strategy's limit says."""
    return f"beyond its limit of {gpus(limit.devices or 0)}"


def iterations_of(samples: int, batch: int) -> int:
    """Whole iterations of an epoch."""
    return ceil(samples / batch)
