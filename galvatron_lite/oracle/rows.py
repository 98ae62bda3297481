"""The forecast table of both kinds of formulas, and the limitations and bottlenecks derived from it.

Kahira et al. 2021 (arXiv:2104.09075, section 5.3 and table 4 of the report): (L) is a limitation of the strategy, (B)
a bottleneck of software or machine. Each is a share, of the epoch by default, and is reported from the number of
devices at which it passes its threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from math import ceil, floor
from typing import TypeVar

from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.units import format_bytes


class Method(StrEnum):
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


HYBRIDS = (Method.DATA_FILTER, Method.DATA_SPATIAL)
"""Data parallelism between groups of devices, another method within."""
IN_TURN = (Method.PIPELINE, Method.LAYER)
"""Methods in which each device has its own layers."""


@dataclass(frozen=True, slots=True)
class RowQuestion:
    """The input of one row."""

    kind: Method  # how the model is split
    devices: int
    batch: int  # samples of a replica: of a device under data, of a group under hybrids, otherwise of all devices
    samples: int  # samples of an epoch
    group: int = 4  # devices of a group of a hybrid
    segments: int = 0  # micro-batches of a pipeline; 0: as many as stages
    text: Strategy | None = None  # replaces ``kind``: the strategy of each layer on the devices of one replica

    @property
    def strategy(self) -> Strategy | None:
        """The strategy ``text`` on all devices."""
        if self.text is None:
            return None
        return replace(self.text, data=self.text.data * max(self.devices // self.text.devices, 1))

    @property
    def name(self) -> str:
        """Name of the row."""
        return str(self.text or self.kind.value)

    @property
    def width(self) -> int:
        """Devices of a group."""
        if self.strategy is not None:
            return self.strategy.devices // self.strategy.batch_degree
        if self.kind in HYBRIDS:
            return min(self.group, self.devices)
        return 1 if self.kind is Method.DATA else self.devices

    @property
    def shared(self) -> int:
        """Devices that split the work of one sample; 1 under data parallelism and in pipelines."""
        return 1 if self.strategy is None and self.kind in (Method.SERIAL, *IN_TURN) else self.width

    @property
    def replicas(self) -> int:
        """Groups with different samples."""
        return max(self.devices // self.width, 1)

    @property
    def global_batch(self) -> int:
        """Samples of an iteration."""
        return self.batch * self.replicas

    @property
    def iterations(self) -> int:
        """Iterations of an epoch, rounded up."""
        return ceil(self.samples / self.global_batch)

    @property
    def parts(self) -> int:
        """Micro-batches of a batch."""
        wanted = min(self.segments or self.devices, self.batch)
        return max(wanted, 1) if self.kind is Method.PIPELINE else 1


@dataclass(frozen=True, slots=True)
class CommunicationSeconds:
    """Seconds of communication of an epoch, by purpose."""

    gradients: float = 0.0  # gradient exchange, once an iteration
    layers: float = 0.0  # collectives of each layer
    halo: float = 0.0  # borders of pictures
    messages: float = 0.0  # between pipeline stages
    gather: float = 0.0  # all-gather and scatter where a spatial split ends

    @property
    def total(self) -> float:
        """The sum."""
        return float(sum(astuple(self)))

    def times(self, count: float) -> CommunicationSeconds:
        """Return ``count`` times the seconds."""
        return CommunicationSeconds(*(part * count for part in astuple(self)))


@dataclass(frozen=True, slots=True)
class Limit:
    """The number of devices that a strategy can use."""

    devices: int | None  # at most; None: no limit
    reason: str  # for people


@dataclass(frozen=True, slots=True)
class LongestCommunication:
    """Names of the layers that communicate longest, by purpose; empty if none does."""

    gradients: str = ""  # gradient exchange
    layers: str = ""  # collectives of the layer
    messages: str = ""  # messages between neighbours


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """Forecast of one strategy on some number of devices; seconds of an epoch."""

    strategy: str  # its name
    devices: int
    batch: int  # samples of an iteration
    iterations: int  # iterations of an epoch
    compute: float = 0.0  # forward and backward, duplicated work included
    moved: CommunicationSeconds = CommunicationSeconds()  # exposed communication
    update: float = 0.0  # weight update
    waiting: float = 0.0  # of pipeline stages for one another; 0 if ``compute`` includes it
    other: float = 0.0  # fixed host time, and waiting for the slowest of many nodes
    memory: float = 0.0  # bytes needed on a device
    capacity: float = 0.0  # bytes of a device
    replicated: float = 0.0  # the part of ``memory`` that is equal on all devices of a group
    longest: LongestCommunication = LongestCommunication()
    imbalance: float = 1.0  # seconds of the slowest stage over the mean
    duplicated: float = 0.0  # share of ``compute`` that several devices repeat
    congested: float = 0.0  # the part of ``moved`` that is due to other flows on the same links
    shared: int = 1  # devices that split the work of one sample; 1 under data parallelism
    largest: float = 0.0  # samples of a replica that fit a device's memory; 0: not computed
    problem: str = ""  # why there are no figures; empty if there are

    @property
    def epoch(self) -> float:
        """Seconds of an epoch."""
        return self.compute + self.update + self.waiting + self.other + self.moved.total

    @property
    def iteration(self) -> float:
        """Seconds of an iteration."""
        return self.epoch / self.iterations

    @property
    def fits(self) -> bool:
        """Whether the memory of a device suffices."""
        return not self.problem and self.memory <= self.capacity


@dataclass(frozen=True, slots=True)
class StrategyLine:
    """A strategy on several numbers of devices."""

    strategy: str  # its name
    rows: tuple[ForecastRow, ...]  # ascending by devices
    limit: Limit
    alone: float = 0.0  # seconds of compute of an epoch on one device; 0: unknown

    @property
    def complete(self) -> tuple[ForecastRow, ...]:
        """Rows with figures."""
        return tuple(row for row in self.rows if not row.problem)


Question = TypeVar("Question", bound=RowQuestion)


def strategy_line(
    question: Question,
    counts: Sequence[int],
    limit: Limit,
    price: Callable[[Question, ForecastRow], ForecastRow],
    alone: float,
) -> StrategyLine:
    """Return a strategy on several numbers of devices.

    Args:
        question: the strategy, on any number of devices.
        counts: numbers of devices, ascending.
        limit: rows beyond it have no figures.
        price: fills the row of a question.
        alone: seconds of compute of an epoch on one device.
    """
    rows = []
    for devices in counts:
        scaled = replace(question, devices=devices)
        row = ForecastRow(scaled.name, devices, scaled.global_batch, scaled.iterations)
        if limit.devices is not None and devices > limit.devices:
            rows.append(replace(row, problem=f"beyond its limit of {gpus(limit.devices)}"))
        else:
            rows.append(price(scaled, row))
    return StrategyLine(question.name, tuple(rows), limit, alone)


def limit_by_count(question: RowQuestion, layers: int) -> Limit | None:
    """Return the limit of methods that samples or layers limit; None for other methods."""
    if question.kind is Method.SERIAL:
        return Limit(1, "p = 1")
    if question.kind in IN_TURN:
        return Limit(layers, f"p <= {layers} layers")
    if question.kind is Method.DATA:
        most = max(question.samples // max(question.batch, 1), 1)
        return Limit(most, f"p <= B, and B = {question.batch} p is at most the data set")
    return None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast table."""

    model: str  # name of the model
    cluster: str  # name of the cluster
    formulas: str  # ``paradl`` or ``galvatron``
    samples: int  # samples of an epoch
    origin: str  # origin of the seconds: ``measured`` or ``estimated``, and from what
    notes: tuple[str, ...]  # for people
    lines: tuple[StrategyLine, ...]


