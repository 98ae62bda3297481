"""Plans over many budgets, batches and numbers of devices: best batch, fewest devices, cheapest run, Pareto front.

A bound saves searches: a layer under tensor degree t on x samples takes t devices f(x) + b(x) seconds, so a sample
takes at least min t (f(x) + b(x)) / x device-seconds, whatever the plan. The cost model draws straight lines between
the points of a profile (``cost.points``), so the quotient is least at a point or at the greatest number of samples.
Recomputation, communication, host work, updates and waiting only add to it, and the busiest device is no less busy
than the mean.

The front uses the epsilon constraint (Haimes, Lasdon and Wismer 1971): find the fastest plan within a budget, set the
budget below its peak, repeat until nothing fits. A plan of peak p within budget B is the fastest for every budget
from p to B. Budgets go down by a least step, or a model whose plans differ by bytes would take thousands of searches;
with a step of 1 byte no plan is skipped.
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
    device_counts,
    even,
    gathered,
    look,
    require_plan,
    with_progress,
)
from galvatron_lite.cluster.budget import as_budget, bytes_on
from galvatron_lite.cost.points import figures_at, index_points, slices_of
from galvatron_lite.errors import InputError
from galvatron_lite.limits import SAMPLES, check_range
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.units import format_bytes, format_seconds


def least_seconds(profile: Profile, devices: int, batch: int) -> float:
    """Seconds of a step that no plan for so many devices and samples beats; 0 where the devices are not all alike."""
    return batch * device_seconds(profile, batch) / devices


def device_seconds(profile: Profile, batch: int) -> float:
    """Device-seconds that no plan needs less of for one sample of a batch."""
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
    """The items that none beats both in what they are ranked by first and in something else, the best ranked first."""
    kept: list[Item] = []
    for item in sorted(items, key=rank):
        if not kept or other(item) < other(kept[-1]):
            kept.append(item)
    return tuple(kept)


MOST_SAMPLES_PER_DEVICE = 64
"""Samples a device up to which batches are looked at where nothing else is said."""
SATURATED = 0.01  # share of the best throughput by which the batch that saturates may fall behind


@dataclass(frozen=True, slots=True)
class BestBatch:
    """The answer."""

    points: tuple[Point, ...]  # of the batches, ascending; those that cannot beat the best have no plan, and say so
    best: Point | None  # of the greatest throughput; of several the least batch
    saturated: Point | None  # the least batch whose throughput is within 1 % of the best
    # samples a second that no batch of those looked at exceeds: compute without any loss; infinite where it is not
    # known
    ceiling: float
    complete: bool  # whether every batch was looked at


def best_batch(setting: PlanSetting, most: int | None = None, progress: Progress | None = None) -> BestBatch:
    """The batch of the greatest throughput among ``batches(devices, most)``: exact over that set.

    A batch whose compute alone, shared without loss, would be slower than the best found is not searched.
    """
    devices = setting.profile.cluster.devices
    wanted = batches(devices, MOST_SAMPLES_PER_DEVICE * devices if most is None else most)
    setting.budget_at(devices)  # a budget that cannot be had is the user's error, not a batch's
    seen = gathered(_batch_points(setting, wanted, progress))
    require_plan(seen)
    points = tuple(sorted(seen.points, key=lambda point: point.batch))
    planned = [point for point in points if point.plan is not None]
    best = max(planned, key=lambda point: point.rate, default=None)
    enough = 0.0 if best is None else (1 - SATURATED) * best.rate
    saturated = next((point for point in planned if point.rate >= enough), None)
    return BestBatch(points, best, saturated, max(ceiling(setting, batch) for batch in wanted), seen.complete)


def batches(devices: int, most: int) -> tuple[int, ...]:
    """Batches that divide well: divisors of the devices, then 2^a and 3 * 2^a a device, up to ``most``; ascending."""
    check_range("--max-batch", most, SAMPLES, f"Give 1 to {SAMPLES} samples a step.")
    multiples = (devices * factor for factor in range(1, most // devices + 1) if even(factor))
    return tuple(sorted({*(part for part in divisors(devices) if part <= most), *multiples}))


def _batch_points(setting: PlanSetting, wanted: tuple[int, ...], progress: Progress | None) -> Iterator[Point]:
    """The largest batches first: they are mostly the fastest, so that bounds rule small ones out."""
    devices, best = setting.profile.cluster.devices, 0.0
    for batch in with_progress(wanted[::-1], "batch {}", progress):
        if ceiling(setting, batch) <= best:
            reason = "slower than the best: its compute alone takes longer"
            point = Point(devices, batch, bytes_on(setting.budget, ""), reason=reason)
        else:
            point = look(setting, devices, batch)
        best = max(best, point.rate)
        yield point


def ceiling(setting: PlanSetting, batch: int) -> float:
    """Samples a second that no plan of a batch exceeds."""
    least = least_seconds(setting.profile, setting.profile.cluster.devices, batch)
    return batch / least if least > 0 else float("inf")


class Goal(StrEnum):
    """What must be reached."""

    FIT = "fit"
    STEP = "step"
    SAMPLES = "samples"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Target:
    """What the devices must reach."""

    goal: Goal  # of which kind
    value: float = 0.0  # seconds a step at most, or samples or tokens a second at least; not used by ``fit``

    def seconds(self, batch: int, sequence: int) -> float:
        """Seconds of a step that are few enough."""
        if self.goal is Goal.FIT:
            return float("inf")
        work = {Goal.SAMPLES: batch, Goal.TOKENS: batch * sequence}
        return work[self.goal] / self.value if self.goal in work else self.value


@dataclass(frozen=True, slots=True)
class Fewest:
    """The answer."""

    target: Target  # what must be reached
    # of the numbers of devices up to the answer, ascending; those that cannot reach it by their compute alone have no
    # plan, and say so
    points: tuple[Point, ...]
    answer: Point | None  # of the fewest devices; None where no number that was looked at is enough
    complete: bool  # whether every number up to the answer was looked at


def fewest_devices(
    setting: PlanSetting, target: Target, batch: int | None = None, progress: Progress | None = None
) -> Fewest:
    """The fewest devices of the setting's cluster that reach a target: 1 to a node, then whole nodes.

    More devices are not always faster (a batch divides badly among 7), so that every number up to the answer is looked
    at, but for those whose compute alone, shared without loss, takes longer than the target.
    """
    if target.goal is not Goal.FIT and not 0 < target.value < float("inf"):
        raise InputError(target.goal.value, target.value, "Give a number above 0.")
    if target.goal is Goal.STEP and batch is None:
        raise InputError("--batch", None, "The seconds of a step depend on the samples in it: say how many.")
    seen = gathered(_device_points(setting, target, batch, progress))
    last = seen.points[-1] if seen.points else None
    reached = last is not None and last.plan is not None and _met(setting, target, last)
    return Fewest(target, seen.points, last if reached else None, seen.complete)


def _device_points(
    setting: PlanSetting, target: Target, batch: int | None, progress: Progress | None
) -> Iterator[Point]:
    for devices in with_progress(device_counts(setting.profile.cluster), "{} GPUs", progress):
        samples = batch_for(setting, devices, batch)
        least = least_seconds(setting.profile, devices, samples)
        if least <= target.seconds(samples, setting.profile.graph.sequence):
            point = look(setting, devices, samples)
        else:
            reason = f"too few: compute alone takes {format_seconds(least)} a step"
            point = Point(devices, samples, bytes_on(setting.budget, ""), reason=reason)
        yield point
        if point.plan is not None and _met(setting, target, point):
            return


def _met(setting: PlanSetting, target: Target, point: Point) -> bool:
    return point.seconds <= target.seconds(point.batch, setting.profile.graph.sequence)


HOUR = 3600.0
MILLION = 1e6  # tokens that a run trains where nothing is said


@dataclass(frozen=True, slots=True)
class TrainingAmount:
    """How much is trained; just one of the fields is given."""

    samples: float | None = None  # in all
    tokens: float | None = None  # in all
    steps: float | None = None  # optimizer steps, of one batch for all numbers of devices

    def of(self, batch: int, sequence: int) -> float:
        """Steps of a batch that the run takes, in fractions."""
        if self.steps is not None:
            return self.steps
        return (self.samples if self.samples is not None else (self.tokens or 0.0) / sequence) / batch


@dataclass(frozen=True, slots=True)
class RunCost:
    """A run on some devices."""

    point: Point  # the devices and their plan
    seconds: float  # of the whole run
    device_hours: float  # paid for
    cost: float  # in the price's currency


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The answer."""

    run: TrainingAmount  # how much is trained
    price: float  # of a device for an hour
    costs: tuple[RunCost, ...]  # by number of devices, ascending
    missing: tuple[Point, ...]  # points without a plan; they say why
    frontier: tuple[RunCost, ...]  # those that none beats in both cost and time, the cheapest first
    answer: RunCost | None  # the cheapest within the deadline; None where none is
    deadline: float | None  # seconds; None: any time will do
    complete: bool  # whether every number of devices was looked at


