"""Sweeps over plans: the best batch, the fewest devices, the cheapest run, and the front of step time and memory.

Each sweep is exact over the points that it lists. A lower bound on the step time saves searches: under tensor degree t
a layer takes t (f(x) + b(x)) device-seconds for x samples, so a sample takes at least min t (f(x) + b(x)) / x. The cost
model is piecewise linear between the points of a profile (``cost.points``), so the minimum is at a point or at the
largest x. Recomputation, communication, host work, updates and waiting only add to it, and the busiest device is at
least as busy as the mean.

The front uses the epsilon constraint (Haimes, Lasdon and Wismer 1971): find the fastest plan within a budget, set the
budget below its peak, repeat until nothing fits. A plan of peak p within budget B is the fastest for every budget from
p to B. Budgets decrease by a least step, because plans may differ by bytes; a step of 1 byte skips no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from galvatron_lite.analysis.setting import (
    PlanSetting,
    Point,
    Progress,
    batch_for,
    collect,
    device_counts,
    is_even,
    search_point,
    with_progress,
)
from galvatron_lite.cluster.budget import as_budget, bytes_on
from galvatron_lite.cost.points import figures_at, index_points, slices_of
from galvatron_lite.errors import InputError
from galvatron_lite.limits import SAMPLES, check_range
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.units import format_bytes, format_seconds

MOST_SAMPLES_PER_DEVICE = 64  # of ``best_batch``, by default
SATURATED = 0.01  # share of the best throughput by which the batch that saturates may fall short
HOUR = 3600.0
MILLION = 1e6  # tokens of a run, by default
STEPS = 32  # the budgets of a front differ by at least this fraction of the whole, by default


def least_seconds(profile: Profile, devices: int, batch: int) -> float:
    """A lower bound on the seconds of a step; 0 if the devices are of several types."""
    return batch * device_seconds(profile, batch) / devices


def device_seconds(profile: Profile, batch: int) -> float:
    """A lower bound on the device-seconds of one sample in a batch."""
    if len(profile.cluster.groups) > 1:
        return 0.0
    least: dict[str, float] = {}
    for key, points in index_points(profile.layers).items():
        sizes = [batch, *(point.samples for point in points if point.samples < batch)]
        figures = [(figures_at(points, size), size) for size in sizes]
        seconds = slices_of(key) * float(min((figure.forward + figure.backward) / size for figure, size in figures))
        least[key[0]] = min(seconds, least.get(key[0], seconds))
    return sum(least.get(layer.kind, 0.0) for layer in profile.graph.layers)


Item = TypeVar("Item")


def undominated(
    items: Iterable[Item], rank: Callable[[Item], tuple[float, ...]], other: Callable[[Item], float]
) -> tuple[Item, ...]:
    """Return the items that no other item beats both in ``rank`` and in ``other`` (less is better), best rank first."""
    kept: list[Item] = []
    for item in sorted(items, key=rank):
        if not kept or other(item) < other(kept[-1]):
            kept.append(item)
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class BestBatch:
    """The batch of the greatest throughput."""

    points: tuple[Point, ...]  # by batch, ascending; those that cannot beat the best have no plan
    best: Point | None  # the least batch of the greatest throughput
    saturated: Point | None  # the least batch whose throughput is within 1 % of the best
    ceiling: float  # samples a second that none of these batches exceeds, from compute alone; infinite if not known
    complete: bool  # whether all batches were searched


def best_batch(setting: PlanSetting, most: int | None = None, progress: Progress | None = None) -> BestBatch:
    """Search for the batch of the greatest throughput among ``batches(devices, most)``.

    A batch is not searched if its compute alone, shared without loss, is slower than the best throughput so far.
    """
    devices = setting.profile.cluster.devices
    candidates = batches(devices, MOST_SAMPLES_PER_DEVICE * devices if most is None else most)
    setting.budget_at(devices)  # an impossible budget is an error of the user, not of one batch
    searched = collect(_batch_points(setting, candidates, progress))
    searched.require_plan()
    points = tuple(sorted(searched.points, key=lambda point: point.batch))
    planned = [point for point in points if point.plan is not None]
    best = max(planned, key=lambda point: point.rate, default=None)
    enough = 0.0 if best is None else (1 - SATURATED) * best.rate
    saturated = next((point for point in planned if point.rate >= enough), None)
    return BestBatch(points, best, saturated, max(ceiling(setting, batch) for batch in candidates), searched.complete)


def batches(devices: int, most: int) -> tuple[int, ...]:
    """Return batches up to ``most``, ascending: divisors of the device count, then 2^a and 3 * 2^a samples a device."""
    check_range("--max-batch", most, SAMPLES, f"Give 1 to {SAMPLES} samples a step.")
    multiples = (devices * factor for factor in range(1, most // devices + 1) if is_even(factor))
    return tuple(sorted({*(divisor for divisor in divisors(devices) if divisor <= most), *multiples}))


def _batch_points(setting: PlanSetting, candidates: tuple[int, ...], progress: Progress | None) -> Iterator[Point]:
    """Search the largest batches first: most often they are the fastest, so that bounds rule out small ones."""
    devices, best = setting.profile.cluster.devices, 0.0
    for batch in with_progress(candidates[::-1], "batch {}", progress):
        if ceiling(setting, batch) <= best:
            reason = "slower than the best: its compute alone takes longer"
            point = Point(devices, batch, bytes_on(setting.budget, ""), reason=reason)
        else:
            point = search_point(setting, devices, batch)
        best = max(best, point.rate)
        yield point


def ceiling(setting: PlanSetting, batch: int) -> float:
    """An upper bound on the samples a second of a batch."""
    least = least_seconds(setting.profile, setting.profile.cluster.devices, batch)
    return batch / least if least > 0 else float("inf")


class Goal(StrEnum):
    """The kind of a target."""

    FIT = "fit"
    STEP = "step"
    SAMPLES = "samples"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Target:
    """What the devices must reach."""

    goal: Goal
    value: float = 0.0  # most seconds a step, or least samples or tokens a second; not used by ``fit``

    def seconds(self, batch: int, sequence: int) -> float:
        """Seconds that a step may take at most."""
        if self.goal is Goal.FIT:
            return float("inf")
        work = {Goal.SAMPLES: batch, Goal.TOKENS: batch * sequence}
        return work[self.goal] / self.value if self.goal in work else self.value


@dataclass(frozen=True, slots=True)
class Fewest:
    """The fewest devices that reach a target."""

    target: Target
    points: tuple[Point, ...]  # by device count, ascending, up to the answer; those that are too few have no plan
    answer: Point | None  # None if no device count is enough
    complete: bool  # whether all device counts up to the answer were searched


def fewest_devices(
    setting: PlanSetting, target: Target, batch: int | None = None, progress: Progress | None = None
) -> Fewest:
    """Search for the fewest devices of the setting's cluster that reach a target: 1 to a node, then whole nodes.

    More devices are not always faster (a batch divides badly by 7), so every device count up to the answer is searched,
    except if its compute alone, shared without loss, takes longer than the target.

    Raises:
        InputError: a target of 0, or seconds of a step without a batch.
    """
    if target.goal is not Goal.FIT and not 0 < target.value < float("inf"):
        raise InputError(target.goal.value, target.value, "Give a number above 0.")
    if target.goal is Goal.STEP and batch is None:
        raise InputError("--batch", None, "The seconds of a step depend on the samples in it: say how many.")
    searched = collect(_device_points(setting, target, batch, progress))
    last = searched.points[-1] if searched.points else None
    answer = last if last is not None and _is_reached(setting, target, last) else None
    return Fewest(target, searched.points, answer, searched.complete)


def _device_points(
    setting: PlanSetting, target: Target, batch: int | None, progress: Progress | None
) -> Iterator[Point]:
    for devices in with_progress(device_counts(setting.profile.cluster), "{} GPUs", progress):
        samples = batch_for(setting, devices, batch)
        least = least_seconds(setting.profile, devices, samples)
        if least <= target.seconds(samples, setting.profile.graph.sequence):
            point = search_point(setting, devices, samples)
        else:
            reason = f"too few: compute alone takes {format_seconds(least)} a step"
            point = Point(devices, samples, bytes_on(setting.budget, ""), reason=reason)
        yield point
        if _is_reached(setting, target, point):
            return


def _is_reached(setting: PlanSetting, target: Target, point: Point) -> bool:
    return point.plan is not None and point.seconds <= target.seconds(point.batch, setting.profile.graph.sequence)


@dataclass(frozen=True, slots=True)
class TrainingAmount:
    """The length of a run in one of three units."""

    samples: float | None = None
    tokens: float | None = None
    steps: float | None = None  # optimizer steps, of the same batch for all device counts

    def of(self, batch: int, sequence: int) -> float:
        """The number of steps of a batch, a fraction included."""
        if self.steps is not None:
            return self.steps
        return (self.samples if self.samples is not None else (self.tokens or 0.0) / sequence) / batch


@dataclass(frozen=True, slots=True)
class RunCost:
    """A run on a number of devices."""

    point: Point  # the devices and their plan
    seconds: float  # of the run
    device_hours: float
    cost: float  # in the currency of the price


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The cost and time of a run by device count."""

    run: TrainingAmount
    price: float  # of a device for an hour
    costs: tuple[RunCost, ...]  # by device count, ascending
    missing: tuple[Point, ...]  # the points without a plan
    frontier: tuple[RunCost, ...]  # runs that no other beats in both cost and time, the cheapest first
    answer: RunCost | None  # the cheapest within the deadline; None if there is none
    deadline: float | None  # seconds; None: no deadline
    complete: bool  # whether all device counts were searched


