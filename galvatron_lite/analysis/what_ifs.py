"""Planning again within a time limit: the price of memory, and the best plan after a change of memory, links or batch.

Plans are discrete, so step time is a staircase over the memory budget. A price is therefore a difference between the
fastest plans of two budgets. The steps between them are searched from the larger budget down, as in
``sweeps.pareto_front``. A search may end before its proof; its gap is then reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

from galvatron_lite.analysis.explanation import MemoryPrice, MemoryStep, WhatIf
from galvatron_lite.analysis.setting import PlanSetting, ask
from galvatron_lite.cluster.budget import Budget
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Cluster, Level
from galvatron_lite.errors import GalvatronError, InfeasibleError, InputError
from galvatron_lite.parallelism.pipeline.schedule import group_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import CollectiveFit, CollectivePoint, OriginKind, Profile
from galvatron_lite.search.best_first import MOST_WORK
from galvatron_lite.search.families.family import seconds_of
from galvatron_lite.search.pins import Pins
from galvatron_lite.search.result import summary
from galvatron_lite.units import format_budget

RUNNERS_UP = 5  # of each search, as in ``galvatron plan``: the quickest of them all is the plan
NOT_TRIED = "not tried: out of time (--seconds)"
QUICK = 200_000
"""Labels of a search that needs no proof (``search.best_first``): one or two seconds, where a proof takes ten."""
GIB = 2**30
SHARE = 8  # a price is of 1 GiB, or of 1/8 of the budget for small models
MOST_STEPS = 4  # plans between two budgets that are searched for
MEMORY_CHANGE = 0.1  # of memory, more or less
Progress = Callable[[int, int, str], None]


class OutOfTimeError(GalvatronError):
    """A search was left because the time for all searches is over."""


@dataclass(slots=True)
class TimeLimit:
    """The time limit of several searches."""

    seconds: float | None = None  # None: no limit
    progress: Progress | None = None  # called with (done, total, label)
    total: int = 0  # searches that are expected
    done: int = 0  # searches that have begun
    _begun: float = field(default_factory=monotonic)

    def check(self, *_: object) -> None:
        """Raise ``OutOfTimeError`` once the time is over; searches call it as their progress function."""
        if self.seconds is not None and monotonic() - self._begun >= self.seconds:
            raise OutOfTimeError(NOT_TRIED)

    def begin(self, label: str) -> None:
        """Report that a search begins, if there is time left for it."""
        self.check()
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total, label)
        self.done += 1


def peak_of(plan: Plan) -> int:
    """Predicted bytes on the fullest device; 0 without a prediction."""
    return 0 if plan.prediction is None else plan.prediction.peak_memory


def _gap_of(plan: Plan) -> float:
    return 0.0 if plan.provenance is None else plan.provenance.gap


@dataclass(frozen=True, slots=True)
class Replanner:
    """Searches again for the devices and the batch of a plan."""

    setting: PlanSetting  # what the plan was searched from
    clock: TimeLimit
    plan: Plan
    budget: Budget  # the plan's

    def fastest(self, label: str, budget: Budget) -> Plan:
        """The fastest plan within a budget, as ``galvatron plan`` finds it; ``label``: for the progress bar."""
        self.clock.begin(label)
        return self.search(self.setting, self.plan.devices, self.plan.global_batch, budget, MOST_WORK)

    def search(self, setting: PlanSetting, devices: int, batch: int, budget: Budget, effort: int) -> Plan:
        """The fastest plan that a search of at most ``effort`` labels finds in the time that is left."""
        return ask(
            setting, devices, batch, budget=budget, runners_up=RUNNERS_UP, progress=self.clock.check, effort=effort
        )

    def in_same_shape(self) -> Replanner:
        """The same among plans with the plan's pipeline, micro-batches and schedule alone, which is quick."""
        pipelined = self.plan.pipeline > 1
        fixed = replace(
            self.setting.pins.fixed,
            pipeline=self.plan.pipeline,
            microbatches=self.plan.microbatches,
            schedule=self.plan.schedule if pipelined else None,
            virtual=self.plan.virtual_stages if pipelined else None,
        )
        schedules = (self.plan.schedule,) if pipelined else self.setting.schedules
        return replace(self, setting=replace(self.setting, pins=Pins(fixed=fixed), schedules=schedules))