def cheapest(
    setting: PlanSetting,
    run: TrainingAmount,
    price: float,
    *,
    batch: int | None = None,
    deadline: float | None = None,
    progress: Progress | None = None,
) -> Cheapest:
    """Cost and time of a run on each number of devices that divides well; exact over that set."""
    _check(run, price, batch, deadline)
    seen = gathered(_cost_points(setting, batch, progress))
    require_plan(seen)
    costs = []
    for point in (point for point in seen.points if point.plan is not None):
        seconds = run.of(point.batch, setting.profile.graph.sequence) * point.seconds
        hours = seconds * point.devices / HOUR
        costs.append(RunCost(point, seconds, hours, hours * price))
    within = [cost for cost in costs if deadline is None or cost.seconds <= deadline]
    return Cheapest(
        run=run,
        price=price,
        costs=tuple(costs),
        missing=tuple(point for point in seen.points if point.plan is None),
        frontier=undominated(costs, _rank, lambda cost: cost.seconds),
        answer=min(within, key=_rank, default=None),
        deadline=deadline,
        complete=seen.complete,
    )


def _rank(cost: RunCost) -> tuple[float, float, int]:
    return cost.cost, cost.seconds, cost.point.devices


def _check(run: TrainingAmount, price: float, batch: int | None, deadline: float | None) -> None:
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
        yield look(setting, devices, batch_for(setting, devices, batch))


