"""The table that both kinds of formulas fill, and the limits and bottlenecks read from it.

Kahira et al. 2021 (arXiv:2104.09075, section 5.3 and table 4 of the report): (L) is a limit of the strategy itself,
(B) a bottleneck of software or machine. Each is a share of the epoch, or of what it is measured by, reported from the
number of devices at which it passes its threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, floor

from galvatron_lite.oracle.closed_form import CommunicationSeconds
from galvatron_lite.units import format_bytes


@dataclass(frozen=True, slots=True)
class Limit:
    """How far a strategy scales."""

    devices: int | None  # at most so many; None: no limit of its own
    reason: str  # why, in words


@dataclass(frozen=True, slots=True)
class Loudest:
    """Layers that communicate longest, by what for; empty where none does."""

    gradients: str = ""  # in the gradient exchange
    layers: str = ""  # in its own collectives
    messages: str = ""  # with neighbours


NOTHING, QUIET = CommunicationSeconds(), Loudest()


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """One strategy on so many devices; seconds are of an epoch."""

    strategy: str  # its name
    devices: int
    batch: int  # samples of an iteration
    iterations: int  # of an epoch
    compute: float = 0.0  # forward and backward, what is computed twice included
    moved: CommunicationSeconds = NOTHING  # communication that nothing hides
    update: float = 0.0  # weight update
    waiting: float = 0.0  # of a pipeline's stages for one another; 0 where that is part of ``compute``
    other: float = 0.0  # fixed work of the host, and waiting for the slowest of many nodes
    memory: float = 0.0  # bytes a device
    capacity: float = 0.0  # bytes that a device has
    whole: float = 0.0  # the part of ``memory`` that each device of a group holds alike
    loudest: Loudest = QUIET  # the layers that communicate longest
    uneven: float = 1.0  # the slowest stage's seconds over the mean stage's
    twice: float = 0.0  # share of ``compute`` that several devices do alike
    congested: float = 0.0  # the part of ``moved`` that is waiting for other flows on the same links
    shared: int = 1  # devices that split the work of one sample; 1 under data parallelism
    largest: float = 0.0  # samples of a replica that a device's memory would hold; 0 where that is not worked out
    problem: str = ""  # why there are no figures; empty where there are

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
class StrategyLine:
    """A strategy over numbers of devices."""

    strategy: str  # its name
    rows: tuple[ForecastRow, ...]  # by devices, ascending
    limit: Limit  # how far it scales
    alone: float = 0.0  # seconds of compute of an epoch on one device; 0 where it is not known

    @property
    def complete(self) -> tuple[ForecastRow, ...]:
        """Rows with figures."""
        return tuple(row for row in self.rows if not row.problem)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The whole table."""

    model: str  # its name
    cluster: str  # its name
    formulas: str  # ``paradl`` or ``galvatron``
    samples: int  # of an epoch
    origin: str  # what the seconds come from, and whether they were measured or estimated
    notes: tuple[str, ...]  # what the reader should know
    lines: tuple[StrategyLine, ...]  # the strategies


def gpus(count: int) -> str:
    """A number of them, for people."""
    return f"{count:,} GPU" + ("" if count == 1 else "s")


def beyond(limit: Limit) -> str:
    """What a row beyond a strategy's limit says."""
    return f"beyond its limit of {gpus(limit.devices or 0)}"


def iterations_of(samples: int, batch: int) -> int:
    """Whole iterations of an epoch."""
    return ceil(samples / batch)


class Sort(StrEnum):
    """What a finding is."""

    LIMITATION = "limitation"
    BOTTLENECK = "bottleneck"


@dataclass(frozen=True, slots=True)
class ScalingFinding:
    """One thing that bites."""

    name: str  # of the cause
    sort: Sort  # limitation or bottleneck
    strategy: str  # which runs into it
    devices: int  # the fewest, of those asked about, at which it does
    share: float  # there, 0..1; of what the cause is measured by
    worst: float  # the largest share, and
    worst_devices: int  # where
    words: str  # a line for people


@dataclass(frozen=True, slots=True)
class LimitCause:
    """How a cause is computed from a row."""

    name: str  # for people
    sort: Sort  # limitation or bottleneck
    threshold: float  # share from which it counts
    share: Callable[[ForecastRow], float]  # of a row
    of: str  # what it is a share of
    where: Callable[[ForecastRow], str]  # what of the row says where it is


def _part(seconds: Callable[[ForecastRow], float]) -> Callable[[ForecastRow], float]:
    return lambda row: seconds(row) / row.epoch if row.epoch else 0.0


def _at(layer: str) -> str:
    return f", most at {layer}" if layer else ""


def _nothing(row: ForecastRow) -> str:  # noqa: ARG001
    return ""