def with_faster_links(profile: Profile, level: int, factor: float = 2.0) -> Profile:
    """The profile of a cluster whose links of one level have ``factor`` times the bandwidth; latencies stay.

    Measured collectives over that level keep the latency of the line fitted to them, and the rest of their seconds is
    divided by the factor. Without a fitted line they are dropped, and the cluster's levels stand in for them.
    """
    cluster = profile.cluster

    def faster(levels: Sequence[Level]) -> tuple[Level, ...]:
        return tuple(
            replace(one, bandwidth=one.bandwidth * factor) if number == level else one
            for number, one in enumerate(levels)
        )

    groups = tuple(replace(group, levels=faster(group.levels)) for group in cluster.groups)
    changed = profile.on(replace(cluster, levels=faster(cluster.levels), groups=groups))
    fits = tuple(
        replace(fit, bandwidth=fit.bandwidth * factor) if _level_of(cluster, fit) == level else fit
        for fit in profile.fits
    )
    points = (
        _faster_point(point, profile, factor) if _level_of(cluster, point) == level else point
        for point in profile.collectives
    )
    return replace(changed, fits=fits, collectives=tuple(point for point in points if point is not None))


def _level_of(cluster: Cluster, measured: CollectiveFit | CollectivePoint) -> int:
    """The outermost level that a collective's ranks span."""
    reach, devices = (measured.group - 1) * measured.stride, 1
    for number, level in enumerate(cluster.levels):
        devices *= level.size
        if reach < devices:
            return number
    return len(cluster.levels) - 1


def _faster_point(point: CollectivePoint, profile: Profile, factor: float) -> CollectivePoint | None:
    key = (point.collective, point.group, point.stride, point.siblings)
    for fit in profile.fits:
        if (fit.collective, fit.group, fit.stride, fit.siblings) == key:
            latency = min(fit.latency, point.seconds)
            return replace(point, seconds=latency + (point.seconds - latency) / factor)
    return None


def with_one_more(profile: Profile) -> Profile | None:
    """The profile of a cluster with one more node; None if nothing says how that would be connected.

    Estimated layers are estimated again, measured layers stay.
    """
    cluster = _with_one_more_node(profile.cluster)
    if cluster is None:
        return None
    if profile.origin.kind is not OriginKind.ESTIMATED:
        return profile.on(cluster)
    estimate = estimate_profile(profile.graph, cluster, precision=profile.graph.precision, name=profile.name)
    return replace(estimate, origin=profile.origin)


def _with_one_more_node(cluster: Cluster) -> Cluster | None:
    """Add a member to the outermost level; double a single node, connected as its data sheet says."""
    if not cluster.alike or len(cluster.groups) != 1:
        return None
    *inner, outer = cluster.levels
    if inner:
        count = cluster.devices // outer.size * (outer.size + 1)
        levels = (*inner, replace(outer, size=outer.size + 1))
        return replace(cluster, levels=levels, groups=(replace(cluster.groups[0], count=count),))
    try:
        larger = load_cluster(cluster.name, 2 * cluster.devices)
    except GalvatronError:
        return None
    same = larger.groups[0].device == cluster.device and larger.levels[0] == cluster.levels[0]
    return larger if same and len(larger.levels) > 1 else None


