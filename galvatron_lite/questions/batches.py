"""Which batch trains fastest: samples a second over batch sizes, and from where on more samples hardly help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from galvatron_lite.cluster.budget import bytes_on
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.questions.bounds import least_seconds
from galvatron_lite.questions.counts import even
from galvatron_lite.questions.setting import Point, Points, Progress, Setting, gathered, look, require_plan

MOST_SAMPLES_PER_DEVICE = 64
"""Samples a device up to which batches are looked at where nothing else is said."""
SATURATED = 0.01
"""Share of the best throughput by which the batch that saturates may fall behind."""


@dataclass(frozen=True, slots=True)
class BestBatch:
    """The answer.

    Attributes:
        points: of the batches, ascending; those that cannot beat the best have no plan, and say so.
        best: of the greatest throughput; of several the least batch.
        saturated: the least batch whose throughput is within 1 % of the best.
        ceiling: samples a second that no batch of those looked at exceeds: compute without any loss; infinite where it
            is not known.
        complete: whether every batch was looked at.
    """

    points: tuple[Point, ...]
    best: Point | None
    saturated: Point | None
    ceiling: float
    complete: bool


def best_batch(setting: Setting, most: int | None = None, progress: Progress | None = None) -> BestBatch:
    """The batch of the greatest throughput among ``batches(devices, most)``: exact over that set.

    A batch whose compute alone, shared without loss, would be slower than the best found is not searched.

    Args:
        setting: what the batches share.
        most: samples a step up to which batches are looked at; 64 a device if not given.
        progress: called with (batches done, batches in all, what is being looked at).

    Raises:
        InputError: a limit below 1.
        InfeasibleError: no batch has a plan that fits.
    """
    devices = setting.profile.cluster.devices
    wanted = batches(devices, MOST_SAMPLES_PER_DEVICE * devices if most is None else most)
    setting.budget_at(devices)  # a budget that cannot be had is the user's error, not a batch's
    seen = gathered(_looked_at(setting, wanted, progress))
    require_plan(seen)
    return _answer(setting, wanted, seen)


def batches(devices: int, most: int) -> tuple[int, ...]:
    """Batches that divide well: divisors of the devices, then 2^a and 3 * 2^a a device, up to ``most``; ascending.

    Raises:
        InputError: ``most`` is below 1.
    """
    if most < 1:
        raise InputError("--max-batch", most, "Give 1 or more samples a step.")
    multiples = (devices * factor for factor in range(1, most // devices + 1) if even(factor))
    return tuple(sorted({*(part for part in divisors(devices) if part <= most), *multiples}))


def _looked_at(setting: Setting, wanted: tuple[int, ...], progress: Progress | None) -> Iterator[Point]:
    """The largest batches first: they are mostly the fastest, so that bounds rule small ones out."""
    devices, best = setting.profile.cluster.devices, 0.0
    for number, batch in enumerate(reversed(wanted)):
        if progress is not None:
            progress(number, len(wanted), f"batch {batch}")
        if ceiling(setting, batch) <= best:
            yield Point(
                devices,
                batch,
                bytes_on(setting.budget, ""),
                reason="cannot beat the best: its compute alone takes longer",
            )
            continue
        point = look(setting, devices, batch)
        best = max(best, point.rate)
        yield point


def ceiling(setting: Setting, batch: int) -> float:
    """Samples a second that no plan of a batch exceeds."""
    least = least_seconds(setting.profile, setting.profile.cluster.devices, batch)
    return batch / least if least > 0 else float("inf")


def _answer(setting: Setting, wanted: tuple[int, ...], seen: Points) -> BestBatch:
    points = tuple(sorted(seen.points, key=lambda point: point.batch))
    planned = [point for point in points if point.plan is not None]
    best = max(planned, key=lambda point: point.rate, default=None)
    enough = 0.0 if best is None else (1 - SATURATED) * best.rate
    saturated = next((point for point in planned if point.rate >= enough), None)
    limit = max(ceiling(setting, batch) for batch in wanted)
    return BestBatch(points, best, saturated, limit, seen.complete)
