"""Planning again, within a time limit: the price of memory, and the best plan after a change of memory, links or batch.

Plans are discrete, so step time is a staircase over the budget and a price is a difference: of the fastest plan
within the budget and the fastest within a larger one. The stairs between are found from above, as in
``sweeps.pareto_front``. Where a proof takes long the search ends before it, and the gap is reported.
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

RUNNERS_UP = 5
"""Of every plan made here: as many as ``galvatron plan`` shows, since the quickest of all is the plan."""
NOT_TRIED = "not tried: out of time (--seconds)"
QUICK = 200_000
"""Labels of a search that need not be proven (``search.best_first``): a second or two where a proof takes ten. Most
models need fewer for a proof."""
Progress = Callable[[int, int, str], None]


class OutOfTimeError(GalvatronError):
    """A search was left because the time given for all of them was over."""


@dataclass(slots=True)
class TimeLimit:
    """Time for planning anew."""

    seconds: float | None = None  # in all; None: no end
    progress: Progress | None = None  # told what is looked at; None: nobody
    total: int = 0  # how many things are to be looked at
    done: int = 0  # how many have been
    _begun: float = field(default_factory=monotonic)

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.seconds is not None and monotonic() - self._begun >= self.seconds

    def begin(self, label: str) -> None:
        """Say what is looked at next."""
        if self.over:
            raise OutOfTimeError(NOT_TRIED)
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total, label)
        self.done += 1

    def look(self, *_: object) -> None:
        """What a search calls as it goes on."""
        if self.over:
            raise OutOfTimeError(NOT_TRIED)


def _plan_anew(
    setting: PlanSetting,
    clock: TimeLimit,
    devices: int,
    batch: int,
    budget: int | Budget | None = None,
    effort: int = MOST_WORK,
) -> Plan:
    """The fastest plan, as ``galvatron plan`` finds it, or as near to it as so many labels come."""
    return ask(setting, devices, batch, budget=budget, runners_up=RUNNERS_UP, progress=clock.look, effort=effort)


def peak_of(plan: Plan) -> int:
    """Predicted bytes on the fullest device; 0 without a prediction."""
    return 0 if plan.prediction is None else plan.prediction.peak_memory


def _gap_of(plan: Plan) -> float:
    return 0.0 if plan.provenance is None else plan.provenance.gap


def with_faster_links(profile: Profile, place: int, factor: float = 2.0) -> Profile:
    """The profile of a cluster whose links of one level carry more bytes a second; latencies stay.

    Measured collectives that go over that level take the latency of the straight line that was fitted to them, and the
    rest of their seconds by the factor less; where there is no line, the cluster's levels stand for them.
    """
    cluster = profile.cluster

    def faster(levels: Sequence[Level]) -> tuple[Level, ...]:
        one = (replace(level, bandwidth=level.bandwidth * factor) for level in levels[place : place + 1])
        return (*levels[:place], *one, *levels[place + 1 :])

    groups = tuple(replace(group, levels=faster(group.levels)) for group in cluster.groups)
    changed = profile.on(replace(cluster, levels=faster(cluster.levels), groups=groups))
    fits = tuple(
        replace(fit, bandwidth=fit.bandwidth * factor) if _level_of(cluster, fit) == place else fit
        for fit in profile.fits
    )
    points = (_point(point, profile, factor) if _level_of(cluster, point) == place else point
              for point in profile.collectives)  # fmt: skip
    return replace(changed, fits=fits, collectives=tuple(point for point in points if point is not None))


def _level_of(cluster: Cluster, measured: CollectiveFit | CollectivePoint) -> int:
    reach, inside = (measured.group - 1) * measured.stride, 1
    for place, level in enumerate(cluster.levels):
        inside *= level.size
        if reach < inside:
            return place
    return len(cluster.levels) - 1


def _point(point: CollectivePoint, profile: Profile, factor: float) -> CollectivePoint | None:
    key = (point.collective, point.group, point.stride, point.siblings)
    for fit in profile.fits:
        if (fit.collective, fit.group, fit.stride, fit.siblings) == key:
            latency = min(fit.latency, point.seconds)
            return replace(point, seconds=latency + (point.seconds - latency) / factor)
    return None


def with_one_more(profile: Profile) -> Profile | None:
    """The profile of a cluster with one member more at its outermost level (one node); None where nothing says how it
    would be joined. Estimated layers are estimated anew, measured ones stay."""
    cluster = _larger(profile.cluster)
    if cluster is None:
        return None
    if profile.origin.kind is not OriginKind.ESTIMATED:
        return profile.on(cluster)
    anew = estimate_profile(profile.graph, cluster, precision=profile.graph.precision, name=profile.name)
    return replace(anew, origin=profile.origin)


def _larger(cluster: Cluster) -> Cluster | None:
    """With one node more; of a single node two like it, joined as its data sheet says."""
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


GIB = 2**30
SHARE = 8
"""A price is of 1 GiB, or of this part of the budget where that is less: a model that takes 100 MB is another one with
1 GiB more."""
MOST_STAIRS = 4  # plans between the two budgets that are looked for


def added_bytes(budget: Budget) -> int:
    """The memory whose price is told."""
    return min(GIB, max(budget.least // SHARE, 1))


def in_its_shape(setting: PlanSetting, plan: Plan) -> PlanSetting:
    """The same question, asked of the plan's own pipeline, micro-batches and schedule alone: soon answered."""
    pipelined = plan.pipeline > 1
    fixed = replace(
        setting.pins.fixed,
        pipeline=plan.pipeline,
        microbatches=plan.microbatches,
        schedule=plan.schedule if pipelined else None,
        virtual=plan.virtual_stages if pipelined else None,
    )
    return replace(setting, pins=Pins(fixed=fixed), schedules=(plan.schedule,) if pipelined else setting.schedules)


