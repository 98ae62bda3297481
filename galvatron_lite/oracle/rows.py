"""The table that both kinds of formulas fill, and the limits and bottlenecks read from it.

Kahira et al. 2021 (arXiv:2104.09075, section 5.3 and table 4 of the report): (L) is a limit of the strategy itself,
(B) a bottleneck of software or machine. Each is a share of the epoch, or of what it is measured by, reported from the
number of devices at which it passes its threshold.
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
"""Strategies of groups: data parallelism between them, another within."""
IN_TURN = (Method.PIPELINE, Method.LAYER)
"""Strategies of which each device has layers of its own."""


@dataclass(frozen=True, slots=True)
class RowQuestion:
    """One row that is asked for."""

    kind: Method  # how the model is split
    devices: int
    batch: int  # samples of a replica: of a device under data, of a group under hybrids, of all devices elsewhere
    samples: int  # of an epoch
    group: int = 4  # devices of a group of a hybrid
    segments: int = 0  # micro-batches of a pipeline; 0: as many as stages
    # of every layer, in place of ``kind``'s, on the fewest devices; more of them are more replicas
    text: Strategy | None = None

    @property
    def strategy(self) -> Strategy | None:
        """Of every layer, on all devices."""
        if self.text is None:
            return None
        return replace(self.text, data=self.text.data * max(self.devices // self.text.devices, 1))

    @property
    def name(self) -> str:
        """Of the row."""
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
        """Groups that take samples of their own."""
        return max(self.devices // self.width, 1)

    @property
    def global_batch(self) -> int:
        """Samples of an iteration."""
        return self.batch * self.replicas

    @property
    def iterations(self) -> int:
        """Of an epoch, whole ones."""
        return ceil(self.samples / self.global_batch)

    @property
    def parts(self) -> int:
        """Micro-batches in which the layers pass on a batch."""
        wanted = min(self.segments or self.devices, self.batch)
        return max(wanted, 1) if self.kind is Method.PIPELINE else 1


@dataclass(frozen=True, slots=True)
class CommunicationSeconds:
    """Seconds of communication an epoch, by what they are for."""

    gradients: float = 0.0  # gradient exchange, once an iteration
    layers: float = 0.0  # collectives of each layer
    halo: float = 0.0  # borders of pictures
    messages: float = 0.0  # between pipeline stages
    gather: float = 0.0  # all-gather and scatter where a spatial split ends

    @property
    def total(self) -> float:
        """All together."""
        return float(sum(astuple(self)))

    def times(self, count: float) -> CommunicationSeconds:
        """So many times as much."""
        return CommunicationSeconds(*(part * count for part in astuple(self)))


@dataclass(frozen=True, slots=True)
class Limit:
    """How far a strategy scales."""

    devices: int | None  # at most so many; None: no limit of its own
    reason: str  # why, in words


@dataclass(frozen=True, slots=True)
class LongestCommunication:
    """Layers that communicate longest, by what for; empty where none does."""

    gradients: str = ""  # in the gradient exchange
    layers: str = ""  # in its own collectives
    messages: str = ""  # with neighbours


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """One strategy on so many devices; seconds are of an epoch."""

    strategy: str  # its name
    devices: int
    batch: int  # samples of an iteration
    iterations: int  # of an epoch
    compute: float = 0.0  # forward and backward, what is computed twice included
    moved: CommunicationSeconds = CommunicationSeconds()  # communication that nothing hides
    update: float = 0.0  # weight update
    waiting: float = 0.0  # of a pipeline's stages for one another; 0 where that is part of ``compute``
    other: float = 0.0  # fixed work of the host, and waiting for the slowest of many nodes
    memory: float = 0.0  # bytes a device
    capacity: float = 0.0  # bytes that a device has
    replicated: float = 0.0  # the part of ``memory`` that each device of a group holds alike
    loudest: LongestCommunication = LongestCommunication()  # the layers that communicate longest
    uneven: float = 1.0  # the slowest stage's seconds over the mean stage's
    twice: float = 0.0  # share of ``compute`` that several devices do alike
    congested: float = 0.0  # the part of ``moved`` that is waiting for other flows on the same links
    shared: int = 1  # devices that split the work of one sample; 1 under data parallelism
    largest: float = 0.0  # samples of a replica that a device's memory would hold; 0 where that is not worked out
    problem: str = ""  # why there are no figures; empty where there are

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


Question = TypeVar("Question", bound=RowQuestion)


def line_of(
    question: Question,
    counts: Sequence[int],
    limit: Limit,
    price: Callable[[Question, ForecastRow], ForecastRow],
    alone: float,
) -> StrategyLine:
    """A strategy over numbers of devices.

    Args:
        question: of any number of devices.
        counts: of devices, ascending.
        limit: beyond which rows have no figures.
        price: the row of a question, from one without figures.
        alone: seconds of compute of an epoch on one device.
    """
    rows = []
    for devices in counts:
        one = replace(question, devices=devices)
        row = ForecastRow(one.name, devices, one.global_batch, one.iterations)
        if limit.devices is not None and devices > limit.devices:
            rows.append(replace(row, problem=f"beyond its limit of {gpus(limit.devices)}"))
        else:
            rows.append(price(one, row))
    return StrategyLine(question.name, tuple(rows), limit, alone)


def limit_by_count(question: RowQuestion, layers: int) -> Limit | None:
    """How many devices a strategy can use that samples and layers limit; None for others."""
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
    """The table."""

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


def least_runs(weights: Sequence[float], runs: int) -> list[int]:
    """Lengths of non-empty consecutive runs, of which the heaviest is as light as can be.

    Halves the interval that holds the least limit until no number lies between.
    """
    low, high = max(weights), sum(weights)
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if len(_runs_within(weights, middle, runs)) <= runs else (middle, high)
    return _runs_within(weights, high if len(_runs_within(weights, low, runs)) > runs else low, runs)


def _runs_within(weights: Sequence[float], limit: float, runs: int) -> list[int]:
    """Runs up to the limit each, cut sooner where what is left would not give every run a member."""
    sizes, total = [0], 0.0
    for place, weight in enumerate(weights):
        if sizes[-1] and (total + weight > limit or len(weights) - place <= runs - len(sizes)):
            sizes, total = [*sizes, 0], 0.0
        sizes[-1] += 1
        total += weight
    return sizes


class FindingKind(StrEnum):
    """What a finding is."""

    LIMITATION = "limitation"
    BOTTLENECK = "bottleneck"


@dataclass(frozen=True, slots=True)
class ScalingFinding:
    """What keeps a strategy from scaling."""

    name: str  # of the cause
    sort: FindingKind  # limitation or bottleneck
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
    sort: FindingKind  # limitation or bottleneck
    threshold: float  # share from which it counts
    share: Callable[[ForecastRow], float]  # of a row
    of: str = "the epoch"  # what it is a share of
    where: Callable[[ForecastRow], str] = lambda _: ""  # what of the row says where it is


def _part(seconds: Callable[[ForecastRow], float]) -> Callable[[ForecastRow], float]:
    return lambda row: seconds(row) / row.epoch if row.epoch else 0.0


def _at(name: str) -> Callable[[ForecastRow], str]:
    def where(row: ForecastRow) -> str:
        layer = getattr(row.loudest, name)
        return f", most at {layer}" if layer else ""

    return where


CAUSES = (
    LimitCause(
        "gradient exchange", FindingKind.LIMITATION, 0.1, _part(lambda row: row.moved.gradients),
        where=_at("gradients"),
    ),
    LimitCause(
        "layer-wise collectives", FindingKind.LIMITATION, 0.1, _part(lambda row: row.moved.layers), where=_at("layers"),
    ),
    LimitCause(
        "messages between neighbours", FindingKind.BOTTLENECK, 0.1,
        _part(lambda row: row.moved.halo + row.moved.messages + row.moved.gather), where=_at("messages"),
    ),
    LimitCause("network congestion", FindingKind.BOTTLENECK, 0.05, _part(lambda row: row.congested)),
    LimitCause(
        "memory redundancy", FindingKind.BOTTLENECK, 0.5,
        lambda row: row.replicated / row.memory if row.memory else 0.0,
        "a device's memory", lambda row: f", {format_bytes(row.replicated)} held alike",
    ),
    LimitCause("weight update", FindingKind.LIMITATION, 0.1, _part(lambda row: row.update)),
    LimitCause(
        "workload balance", FindingKind.LIMITATION, 0.1, lambda row: 1 - 1 / row.uneven, "the slowest stage's work",
        lambda row: f", which takes {row.uneven:.2f} times the mean",
    ),
    LimitCause("computation redundancy", FindingKind.BOTTLENECK, 0.1, lambda row: row.twice, "compute"),
)  # fmt: skip
"""Causes that are shares of a row."""

SPLIT_THRESHOLD = 0.2
"""Share of a device's compute that splitting did not take away, from which it counts."""


