"""What the fastest plan would be after a change, each by planning anew. No torch here.

As ``galvatron plan`` does, but where a proof takes long the search ends before it, and the gap is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from galvatron_lite.cluster.budget import Budget
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.explainer.asking import QUICK, Clock, OutOfTimeError, gap_of, plan_anew
from galvatron_lite.explainer.changed import with_faster_links, with_one_more
from galvatron_lite.explainer.schema import WhatIf
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.questions.setting import Setting
from galvatron_lite.search.result import summary

SHARE = 0.1
"""Of memory, more or less."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change and how to ask for it.

    Attributes:
        name, change: see ``WhatIf``.
        batch: samples a step.
        budget: a device; None: the plan's.
        profile: makes that of the changed cluster; None: as it is. It gives None where nothing says what it would be.
    """

    name: str
    change: str
    batch: int
    budget: Budget
    profile: Callable[[Profile], Profile | None] | None = None


def changes(setting: Setting, plan: Plan, budget: Budget) -> Iterator[Change]:
    """What is tried, the most asked-for first."""
    batch, cluster = plan.global_batch, setting.profile.cluster
    yield Change("memory_less", "10 % less memory on every device", batch, budget.scaled(1 - SHARE))
    yield Change("memory_more", "10 % more memory on every device", batch, budget.scaled(1 + SHARE))
    for place, level in reversed(list(enumerate(cluster.levels))):
        if level.size > 1:
            text = f"links of each {level.name} twice as fast"
            yield Change(f"links_{level.name}", text, batch, budget, _faster(place))
    yield Change("batch_twice", "twice the batch", 2 * batch, budget)
    if batch % 2 == 0:
        yield Change("batch_half", "half the batch", batch // 2, budget)
    yield Change("node_more", "one node more, as many samples a device", batch, budget, with_one_more)


def _faster(place: int) -> Callable[[Profile], Profile]:
    return lambda profile: with_faster_links(profile, place)


def what_ifs(setting: Setting, clock: Clock, plan: Plan, budget: Budget, rate: float) -> tuple[WhatIf, ...]:
    """What each change would give.

    Args:
        setting: what the plan is chosen from.
        clock: time for it.
        plan: for its devices and batch.
        budget: a device.
        rate: samples a second of the fastest plan now.
    """
    return tuple(_what_if(setting, clock, plan, change, rate) for change in changes(setting, plan, budget))


def _what_if(setting: Setting, clock: Clock, plan: Plan, change: Change, rate: float) -> WhatIf:
    told = WhatIf(change.name, change.change, plan.devices, change.batch)
    try:
        clock.begin(change.change)
        asked = _changed(setting, plan, change)
        if asked is None:
            return replace(told, why="nothing says how it would be joined")
        other, devices, batch = asked
        told = replace(told, devices=devices, batch=batch)
        found = plan_anew(other, clock, devices, batch, change.budget, QUICK)
    except (OutOfTimeError, InfeasibleError, InputError) as error:
        return replace(told, why=str(error))
    assert found.prediction is not None
    per_second = found.prediction.samples_per_second
    return replace(
        told, step_seconds=found.prediction.step_seconds, samples_per_second=per_second, gain=per_second / rate - 1.0,
        summary=summary(found), peak_bytes=found.prediction.peak_memory, gap=gap_of(found),
    )  # fmt: skip


def _changed(setting: Setting, plan: Plan, change: Change) -> tuple[Setting, int, int] | None:
    """The question after a change: setting, devices, batch; None where there is no profile for it."""
    if change.profile is None:
        return setting, plan.devices, change.batch
    profile = change.profile(setting.session(plan.devices).profile)
    if profile is None:
        return None
    devices = profile.cluster.devices
    batch = change.batch * devices // plan.devices if devices > plan.devices else change.batch
    return replace(setting, profile=profile, source=None, memory=None, sessions={}), devices, batch