def added_bytes(budget: Budget) -> int:
    """The memory, in bytes a device, that a price is of."""
    return min(GIB, max(budget.least // SHARE, 1))


def price_of_memory(replanner: Replanner, added: int | None = None, *, same_shape: bool = False) -> MemoryPrice:
    """The price of more memory on every device, without the steps between the two budgets.

    Args:
        replanner: for the plan.
        added: bytes a device; ``added_bytes`` by default.
        same_shape: search only plans with the plan's pipeline, micro-batches and schedule. That is quick and gives the
            least that memory is worth.
    """
    plan, budget = replanner.plan, replanner.budget
    size = added_bytes(budget) if added is None else added
    replanner = replanner.in_same_shape() if same_shape else replanner
    now = replanner.fastest("the fastest plan within the budget", budget)
    then = replanner.fastest(f"{format_budget(size)} more on every device", budget.plus(size))
    quicker = then if seconds_of(then) < seconds_of(now) else now
    full = [number for number, stage in enumerate(quicker.stages) if stage.memory.total > budget.of(stage.device)]
    groups = dict.fromkeys(group_of(quicker.schedule, quicker.pipeline, number) for number in full)
    return MemoryPrice(
        budget_bytes=budget.least,
        added_bytes=size,
        step_seconds=seconds_of(now),
        then_step_seconds=seconds_of(quicker),
        seconds_per_gib=(seconds_of(now) - seconds_of(quicker)) / (size / GIB),
        steps=() if quicker is now else (_memory_step(quicker, budget),),
        wanted_groups=tuple(groups) if quicker.pipeline == plan.pipeline else (),
        proven=_gap_of(now) == _gap_of(then) == 0.0,
        gap=max(_gap_of(now), _gap_of(then)),
        same_shape=same_shape,
    )


def with_less(price: MemoryPrice, replanner: Replanner) -> MemoryPrice:
    """The price with the cost of as much memory less; unchanged if there is no time."""
    size = price.added_bytes
    try:
        smaller = replanner.fastest(f"{format_budget(size)} less on every device", replanner.budget.plus(-size))
    except OutOfTimeError:
        return price
    except InfeasibleError:
        return replace(price, less_bytes=size)
    return replace(price, less_bytes=size, less_step_seconds=max(seconds_of(smaller), price.step_seconds))


def with_steps(price: MemoryPrice, replanner: Replanner) -> MemoryPrice:
    """The price with the fastest plans between the two budgets, by memory; fewer if time runs out."""
    steps, budget = list(price.steps), replanner.budget
    ordered = not budget.by_device  # budgets of several types of device have no order
    while ordered and steps and len(steps) <= MOST_STEPS and steps[0].budget_bytes - 1 > budget.least:
        try:
            smaller = replanner.fastest("where it gets quicker", Budget(steps[0].budget_bytes - 1))
        except (OutOfTimeError, InfeasibleError):
            break
        if seconds_of(smaller) >= price.step_seconds:
            break
        steps = [_memory_step(smaller, budget), *steps]
    return replace(price, steps=tuple(steps))


def _memory_step(plan: Plan, budget: Budget) -> MemoryStep:
    return MemoryStep(max(peak_of(plan), budget.least), seconds_of(plan), summary(plan))


Change = tuple[str, str, int, Budget, Callable[[Profile], Profile | None] | None]
"""Name and text of a ``WhatIf``, batch, budget, and a function that changes the profile (None: as it is)."""


def _changes(replanner: Replanner) -> Iterator[Change]:
    batch, budget, cluster = replanner.plan.global_batch, replanner.budget, replanner.setting.profile.cluster
    yield "memory_less", "10 % less memory on every device", batch, budget.scaled(1 - MEMORY_CHANGE), None
    yield "memory_more", "10 % more memory on every device", batch, budget.scaled(1 + MEMORY_CHANGE), None
    for number, level in reversed(list(enumerate(cluster.levels))):
        if level.size > 1:
            text = f"links of each {level.name} twice as fast"
            yield f"links_{level.name}", text, batch, budget, partial(with_faster_links, level=number)
    yield "batch_twice", "twice the batch", 2 * batch, budget, None
    if batch % 2 == 0:
        yield "batch_half", "half the batch", batch // 2, budget, None
    yield "node_more", "one node more, as many samples a device", batch, budget, with_one_more


def what_ifs(replanner: Replanner, rate: float) -> tuple[WhatIf, ...]:
    """Search for the best plan after each change; ``rate``: samples a second of the plan now."""
    return tuple(_what_if(replanner, change, rate) for change in _changes(replanner))


def _what_if(replanner: Replanner, change: Change, rate: float) -> WhatIf:
    name, text, batch, budget, change_profile = change
    setting, devices = replanner.setting, replanner.plan.devices
    answer = WhatIf(name, text, devices, batch)
    try:
        replanner.clock.begin(text)
        if change_profile is not None:
            profile = change_profile(setting.session(devices).profile)
            if profile is None:
                return replace(answer, why="unknown: no data sheet says how it would be connected")
            setting = replace(setting, profile=profile, source=None, memory=None, sessions={})
            devices, before = profile.cluster.devices, devices
            batch = batch * devices // before if devices > before else batch
            answer = replace(answer, devices=devices, batch=batch)
        plan = replanner.search(setting, devices, batch, budget, QUICK)
    except (OutOfTimeError, InfeasibleError, InputError) as error:
        return replace(answer, why=str(error))
    assert plan.prediction is not None
    return replace(
        answer,
        step_seconds=plan.prediction.step_seconds,
        samples_per_second=plan.prediction.samples_per_second,
        gain=plan.prediction.samples_per_second / rate - 1.0,
        summary=summary(plan),
        peak_bytes=plan.prediction.peak_memory,
        gap=_gap_of(plan),
    )
