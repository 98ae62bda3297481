"""Plans that train by delayed gradients (cyclic data parallelism), where the user allows them.

The declared space: every rule and setting that the devices suffice for, with stages of equal time. ``single``: one
device, as many stages as divide the batch (``MOST_STAGES`` at most). ``data``, ``zero``: as many stages as devices.
``stages``: N of N(N+1)/2 devices. No layer is split. All of them are priced, but for those of one
device that take longer, by the sum of their layers, than one that fits, and those of more than ``MOST_STAGES`` stages
that by that sum take longer than the plan without delay, or that cannot fit by their states and activations. Of each
setting the best plan is told: the quickest that fits, of equal ones the fresher rule; else the one that needs least
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from galvatron_lite.cluster.budget import bytes_on
from galvatron_lite.cost.cyclic import layer_costs, split
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting, device_count
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.describe import plan_notes
from galvatron_lite.plans.schema import Cyclic, Mode, Plan, Proof, Schedule
from galvatron_lite.profiler.schema import spread_note
from galvatron_lite.search.families.family import PlanTask, seconds_of
from galvatron_lite.search.result import plan_of, provenance

MOST_STAGES = 32
"""Stages at most on one device, where devices do not say how many; with more, pricing takes seconds a plan."""
_RULES = (CyclicRule.V2, CyclicRule.V1)
_ROUNDING = 1e-9


def delayed_plans(task: PlanTask) -> Sequence[Plan]:
    """The best plan of each setting; none where delayed gradients are not allowed.

    Raises:
        InputError: plans without delay are excluded, and there is none with it.
    """
    if task.delay is None:
        return ()
    best = [_best(task, list(_priced(task, setting))) for setting in CyclicSetting]
    plans = [plan for plan in best if plan is not None]
    if not plans and task.delay.only:
        value = task.delay.setting.value if task.delay.setting else "cyclic"
        why = "; ".join(why_not_delayed(task))
        raise InputError("--fix setting" if task.delay.setting else "--fix schedule", value, f"{why}.")
    return [_with_provenance(task, plan) for plan in plans]


def why_not_delayed(task: PlanTask) -> Sequence[str]:
    """Settings that are not offered, and why; nothing where delayed gradients are not allowed."""
    if task.delay is None:
        return ()
    reason = _never(task)
    if reason:
        return (f"cyclic: {reason}",)
    lines = []
    for setting in CyclicSetting:
        why = _why_not(task, setting)
        if why and task.delay.setting in (None, setting):
            lines.append(f"cyclic: {setting.value}: {why}")
    return lines


def _never(task: PlanTask) -> str:
    """Why no setting is possible; empty where one may be."""
    request, fixed = task.request, task.request.fixed
    if not task.backend.beside:
        return f"{task.backend.name} trains without delay alone"
    if task.session.mode is not Mode.TRAINING:
        return "gradients are delayed in training only"
    if request.graph.whole:
        return f"the model allows {request.graph.whole}, and stages are needed"
    if request.cluster is not None:
        return "devices of several types take unequal time"
    pinned = [f"--fix {name}" for name, value in (("schedule", fixed.schedule), ("virtual", fixed.virtual)) if value]
    split = [f"--fix {name}" for name, value in fixed.strategy if getattr(Strategy(), name) != value]
    split += [f"--fix {layers}.{name}" for layers, name, value in fixed.layers if getattr(Strategy(), name) != value]
    if pinned or split:
        return f"every layer is whole, in a cycle of stages: lift {(pinned + split)[0]}"
    return ""


def _why_not(task: PlanTask, setting: CyclicSetting) -> str:
    """Why a setting is not possible; empty where it is."""
    request, counts = task.request, _counts(task, setting)
    if not counts:
        return _devices_of(setting, request.devices)
    forbidden = {CyclicSetting.DATA: "data", CyclicSetting.STAGES: "pipeline"}.get(setting)
    if forbidden in request.fixed.forbidden:
        return f"--forbid {forbidden} rules it out"
    if not any(request.global_batch % count == 0 for count in counts):
        return f"the batch of {request.global_batch} must divide by the {counts[0]} micro-batches"
    if not any(_keeps_pins(task, setting, count) for count in counts):
        return "it has as many micro-batches as stages: pins ask for others"
    if not any(_cuts(task, count) for count in counts):
        shared = [tie for tie in request.graph.ties if tie.parameters]
        if not shared:
            return f"{len(request.graph.layers)} layers do not make {counts[0]} stages"
        ends = f"{shared[0].first} and {shared[0].second}"
        return f"{ends} share parameters and must be in one stage, so the layers do not make {counts[0]}"
    return ""


def _devices_of(setting: CyclicSetting, devices: int) -> str:
    """How many devices a setting takes, for people."""
    if setting is CyclicSetting.SINGLE:
        return f"it is of one device, not {devices}"
    if setting is not CyclicSetting.STAGES:
        return "it takes two devices or more"
    count = next(number for number in range(2, devices + 3) if device_count(setting, number) > devices)
    near = [str(device_count(setting, number)) for number in (count - 1, count) if number > 1]
    return f"N stages take N(N+1)/2 devices: {' or '.join(near)}, not {devices}"


def _counts(task: PlanTask, setting: CyclicSetting) -> list[int]:
    """The numbers of stages that the devices suffice for; there are as many micro-batches."""
    request = task.request
    if setting is CyclicSetting.SINGLE:
        most = min(MOST_STAGES, len(request.graph.layers))
        fewer = [count for count in divisors(request.global_batch) if 2 <= count <= most]
        return fewer if request.devices == 1 else []
    return [count for count in range(2, request.devices + 1) if device_count(setting, count) == request.devices]


def _keeps_pins(task: PlanTask, setting: CyclicSetting, count: int) -> bool:
    fixed = task.request.fixed
    groups = count if setting is CyclicSetting.STAGES else 1
    return fixed.pipeline in (None, groups) and fixed.microbatches in (None, count)


def _cuts(task: PlanTask, count: int) -> tuple[int, ...]:
    if task.request.global_batch % count:
        return ()
    try:
        return split(task.session.pricer, count, task.request.global_batch // count)
    except InputError:  # the profile has no figures of a whole layer at that size
        return ()


def _priced(task: PlanTask, setting: CyclicSetting) -> Iterator[Plan]:
    """The plans of a setting with their predictions, but for those that the module leaves out."""
    if _never(task) or _why_not(task, setting) or task.delay is None or task.delay.setting not in (None, setting):
        return
    rules = [rule for rule in _RULES if task.delay.rule in (None, rule)]
    quickest = float("inf")
    counts = [count for count in _counts(task, setting) if _keeps_pins(task, setting, count) and _cuts(task, count)]
    for count in sorted(counts, key=lambda count: (_least_seconds(task, count), count)):
        if _least_seconds(task, count) >= quickest:
            return
        if count > MOST_STAGES and not task.delay.only and _hopeless(task, setting, count):
            continue
        for rule in rules:
            plan = price_plan(task.session.pricer, _plan(task, Cyclic(rule, setting), count))
            if setting is CyclicSetting.SINGLE and plan.prediction and task.request.fits(plan):
                quickest = min(quickest, plan.prediction.step_seconds)
            yield plan


def _least_seconds(task: PlanTask, count: int) -> float:
    costs = layer_costs(task.session.pricer, task.request.global_batch // count)
    return count * sum(cost.forward + cost.backward + cost.recompute for cost in costs)


def _hopeless(task: PlanTask, setting: CyclicSetting, count: int) -> bool:
    """Whether a plan of one micro-batch a device can be ruled out before it is priced."""
    if task.ordinary is None or setting is CyclicSetting.STAGES:
        return False
    slower = _least_seconds(task, count) / count >= seconds_of(task.ordinary)
    costs = layer_costs(task.session.pricer, task.request.global_batch // count)
    states = sum(cost.parameters + cost.states for cost in costs) if setting is CyclicSetting.DATA else 0
    return slower or states + sum(cost.kept for cost in costs) > bytes_on(task.request.budget, "")


def _plan(task: PlanTask, cyclic: Cyclic, count: int) -> Plan:
    request = task.request
    plan = plan_of(
        request.graph, devices=request.devices, global_batch=request.global_batch, microbatches=count,
        cuts=_cuts(task, count), strategies=[Strategy()] * len(request.graph.layers), schedule=Schedule.CYCLIC,
    )  # fmt: skip
    return replace(plan, cyclic=cyclic)


def _best(task: PlanTask, plans: Sequence[Plan]) -> Plan | None:
    """The quickest that fits, the first of equal ones; else the one that needs least; None of none."""
    best: Plan | None = None
    for plan in (plan for plan in plans if task.request.fits(plan)):
        if best is None or seconds_of(plan) < seconds_of(best) * (1.0 - _ROUNDING):
            best = plan
    return best or min(plans, key=lambda plan: plan.prediction.peak_memory if plan.prediction else 0, default=None)


def _with_provenance(task: PlanTask, plan: Plan) -> Plan:
    """A plan with its gap: plans with delay are all priced, the ordinary ones up to the gap of their search."""
    ordinary, gap = task.ordinary, 0.0
    ordinary_source = None if ordinary is None else ordinary.provenance
    source = ordinary_source or provenance(task.session.profile, task.request.budget, 0.0)
    only = task.delay is not None and task.delay.only
    if not only and ordinary_source is not None:
        gap = max(1.0 - seconds_of(ordinary) * (1.0 - ordinary_source.gap) / seconds_of(plan), 0.0)
    source = replace(
        source,
        gap=gap,
        proof=Proof.FEASIBLE if gap > 0.0 else Proof.PROVEN,
        certificate="",
        notes=(*plan_notes(task.request.graph, plan), *spread_note(task.session.profile.origin)),
        least_seconds=0.0,
        most_seconds=0.0,
    )
    return replace(plan, left_out=() if ordinary is None else ordinary.left_out, provenance=source)
