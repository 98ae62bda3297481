"""What a run costs and how long it takes by the number of devices; the cheapest, and what is worth its price."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from galvatron_lite.errors import InputError
from galvatron_lite.questions.counts import even_counts
from galvatron_lite.questions.setting import (
    Point,
    Progress,
    Setting,
    batch_for,
    gathered,
    look,
    require_plan,
)

HOUR = 3600.0
MILLION = 1e6
"""Tokens that a run trains where nothing is said."""


@dataclass(frozen=True, slots=True)
class Run:
    """How much is trained; just one of the fields is given.

    Attributes:
        samples: in all.
        tokens: in all.
        steps: optimizer steps, of one batch for all numbers of devices.
    """

    samples: float | None = None
    tokens: float | None = None
    steps: float | None = None

    def of(self, batch: int, sequence: int) -> float:
        """Steps of a batch that the run takes, in fractions."""
        if self.steps is not None:
            return self.steps
        return (self.samples if self.samples is not None else (self.tokens or 0.0) / sequence) / batch


@dataclass(frozen=True, slots=True)
class RunCost:
    """A run on some devices.

    Attributes:
        point: the devices and their plan.
        seconds: of the whole run.
        device_hours: paid for.
        cost: in the price's currency.
    """

    point: Point
    seconds: float
    device_hours: float
    cost: float


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The answer.

    Attributes:
        run: how much is trained.
        price: of a device for an hour.
        costs: by number of devices, ascending.
        missing: points without a plan; they say why.
        frontier: those that none beats in both cost and time, the cheapest first.
        answer: the cheapest within the deadline; None where none is.
        deadline: seconds; None: any time will do.
        complete: whether every number of devices was looked at.
    """

    run: Run
    price: float
    costs: tuple[RunCost, ...]
    missing: tuple[Point, ...]
    frontier: tuple[RunCost, ...]
    answer: RunCost | None
    deadline: float | None
    complete: bool


def cheapest(
    setting: Setting,
    run: Run,
    price: float,
    *,
    batch: int | None = None,
    deadline: float | None = None,
    progress: Progress | None = None,
) -> Cheapest:
    """Cost and time of a run on each number of devices of ``counts.even_counts``; exact over that set.

    Args:
        setting: its profile has the largest number of devices.
        run: how much is trained.
        price: of a device for an hour, in any currency.
        batch: samples a step; 8 a device if not given.
        deadline: seconds in which the run must end.
        progress: called with (numbers done, numbers in all, what is being looked at).

    Raises:
        InputError: a price, deadline or run that is not above 0; a run of so many steps without a batch.
        InfeasibleError: no number of devices has a plan that fits.
    """
    _check(run, price, batch, deadline)
    seen = gathered(_looked_at(setting, batch, progress))
    require_plan(seen)
    sequence = setting.profile.graph.sequence
    costs = tuple(_cost(run, price, point, sequence) for point in seen.points if point.plan is not None)
    within = [cost for cost in costs if deadline is None or cost.seconds <= deadline]
    return Cheapest(
        run=run,
        price=price,
        costs=costs,
        missing=tuple(point for point in seen.points if point.plan is None),
        frontier=frontier(costs),
        answer=min(within, key=_rank, default=None),
        deadline=deadline,
        complete=seen.complete,
    )


def frontier(costs: tuple[RunCost, ...]) -> tuple[RunCost, ...]:
    """The runs that no other one beats in both cost and time, the cheapest first."""
    kept: list[RunCost] = []
    for cost in sorted(costs, key=_rank):
        if not kept or cost.seconds < kept[-1].seconds:
            kept.append(cost)
    return tuple(kept)


def _rank(cost: RunCost) -> tuple[float, float, int]:
    return cost.cost, cost.seconds, cost.point.devices


def _check(run: Run, price: float, batch: int | None, deadline: float | None) -> None:
    given = {"samples": run.samples, "tokens": run.tokens, "steps": run.steps}
    told = {name: value for name, value in given.items() if value is not None}
    if len(told) != 1:
        raise InputError("run", told, "Give just one of samples, tokens and steps.")
    for name, value in (*told.items(), ("--price", price), ("--within", deadline)):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(name, value, "Give a number above 0.")
    if run.steps is not None and batch is None:
        raise InputError("--batch", None, "What a step trains depends on the samples in it: say how many.")


def _looked_at(setting: Setting, batch: int | None, progress: Progress | None) -> Iterator[Point]:
    counts = even_counts(setting.profile.cluster)
    for number, devices in enumerate(counts):
        if progress is not None:
            progress(number, len(counts), f"{devices} GPUs")
        yield look(setting, devices, batch_for(devices, batch))


def _cost(run: Run, price: float, point: Point, sequence: int) -> RunCost:
    seconds = run.of(point.batch, sequence) * point.seconds
    hours = seconds * point.devices / HOUR
    return RunCost(point, seconds, hours, hours * price)
