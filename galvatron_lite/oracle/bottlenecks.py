"""Where strategies stop scaling, and why: the table of bottlenecks and limitations, from computed rows. No torch here.

Kahira et al. 2021 (arXiv:2104.09075, section 5.3 and table 4 of the report): (L) limits what the strategy can do by its
nature, (B) is a bottleneck of software or machine. Each is a share of the epoch, or of what it takes it from, and is
told from the number of devices at which it passes its threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import floor

from galvatron_lite.oracle.rows import Forecast, Line, Row, gpus
from galvatron_lite.units import format_bytes


class Sort(StrEnum):
    """What a finding is."""

    LIMITATION = "limitation"
    BOTTLENECK = "bottleneck"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that bites.

    Attributes:
        name: of the cause.
        sort: limitation or bottleneck.
        strategy: which runs into it.
        devices: the fewest, of those asked about, at which it does.
        share: there, 0..1; of what the cause is measured by.
        worst: the largest share, and
        worst_devices: where.
        words: a line for people.
    """

    name: str
    sort: Sort
    strategy: str
    devices: int
    share: float
    worst: float
    worst_devices: int
    words: str


@dataclass(frozen=True, slots=True)
class Cause:
    """How a cause is computed from a row.

    Attributes:
        name: for people.
        sort: limitation or bottleneck.
        threshold: share from which it counts.
        share: of a row.
        of: what it is a share of.
        where: what of the row says where it is.
    """

    name: str
    sort: Sort
    threshold: float
    share: Callable[[Row], float]
    of: str
    where: Callable[[Row], str]


def _part(seconds: Callable[[Row], float]) -> Callable[[Row], float]:
    return lambda row: seconds(row) / row.epoch if row.epoch else 0.0


def _at(layer: str) -> str:
    return f", most at {layer}" if layer else ""


def _nothing(row: Row) -> str:  # noqa: ARG001
    return ""


CAUSES = (
    Cause("gradient exchange", Sort.LIMITATION, 0.1, _part(lambda row: row.moved.gradients), "the epoch",
          lambda row: _at(row.loudest.gradients)),
    Cause("layer-wise collectives", Sort.LIMITATION, 0.1, _part(lambda row: row.moved.layers), "the epoch",
          lambda row: _at(row.loudest.layers)),
    Cause(
        "messages between neighbours", Sort.BOTTLENECK, 0.1,
        _part(lambda row: row.moved.halo + row.moved.messages + row.moved.gather), "the epoch",
        lambda row: _at(row.loudest.messages),
    ),
    Cause("network congestion", Sort.BOTTLENECK, 0.05, _part(lambda row: row.congested), "the epoch", _nothing),
    Cause(
        "memory redundancy", Sort.BOTTLENECK, 0.5, lambda row: row.whole / row.memory if row.memory else 0.0,
        "a device's memory", lambda row: f", {format_bytes(row.whole)} held alike",
    ),
    Cause("weight update", Sort.LIMITATION, 0.1, _part(lambda row: row.update), "the epoch", _nothing),
    Cause(
        "workload balance", Sort.LIMITATION, 0.1, lambda row: 1 - 1 / row.uneven, "the slowest stage's work",
        lambda row: f", which takes {row.uneven:.2f} times the mean",
    ),
    Cause("computation redundancy", Sort.BOTTLENECK, 0.1, lambda row: row.twice, "compute", _nothing),
)  # fmt: skip
"""Causes that are shares of a row."""

SPLIT_THRESHOLD = 0.2
"""Share of a device's compute that splitting did not take away, from which it counts."""


def findings(forecast: Forecast) -> tuple[Finding, ...]:
    """All that bite, strategy by strategy."""
    return tuple(finding for line in forecast.lines for finding in _of_line(line))


def _of_line(line: Line) -> Iterator[Finding]:
    rows = [row for row in line.known if row.devices > 1]
    for cause in CAUSES:
        found = _passing(line, rows, cause)
        if found is not None:
            yield found
    yield from _slow_split(line)
    yield from _overfull(line)
    yield from _ended(line)


def _passing(line: Line, rows: list[Row], cause: Cause) -> Finding | None:
    """From the first row that passes the threshold; None where none does."""
    first = next((row for row in rows if cause.share(row) >= cause.threshold), None)
    if first is None:
        return None
    worst = max(rows, key=cause.share)
    here, most = f"{cause.share(first):.0%}", f"{cause.share(worst):.0%}"
    then = f", {most} on {worst.devices:,}" if here != most else ""
    words = f"{here} of {cause.of} from {first.devices:,} GPUs{then}{cause.where(worst)}"
    return Finding(
        cause.name,
        cause.sort,
        line.strategy,
        first.devices,
        cause.share(first),
        cause.share(worst),
        worst.devices,
        words,
    )


def _slow_split(line: Line) -> Iterator[Finding]:
    """Compute that falls less than the devices that share it grow: small shares keep a device less busy."""
    lost = [
        (1 - line.alone / (row.compute * row.devices), row)
        for row in line.known
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
    yield Finding("split work", Sort.BOTTLENECK, line.strategy, row.devices, share, worst, last.devices, words)


def _overfull(line: Line) -> Iterator[Finding]:
    """Rows that do not fit the device."""
    tight = [row for row in line.known if not row.fits]
    if not tight:
        return
    worst = max(tight, key=lambda row: row.memory)
    some = f"{', '.join(f'{row.devices:,}' for row in tight[:-1])}, " if len(tight) > 1 else ""
    counts = some + gpus(tight[-1].devices) if len(tight) < len(line.known) else "any of these numbers of GPUs"
    words = f"does not fit {format_bytes(worst.capacity)} on {counts}: {format_bytes(worst.memory)}"
    if worst.largest:
        words += (
            f"; {floor(worst.largest):,} samples a replica would fit" if worst.largest >= 1 else "; not one sample fits"
        )
    first, most = (row.memory / row.capacity for row in (tight[0], worst))
    yield Finding("memory", Sort.LIMITATION, line.strategy, tight[0].devices, first, most, worst.devices, words)


def _ended(line: Line) -> Iterator[Finding]:
    """Numbers of devices beyond what the strategy can use."""
    beyond = [row for row in line.rows if row.problem.startswith("beyond its limit")]
    if beyond and line.limit.devices is not None:
        words = f"{gpus(line.limit.devices)} at most: {line.limit.reason}"
        yield Finding("number of devices", Sort.LIMITATION, line.strategy, beyond[0].devices, 1.0, 1.0,
                      beyond[-1].devices, words)  # fmt: skip