def price_of_memory(
    setting: PlanSetting,
    clock: TimeLimit,
    plan: Plan,
    budget: Budget,
    added: int | None = None,
    *,
    same_shape: bool = False,
) -> MemoryPrice:
    """The price of memory on every device, without the stairs between.

    Args:
        setting: what the plan is chosen from.
        clock: time for it.
        plan: for its devices and batch.
        budget: a device.
        added: bytes; ``added_bytes`` if not given.
        same_shape: whether plans of the plan's own pipeline, micro-batches and schedule alone are looked at, which
            takes less time and tells the least that memory is worth.
    """
    size = added_bytes(budget) if added is None else added
    setting = in_its_shape(setting, plan) if same_shape else setting
    clock.begin("the fastest plan within the budget")
    now = _plan_anew(setting, clock, plan.devices, plan.global_batch, budget)
    clock.begin(f"{format_budget(size)} more on every device")
    then = _plan_anew(setting, clock, plan.devices, plan.global_batch, budget.plus(size))
    quicker = then if seconds_of(then) < seconds_of(now) else now
    saved = seconds_of(now) - seconds_of(quicker)
    full = [number for number, stage in enumerate(quicker.stages) if stage.memory.total > budget.of(stage.device)]
    groups = dict.fromkeys(group_of(quicker.schedule, quicker.pipeline, number) for number in full)
    return MemoryPrice(
        budget_bytes=budget.least,
        added_bytes=size,
        step_seconds=seconds_of(now),
        then_step_seconds=seconds_of(quicker),
        seconds_per_gib=saved / (size / GIB),
        steps=() if quicker is now else (_memory_step(quicker, budget),),
        wanted_groups=tuple(groups) if quicker.pipeline == plan.pipeline else (),
        proven=_gap_of(now) == _gap_of(then) == 0.0,
        gap=max(_gap_of(now), _gap_of(then)),
        same_shape=same_shape,
    )


def with_less(price: MemoryPrice, setting: PlanSetting, clock: TimeLimit, plan: Plan, budget: Budget) -> MemoryPrice:
    """The price with what as much memory less would cost; as it is where the time is over."""
    size = price.added_bytes
    try:
        clock.begin(f"{format_budget(size)} less on every device")
        smaller = _plan_anew(setting, clock, plan.devices, plan.global_batch, budget.plus(-size))
    except OutOfTimeError:
        return price
    except InfeasibleError:
        return replace(price, less_bytes=size)
    return replace(price, less_bytes=size, less_step_seconds=max(seconds_of(smaller), price.step_seconds))