def findings(forecast: Forecast) -> tuple[ScalingFinding, ...]:
    """Every limitation and bottleneck, strategy by strategy."""
    return tuple(finding for line in forecast.lines for finding in _of_line(line))


def _of_line(line: StrategyLine) -> Iterator[ScalingFinding]:
    rows = [row for row in line.complete if row.devices > 1]
    for cause in CAUSES:
        shares = [(cause.share(row), row) for row in rows]
        first = next((pair for pair in shares if pair[0] >= cause.threshold), None)
        if first is not None:
            most, worst = max(shares, key=lambda pair: pair[0])
            words = f"{first[0]:.0%} of {cause.of} from {first[1].devices:,} GPUs"
            words += f", {most:.0%} on {worst.devices:,}" * (f"{first[0]:.0%}" != f"{most:.0%}") + cause.where(worst)
            yield _finding(cause.name, cause.sort, line, (first, (most, worst)), words)
    yield from _slow_split(line)
    yield from _overfull(line)
    ended = [(1.0, row) for row in line.rows if row.problem.startswith("beyond its limit")]
    if ended and line.limit.devices is not None:
        words = f"{gpus(line.limit.devices)} at most: {line.limit.reason}"
        yield _finding("number of devices", FindingKind.LIMITATION, line, (ended[0], ended[-1]), words)