def gpus(count: int) -> str:
    """Return a number of GPUs in words."""
    return f"{count:,} GPU" + ("" if count == 1 else "s")


def balanced_runs(weights: Sequence[float], runs: int) -> list[int]:
    """Return the lengths of non-empty consecutive runs that minimise the heaviest run.

    Bisects the limit on the weight of a run down to adjacent floats.
    """
    low, high = max(weights), sum(weights)
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if len(_runs_within(weights, middle, runs)) <= runs else (middle, high)
    return _runs_within(weights, high if len(_runs_within(weights, low, runs)) > runs else low, runs)


def _runs_within(weights: Sequence[float], limit: float, runs: int) -> list[int]:
    """Return greedy runs up to the limit, shorter if the remaining runs would otherwise be empty."""
    sizes, total = [0], 0.0
    for index, weight in enumerate(weights):
        if sizes[-1] and (total + weight > limit or len(weights) - index <= runs - len(sizes)):
            sizes, total = [*sizes, 0], 0.0
        sizes[-1] += 1
        total += weight
    return sizes


class FindingKind(StrEnum):
    """Whether the strategy, or software and machine, limit scaling."""

    LIMITATION = "limitation"
    BOTTLENECK = "bottleneck"


@dataclass(frozen=True, slots=True)
class ScalingFinding:
    """A cause that keeps a strategy from scaling."""

    name: str  # name of the cause
    sort: FindingKind
    strategy: str
    devices: int  # the smallest number of devices at which it counts
    share: float  # its share there, 0..1
    worst: float  # its largest share
    worst_devices: int  # number of devices with the largest share
    words: str  # a line for people


@dataclass(frozen=True, slots=True)
class LimitCause:
    """The rule by which a cause is found."""

    name: str  # for people
    sort: FindingKind
    threshold: float  # share from which it counts
    share: Callable[[ForecastRow], float]  # its share in a row
    of: str = "the epoch"  # what it is a share of
    where: Callable[[ForecastRow], str] = lambda _: ""  # details of a row, for people


def _of_epoch(seconds: Callable[[ForecastRow], float]) -> Callable[[ForecastRow], float]:
    return lambda row: seconds(row) / row.epoch if row.epoch else 0.0


def _most_at(name: str) -> Callable[[ForecastRow], str]:
    def where(row: ForecastRow) -> str:
        layer = getattr(row.longest, name)
        return f", most at {layer}" if layer else ""

    return where