def with_stairs(price: MemoryPrice, setting: PlanSetting, clock: TimeLimit, plan: Plan, budget: Budget) -> MemoryPrice:
    """The price with the fastest plans between the two budgets, by memory; fewer where the time is over."""
    steps: list[MemoryStep] = list(price.steps)
    alike = not budget.by_device  # budgets of unlike devices have no one order
    while alike and steps and len(steps) <= MOST_STAIRS and steps[0].budget_bytes - 1 > budget.least:
        try:
            clock.begin("where it gets quicker")
            smaller = _plan_anew(setting, clock, plan.devices, plan.global_batch, Budget(steps[0].budget_bytes - 1))
        except (OutOfTimeError, InfeasibleError):
            break
        if seconds_of(smaller) >= price.step_seconds:
            break
        steps = [_memory_step(smaller, budget), *steps]
    return replace(price, steps=tuple(steps))


def _memory_step(plan: Plan, budget: Budget) -> MemoryStep:
    return MemoryStep(max(peak_of(plan), budget.least), seconds_of(plan), summary(plan))


MEMORY_CHANGE = 0.1  # of memory, more or less


@dataclass(frozen=True, slots=True)
class _Variation:
    name: str  # name, change: see ``WhatIf``
    change: str
    batch: int  # samples a step
    budget: Budget  # a device; None: the plan's
    # makes that of the changed cluster; None: as it is. It gives None where nothing says what it would be
    profile: Callable[[Profile], Profile | None] | None = None


def _changes(setting: PlanSetting, plan: Plan, budget: Budget) -> Iterator[_Variation]:
    batch, cluster = plan.global_batch, setting.profile.cluster
    yield _Variation("memory_less", "10 % less memory on every device", batch, budget.scaled(1 - MEMORY_CHANGE))
    yield _Variation("memory_more", "10 % more memory on every device", batch, budget.scaled(1 + MEMORY_CHANGE))
    for place, level in reversed(list(enumerate(cluster.levels))):
        if level.size > 1:
            text = f"links of each {level.name} twice as fast"
            yield _Variation(f"links_{level.name}", text, batch, budget, partial(with_faster_links, place=place))
    yield _Variation("batch_twice", "twice the batch", 2 * batch, budget)
    if batch % 2 == 0:
        yield _Variation("batch_half", "half the batch", batch // 2, budget)
    yield _Variation("node_more", "one node more, as many samples a device", batch, budget, with_one_more)


def what_ifs(setting: PlanSetting, clock: TimeLimit, plan: Plan, budget: Budget, rate: float) -> tuple[WhatIf, ...]:
    """What each change would give."""
    return tuple(_what_if(setting, clock, plan, change, rate) for change in _changes(setting, plan, budget))


def _what_if(setting: PlanSetting, clock: TimeLimit, plan: Plan, change: _Variation, rate: float) -> WhatIf:
    answer = WhatIf(change.name, change.change, plan.devices, change.batch)
    try:
        clock.begin(change.change)
        asked = _changed(setting, plan, change)
        if asked is None:
            return replace(answer, why="unknown: no data sheet says how it would be connected")
        other, devices, batch = asked
        answer = replace(answer, devices=devices, batch=batch)
        plan_again = _plan_anew(other, clock, devices, batch, change.budget, QUICK)
    except (OutOfTimeError, InfeasibleError, InputError) as error:
        return replace(answer, why=str(error))
    assert plan_again.prediction is not None
    per_second = plan_again.prediction.samples_per_second
    return replace(
        answer, step_seconds=plan_again.prediction.step_seconds, samples_per_second=per_second,
        gain=per_second / rate - 1.0,
        summary=summary(plan_again), peak_bytes=plan_again.prediction.peak_memory, gap=_gap_of(plan_again),
    )  # fmt: skip


def _changed(setting: PlanSetting, plan: Plan, change: _Variation) -> tuple[PlanSetting, int, int] | None:
    """The question after a change: setting, devices, batch; None where there is no profile for it."""
    if change.profile is None:
        return setting, plan.devices, change.batch
    profile = change.profile(setting.session(plan.devices).profile)
    if profile is None:
        return None
    devices = profile.cluster.devices
    batch = change.batch * devices // plan.devices if devices > plan.devices else change.batch
    return replace(setting, profile=profile, source=None, memory=None, sessions={}), devices, batch
