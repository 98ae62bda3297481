"""What memory is worth: how much quicker a step becomes with more of it on every device. No torch here.

Plans are discrete, so the step time is a staircase over the budget, and a price is a difference: of the fastest plan
within the budget and the fastest within the budget and what is added. Between the two the stairs are found from above,
as the front over budgets is (``questions.front``): a plan of peak p found within a budget is the fastest from p on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from galvatron_lite.cluster.budget import Budget
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.explainer.asking import Clock, OutOfTimeError, gap_of, peak_of, plan_anew, seconds_of
from galvatron_lite.explainer.schema import MemoryPrice, MemoryStep
from galvatron_lite.parallelism.pipeline.schedule import group_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.questions.pins import Pins
from galvatron_lite.questions.setting import Setting
from galvatron_lite.search.result import summary
from galvatron_lite.units import format_budget

GIB = 2**30
SHARE = 8
"""A price is of 1 GiB, or of this part of the budget where that is less: a model that takes 100 MB is another one with
1 GiB more."""
MOST_STAIRS = 4
"""Plans between the two budgets that are looked for."""


def added_bytes(budget: Budget) -> int:
    """The memory whose price is told."""
    return min(GIB, max(budget.least // SHARE, 1))


def in_its_shape(setting: Setting, plan: Plan) -> Setting:
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
    setting: Setting,
    clock: Clock,
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

    Raises:
        OutOfTimeError: the time was over.
        InfeasibleError: nothing fits the budget.
    """
    size = added_bytes(budget) if added is None else added
    setting = in_its_shape(setting, plan) if same_shape else setting
    clock.begin("the fastest plan within the budget")
    now = plan_anew(setting, clock, plan.devices, plan.global_batch, budget)
    clock.begin(f"{format_budget(size)} more on every device")
    then = plan_anew(setting, clock, plan.devices, plan.global_batch, budget.plus(size))
    quicker = then if seconds_of(then) < seconds_of(now) else now
    saved = seconds_of(now) - seconds_of(quicker)
    return MemoryPrice(
        budget_bytes=budget.least,
        added_bytes=size,
        step_seconds=seconds_of(now),
        then_step_seconds=seconds_of(quicker),
        seconds_per_gib=saved / (size / GIB),
        steps=_told([quicker] if quicker is not now else [], budget),
        wanted_groups=_over(quicker, budget) if quicker.pipeline == plan.pipeline else (),
        proven=gap_of(now) == gap_of(then) == 0.0,
        gap=max(gap_of(now), gap_of(then)),
        same_shape=same_shape,
    )


def with_less(price: MemoryPrice, setting: Setting, clock: Clock, plan: Plan, budget: Budget) -> MemoryPrice:
    """The price with what as much memory less would cost; as it is where the time is over."""
    size = price.added_bytes
    try:
        clock.begin(f"{format_budget(size)} less on every device")
        lean = plan_anew(setting, clock, plan.devices, plan.global_batch, budget.plus(-size))
    except OutOfTimeError:
        return price
    except InfeasibleError:
        return replace(price, less_bytes=size)
    return replace(price, less_bytes=size, less_step_seconds=max(seconds_of(lean), price.step_seconds))


def with_stairs(price: MemoryPrice, setting: Setting, clock: Clock, plan: Plan, budget: Budget) -> MemoryPrice:
    """The price with the fastest plans between the two budgets, the leanest first; fewer where the time is over."""
    found: list[MemoryStep] = list(price.steps)
    alike = not budget.own  # budgets of unlike devices have no one order
    while alike and found and len(found) <= MOST_STAIRS and found[0].budget_bytes - 1 > budget.least:
        try:
            clock.begin("where it gets quicker")
            lean = plan_anew(setting, clock, plan.devices, plan.global_batch, Budget(found[0].budget_bytes - 1))
        except (OutOfTimeError, InfeasibleError):
            break
        if seconds_of(lean) >= price.step_seconds:
            break
        found = [*_told([lean], budget), *found]
    return replace(price, steps=tuple(found))


def _told(plans: Sequence[Plan], budget: Budget) -> tuple[MemoryStep, ...]:
    return tuple(MemoryStep(max(peak_of(one), budget.least), seconds_of(one), summary(one)) for one in plans)


def _over(plan: Plan, budget: Budget) -> tuple[int, ...]:
    """Groups of devices that need more than the budget."""
    full = [number for number, stage in enumerate(plan.stages) if stage.memory.total > budget.of(stage.device)]
    return tuple(dict.fromkeys(group_of(plan.schedule, plan.pipeline, number) for number in full))
