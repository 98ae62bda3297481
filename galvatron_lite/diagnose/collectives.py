"""What collectives took while steps were profiled, by kind and group of ranks, beside the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.communication import Links
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runs.schema import CollectiveRecord

_PASSES = {Collective.ALL_REDUCE: 2}
"""Times that (n - 1) / n of the bytes cross a link in a ring of n ranks, as NCCL's tests count; 1 of the others."""


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Collectives of one kind on one group, in a step."""

    collective: Collective
    ranks: tuple[int, ...]
    calls: float  # a step
    bytes: int  # of all of them, see ``CollectiveRecord``
    seconds: float  # of all of them on the rank that comes last, which waits for nobody
    predicted: float  # seconds that they take alone
    bandwidth: float  # bytes a second over each link of the ring (bus bandwidth)
    slowest: int  # rank that comes last
    waited: float  # seconds that the others wait for it, their mean


def collective_rows(records: Sequence[CollectiveRecord], profile: Profile) -> tuple[CollectiveRow, ...]:
    """Rows of the records of all ranks, those that take longest first; what waits for one rank is not transfer."""
    rows = _rows(records, profile)
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _rows(records: Sequence[CollectiveRecord], profile: Profile) -> Iterator[CollectiveRow]:
    links, devices = Links(profile), profile.cluster.devices
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[CollectiveRecord]]] = {}
    for record in records:
        groups.setdefault((record.collective, record.ranks), {}).setdefault(record.rank, []).append(record)
    for (kind, ranks), members in groups.items():
        taken = {rank: _a_step(own, "seconds") for rank, own in members.items()}
        last = min(taken, key=taken.__getitem__)
        calls, size = (_a_step(members[last], name) for name in ("calls", "bytes"))
        count, collective = len(ranks), Collective(kind)
        others = [seconds - taken[last] for rank, seconds in taken.items() if rank != last]
        group = RankGroup(count, ranks[1] - ranks[0], max(devices // count, 1))
        call = Communication(collective, size / calls, group, Moment.STEP, overlaps=False)
        moved = _PASSES.get(collective, 1) * (count - 1) / count * size
        yield CollectiveRow(
            collective, ranks, calls, round(size), taken[last], float(links.timed([call])[0]) * calls,
            moved / taken[last] if taken[last] else 0.0, last, sum(others) / max(len(others), 1),
        )  # fmt: skip


def _a_step(records: Sequence[CollectiveRecord], name: str) -> float:
    """Mean of a figure in a step."""
    return float(sum(getattr(one, name) for one in records) / sum(one.steps for one in records))