CAUSES = (
    LimitCause(
        "gradient exchange", FindingKind.LIMITATION, 0.1, _of_epoch(lambda row: row.moved.gradients),
        where=_most_at("gradients"),
    ),
    LimitCause(
        "layer-wise collectives", FindingKind.LIMITATION, 0.1, _of_epoch(lambda row: row.moved.layers),
        where=_most_at("layers"),
    ),
    LimitCause(
        "messages between neighbours", FindingKind.BOTTLENECK, 0.1,
        _of_epoch(lambda row: row.moved.halo + row.moved.messages + row.moved.gather), where=_most_at("messages"),
    ),
    LimitCause("network congestion", FindingKind.BOTTLENECK, 0.05, _of_epoch(lambda row: row.congested)),
    LimitCause(
        "memory redundancy", FindingKind.BOTTLENECK, 0.5,
        lambda row: row.replicated / row.memory if row.memory else 0.0,
        "a device's memory", lambda row: f", {format_bytes(row.replicated)} held alike",
    ),
    LimitCause("weight update", FindingKind.LIMITATION, 0.1, _of_epoch(lambda row: row.update)),
    LimitCause(
        "workload balance", FindingKind.LIMITATION, 0.1, lambda row: 1 - 1 / row.imbalance, "the slowest stage's work",
        lambda row: f", which takes {row.imbalance:.2f} times the mean",
    ),
    LimitCause("computation redundancy", FindingKind.BOTTLENECK, 0.1, lambda row: row.duplicated, "compute"),
)  # fmt: skip
"""Causes that are shares of a row."""

SPLIT_THRESHOLD = 0.2
"""Share of a device's compute, in excess of an even split, from which it counts."""


def findings(forecast: Forecast) -> tuple[ScalingFinding, ...]:
    """Return all limitations and bottlenecks, strategy by strategy."""
    return tuple(finding for line in forecast.lines for finding in _line_findings(line))


def _line_findings(line: StrategyLine) -> Iterator[ScalingFinding]:
    rows = [row for row in line.complete if row.devices > 1]
    for cause in CAUSES:
        shares = [(cause.share(row), row) for row in rows]
        first = next((pair for pair in shares if pair[0] >= cause.threshold), None)
        if first is not None:
            most, worst = max(shares, key=lambda pair: pair[0])
            words = f"{first[0]:.0%} of {cause.of} from {first[1].devices:,} GPUs"
            words += f", {most:.0%} on {worst.devices:,}" * (f"{first[0]:.0%}" != f"{most:.0%}") + cause.where(worst)
            yield _finding(cause.name, cause.sort, line, (first, (most, worst)), words)
    yield from _split_finding(line)
    yield from _memory_finding(line)
    ended = [(1.0, row) for row in line.rows if row.problem.startswith("beyond its limit")]
    if ended and line.limit.devices is not None:
        words = f"{gpus(line.limit.devices)} at most: {line.limit.reason}"
        yield _finding("number of devices", FindingKind.LIMITATION, line, (ended[0], ended[-1]), words)


Shares = tuple[tuple[float, ForecastRow], tuple[float, ForecastRow]]  # the first that counts, and the worst


def _finding(name: str, sort: FindingKind, line: StrategyLine, shares: Shares, words: str) -> ScalingFinding:
    (first, row), (most, worst) = shares
    return ScalingFinding(name, sort, line.strategy, row.devices, first, most, worst.devices, words)


def _split_finding(line: StrategyLine) -> Iterator[ScalingFinding]:
    """Find compute that shrinks less than devices are added, since small shares use a device less well."""
    split = [row for row in line.complete if row.shared > 1 and row.compute and line.alone]
    lost = [(1 - line.alone / (row.compute * row.devices), row) for row in split]
    first = next((pair for pair in lost if pair[0] >= SPLIT_THRESHOLD), None)
    if first is not None:
        most = max(lost, key=lambda pair: pair[0])
        words = f"compute on {first[1].devices:,} GPUs is {1 / (1 - first[0]):.1f} times what an even split would leave"
        words += f", {1 / (1 - most[0]):.1f} times on {most[1].devices:,}" if most[1] is not first[1] else ""
        yield _finding("split work", FindingKind.BOTTLENECK, line, (first, most), words)


def _memory_finding(line: StrategyLine) -> Iterator[ScalingFinding]:
    tight = [row for row in line.complete if not row.fits]
    if not tight:
        return
    worst = max(tight, key=lambda row: row.memory)
    some = f"{', '.join(f'{row.devices:,}' for row in tight[:-1])}, " if len(tight) > 1 else ""
    counts = some + gpus(tight[-1].devices) if len(tight) < len(line.complete) else "any of these numbers of GPUs"
    words = f"does not fit {format_bytes(worst.capacity)} on {counts}: {format_bytes(worst.memory)}"
    if worst.largest:
        count = floor(worst.largest)
        words += f"; {count:,} samples a replica would fit" if count else "; not one sample fits"
    first, most = ((row.memory / row.capacity, row) for row in (tight[0], worst))
    yield _finding("memory", FindingKind.LIMITATION, line, (first, most), words)