CAUSES = (
    LimitCause("gradient exchange", Sort.LIMITATION, 0.1, _part(lambda row: row.moved.gradients), "the epoch",
          lambda row: _at(row.loudest.gradients)),
    LimitCause("layer-wise collectives", Sort.LIMITATION, 0.1, _part(lambda row: row.moved.layers), "the epoch",
          lambda row: _at(row.loudest.layers)),
    LimitCause(
        "messages between neighbours", Sort.BOTTLENECK, 0.1,
        _part(lambda row: row.moved.halo + row.moved.messages + row.moved.gather), "the epoch",
        lambda row: _at(row.loudest.messages),
    ),
    LimitCause("network congestion", Sort.BOTTLENECK, 0.05, _part(lambda row: row.congested), "the epoch", _nothing),
    LimitCause(
        "memory redundancy", Sort.BOTTLENECK, 0.5, lambda row: row.whole / row.memory if row.memory else 0.0,
        "a device's memory", lambda row: f", {format_bytes(row.whole)} held alike",
    ),
    LimitCause("weight update", Sort.LIMITATION, 0.1, _part(lambda row: row.update), "the epoch", _nothing),
    LimitCause(
        "workload balance", Sort.LIMITATION, 0.1, lambda row: 1 - 1 / row.uneven, "the slowest stage's work",
        lambda row: f", which takes {row.uneven:.2f} times the mean",
    ),
    LimitCause("computation redundancy", Sort.BOTTLENECK, 0.1, lambda row: row.twice, "compute", _nothing),
)  # fmt: skip
"""Causes that are shares of a row."""

SPLIT_THRESHOLD = 0.2
"""Share of a device's compute that splitting did not take away, from which it counts."""


def findings(forecast: Forecast) -> tuple[ScalingFinding, ...]:
    """All that bite, strategy by strategy."""
    return tuple(finding for line in forecast.lines for finding in _of_line(line))


def _of_line(line: StrategyLine) -> Iterator[ScalingFinding]:
    rows = [row for row in line.complete if row.devices > 1]
    for cause in CAUSES:
        found = _passing(line, rows, cause)
        if found is not None:
            yield found
    yield from _slow_split(line)
    yield from _overfull(line)
    yield from _ended(line)


def _passing(line: StrategyLine, rows: list[ForecastRow], cause: LimitCause) -> ScalingFinding | None:
    """From the first row that passes the threshold; None where none does."""
    first = next((row for row in rows if cause.share(row) >= cause.threshold), None)
    if first is None:
        return None
    worst = max(rows, key=cause.share)
    here, most = f"{cause.share(first):.0%}", f"{cause.share(worst):.0%}"
    then = f", {most} on {worst.devices:,}" if here != most else ""
    words = f"{here} of {cause.of} from {first.devices:,} GPUs{then}{cause.where(worst)}"
    return ScalingFinding(
        cause.name,
        cause.sort,
        line.strategy,
        first.devices,
        cause.share(first),
        cause.share(worst),
        worst.devices,
        words,
    )


def _slow_split(line: StrategyLine) -> Iterator[ScalingFinding]:
    """Compute that falls less than the devices that share it grow: small shares keep a device less busy."""
    lost = [
        (1 - line.alone / (row.compute * row.devices), row)
        for row in line.complete
        if row.shared > 1 and row.compute and line.alone
    ]
    first = next(((share, row) for share, row in lost if share >= SPLIT_THRESHOLD), None)
    if first is None:
        return
    share, row = first
    worst, last = max(lost, key=lambda pair: pair[0])
    words = (
        f"compute on {row.devices:,} GPUs is {1 / (1 - share):.1f} times what an even split would leave"
        + (f", {1 / (1 - worst):.1f} times on {last.devices:,}" if last is not row else "")
    )  # fmt: skip
    yield ScalingFinding("split work", Sort.BOTTLENECK, line.strategy, row.devices, share, worst, last.devices, words)


def _overfull(line: StrategyLine) -> Iterator[ScalingFinding]:
    """Rows that do not fit the device."""
    tight = [row for row in line.complete if not row.fits]
    if not tight:
        return
    worst = max(tight, key=lambda row: row.memory)
    some = f"{', '.join(f'{row.devices:,}' for row in tight[:-1])}, " if len(tight) > 1 else ""
    counts = some + gpus(tight[-1].devices) if len(tight) < len(line.complete) else "any of these numbers of GPUs"
    words = f"does not fit {format_bytes(worst.capacity)} on {counts}: {format_bytes(worst.memory)}"
    if worst.largest:
        words += (
            f"; {floor(worst.largest):,} samples a replica would fit" if worst.largest >= 1 else "; not one sample fits"
        )
    first, most = (row.memory / row.capacity for row in (tight[0], worst))
    yield ScalingFinding("memory", Sort.LIMITATION, line.strategy, tight[0].devices, first, most, worst.devices, words)


def _ended(line: StrategyLine) -> Iterator[ScalingFinding]:
    """Numbers of devices beyond what the strategy can use."""
    beyond = [row for row in line.rows if row.problem.startswith("beyond its limit")]
    if beyond and line.limit.devices is not None:
        words = f"{gpus(line.limit.devices)} at most: {line.limit.reason}"
        yield ScalingFinding("number of devices", Sort.LIMITATION, line.strategy, beyond[0].devices, 1.0, 1.0,
                      beyond[-1].devices, words)  # fmt: skip