def cheapest(
    setting: PlanSetting,
    run: TrainingAmount,
    price: float,
    *,
    batch: int | None = None,
    deadline: float | None = None,
    progress: Progress | None = None,
) -> Cheapest:
    """Search for the cheapest device count for a run, among those that divide well.

    Raises:
        InputError: a run in no unit or in several, steps without a batch, a price or deadline that is not above 0.
        InfeasibleError: no device count has a plan that fits.
    """
    _check_run(run, price, batch, deadline)
    searched = collect(_cost_points(setting, batch, progress))
    searched.require_plan()
    costs = []
    for point in (point for point in searched.points if point.plan is not None):
        seconds = run.of(point.batch, setting.profile.graph.sequence) * point.seconds
        hours = seconds * point.devices / HOUR
        costs.append(RunCost(point, seconds, hours, hours * price))

    def rank(cost: RunCost) -> tuple[float, float, int]:
        return cost.cost, cost.seconds, cost.point.devices

    in_time = [cost for cost in costs if deadline is None or cost.seconds <= deadline]
    return Cheapest(
        run=run,
        price=price,
        costs=tuple(costs),
        missing=tuple(point for point in searched.points if point.plan is None),
        frontier=undominated(costs, rank, lambda cost: cost.seconds),
        answer=min(in_time, key=rank, default=None),
        deadline=deadline,
        complete=searched.complete,
    )