STEPS = 32  # least step of the budget, as a part of the whole


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """The answer."""

    # plans of which none beats another in both time and memory, the fastest first; the budget of a point is the
    # largest for which its plan was found to be the fastest
    points: tuple[Point, ...]
    step: int  # bytes; budgets of less than this below a point's peak were not looked at
    # bytes a device that the plan of least memory needs, as the search names it; None where that is not known
    least: int | None
    complete: bool  # whether it goes down to the least


def pareto_front(
    setting: PlanSetting,
    batch: int | None = None,
    *,
    step: int | None = None,
    progress: Progress | None = None,
    searching: Progress | None = None,
) -> ParetoFront:
    """The time-memory front from the setting's budget down."""
    gap = max(as_budget(setting.budget_at(setting.profile.cluster.devices)).most // STEPS, 1) if step is None else step
    if gap < 1:
        raise InputError("step", gap, "Give 1 byte or more.")
    seen = gathered(_budget_points(setting, batch, gap, progress, searching))
    require_plan(seen)
    least = next((point.needs for point in seen.points if point.plan is None), None)
    planned = [point for point in seen.points if point.plan is not None]
    # budgets go down in the closed form of the schedule; the simulated times that are told may differ a little
    front = undominated(planned, lambda point: (point.seconds, point.peak), lambda point: point.peak)
    return ParetoFront(front, gap, least, seen.complete)


def _budget_points(
    setting: PlanSetting, batch: int | None, step: int, progress: Progress | None, searching: Progress | None
) -> Iterator[Point]:
    devices = setting.profile.cluster.devices
    samples, whole = batch_for(setting, devices, batch), as_budget(setting.budget_at(devices))
    budget = whole.most
    while budget >= 1:
        if progress is not None:
            progress(100 - 100 * budget // whole.most, 100, format_bytes(budget))
        point = look(setting, devices, samples, whole.within(budget), searching)
        yield replace(point, budget=budget)
        if point.plan is None:
            # The plan of least memory lies less than a step below: a search there takes long and adds little.
            return
        budget = int((point.peak - step) / (1.0 - setting.margin))