Shares = tuple[tuple[float, ForecastRow], tuple[float, ForecastRow]]  # the first that counts, and the worst


def _finding(name: str, sort: FindingKind, line: StrategyLine, shares: Shares, words: str) -> ScalingFinding:
    (first, row), (most, worst) = shares
    return ScalingFinding(name, sort, line.strategy, row.devices, first, most, worst.devices, words)


def _slow_split(line: StrategyLine) -> Iterator[ScalingFinding]:
    """Compute that falls less than the devices that share it grow: small shares keep a device less busy."""
    split = [row for row in line.complete if row.shared > 1 and row.compute and line.alone]
    lost = [(1 - line.alone / (row.compute * row.devices), row) for row in split]
    first = next((pair for pair in lost if pair[0] >= SPLIT_THRESHOLD), None)
    if first is not None:
        most = max(lost, key=lambda pair: pair[0])
        words = f"compute on {first[1].devices:,} GPUs is {1 / (1 - first[0]):.1f} times what an even split would leave"
        words += f", {1 / (1 - most[0]):.1f} times on {most[1].devices:,}" if most[1] is not first[1] else ""
        yield _finding("split work", FindingKind.BOTTLENECK, line, (first, most), words)


def _overfull(line: StrategyLine) -> Iterator[ScalingFinding]:
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