def _check_run(run: TrainingAmount, price: float, batch: int | None, deadline: float | None) -> None:
    lengths = {"samples": run.samples, "tokens": run.tokens, "steps": run.steps}
    stated = {name: value for name, value in lengths.items() if value is not None}
    if len(stated) != 1:
        raise InputError("run", stated, "Give just one of samples, tokens and steps.")
    for name, value in (*stated.items(), ("--price", price), ("--within", deadline)):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(name, value, "Give a number above 0.")
    if run.steps is not None and batch is None:
        raise InputError("--batch", None, "What a step trains depends on the samples in it: say how many.")


def _cost_points(setting: PlanSetting, batch: int | None, progress: Progress | None) -> Iterator[Point]:
    for devices in with_progress(device_counts(setting.profile.cluster, divide_well=True), "{} GPUs", progress):
        yield search_point(setting, devices, batch_for(setting, devices, batch))


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """The plans that no other plan beats in both step time and memory."""

    points: tuple[Point, ...]  # the fastest first; each has the largest budget of which its plan is the fastest
    step: int  # bytes; smaller differences of budgets were not searched
    least: int | None  # bytes a device that the plan of least memory needs; None if not known
    complete: bool  # whether the front reaches down to that plan


def pareto_front(
    setting: PlanSetting,
    batch: int | None = None,
    *,
    step: int | None = None,
    progress: Progress | None = None,
    searching: Progress | None = None,
) -> ParetoFront:
    """Search for the fastest plan of every budget, from the setting's budget down.

    Args:
        setting: what is searched; its budget is the largest.
        batch: samples a step; by default as in ``batch_for``.
        step: bytes that budgets differ by at least; by default 1/32 of the largest.
        progress: called with (done, total, label) before each search.
        searching: called so during each search.

    Raises:
        InputError: a step below 1 byte.
        InfeasibleError: no plan fits the largest budget.
    """
    gap = max(as_budget(setting.budget_at(setting.profile.cluster.devices)).most // STEPS, 1) if step is None else step
    if gap < 1:
        raise InputError("step", gap, "Give 1 byte or more.")
    searched = collect(_budget_points(setting, batch, gap, progress, searching))
    searched.require_plan()
    least = next((point.needs for point in searched.points if point.plan is None), None)
    planned = [point for point in searched.points if point.plan is not None]
    # A search compares closed forms of step times; the simulated times of its plans can differ a little.
    front = undominated(planned, lambda point: (point.seconds, point.peak), lambda point: point.peak)
    return ParetoFront(front, gap, least, searched.complete)


def _budget_points(
    setting: PlanSetting, batch: int | None, step: int, progress: Progress | None, searching: Progress | None
) -> Iterator[Point]:
    devices = setting.profile.cluster.devices
    samples, largest = batch_for(setting, devices, batch), as_budget(setting.budget_at(devices))
    budget = largest.most
    while budget >= 1:
        if progress is not None:
            progress(100 - 100 * budget // largest.most, 100, format_bytes(budget))
        point = search_point(setting, devices, samples, largest.within(budget), searching)
        yield replace(point, budget=budget)
        if point.plan is None:
            # The plan of least memory is less than a step below: a search for it takes long and adds little.
            return
        budget = int((point.peak - step) / (1.0 - setting.margin))
