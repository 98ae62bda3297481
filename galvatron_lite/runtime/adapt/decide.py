"""What is decided of what was seen: pure functions from a state and an event to a decision and the next state.

The course: a window of steps that takes longer or shorter than predicted is probed (``links``); once ``patience`` of
them in a row deviate, the profile is corrected, and if that changed it, a plan is made anew. The new plan is gone over
to where it gains enough of a step, and what the steps left gain pays for the switch. Then no plan is made for
``cool_down`` steps; only where steps are slower than before the switch, it is undone, and the plan never tried again.

No torch here, and no clock: the same events give the same decisions, so that a log can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.step import device_memory
from galvatron_lite.cost.switching import switch_cost
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runtime.adapt.correct import (
    corrected,
    device_factors,
    link_factors,
    memory_factor,
    predicted_groups,
)
from galvatron_lite.runtime.adapt.planning import plain, plan_name, step_seconds
from galvatron_lite.runtime.adapt.schema import (
    Adapt,
    AdaptAction,
    Corrections,
    Decision,
    LinkFactor,
    Started,
    StepWindow,
)
from galvatron_lite.units import format_seconds

AS_PROFILED = Corrections()
"""A profile that is right."""
_BACK = 2.0
"""How many times the least gain a plan must have that was left before."""


@dataclass(frozen=True, slots=True)
class State:
    """What decisions hang on besides the event."""

    settings: Adapt  # of adapting
    profile: Profile  # as it was made
    plan: Plan  # under way
    corrections: Corrections = AS_PROFILED  # of the profile
    cool_until: int = 0  # no plan is made before this step
    deviating: int = 0  # windows in a row that deviated
    planning: bool = False  # whether a plan is being made
    former: Plan | None = None  # the plan before the last switch, until that has proved itself
    former_seconds: float = 0.0  # median step under it
    measured: float = 0.0  # median step of the last window
    left: frozenset[str] = field(default_factory=frozenset)  # names of plans that were gone away from
    blocked: frozenset[str] = field(default_factory=frozenset)  # names of plans that made steps slower
    switch_seconds: float = 0.0  # the longest that a switch took; 0 where there was none
    probed: int = 0  # step at which links were last measured
    forced: bool = False  # whether the plan under way does not fit, and any other is taken that does

    @property
    def predicted(self) -> float:
        """Seconds of a step, by the corrected profile."""
        return step_seconds(self.profile, self.corrections, self.plan)


def begin(started: Started) -> State:
    """The state that a log begins with."""
    return State(started.settings, started.profile, plain(started.plan), started.corrections)


def deviates(state: State, window: StepWindow) -> bool:
    """Whether a window is to be probed: most of its steps are slower, or faster, than predicted."""
    low, _, high = window.seconds
    threshold, predicted = state.settings.threshold, state.predicted
    return low > predicted * (1.0 + threshold) or high < predicted * (1.0 - threshold)


def wants_links(state: State, window: StepWindow) -> bool:
    """Whether links are to be measured behind a window: it deviates, or a slow link may be well again by now.

    A plan that goes round a slow link does not show when the link is well.
    """
    if state.planning or state.former is not None or window.step < state.cool_until:
        return False
    due = bool(state.corrections.links) and window.step >= state.probed + state.settings.cool_down
    return deviates(state, window) or due or state.deviating > 0


def on_window(state: State, window: StepWindow) -> tuple[State, Decision]:
    """What a window leads to."""
    probed = window.step if window.links else state.probed
    state = replace(state, measured=window.seconds[1], probed=probed)
    said = f"{format_seconds(window.seconds[1])} a step, predicted {format_seconds(state.predicted)}"
    if state.former is not None:
        return _after_switch(state, window, said)
    if state.planning:
        return _keep(state, window.step, f"{said}; a plan is being made")
    if window.step < state.cool_until:
        return _keep(state, window.step, f"{said}; cooling down until step {state.cool_until}")
    fuller = _memory(state, window) > state.corrections.memory * (1.0 + state.settings.threshold)
    changed = bool(window.links) and not _alike_links(state, window)
    if not deviates(state, window) and not fuller and not changed:
        return _keep(replace(state, deviating=0), window.step, f"{said}: as predicted")
    state = replace(state, deviating=state.deviating + 1)
    if state.deviating < state.settings.patience:
        return _keep(state, window.step, f"{said}; deviates, {state.deviating} of {state.settings.patience} windows")
    return _corrected(replace(state, deviating=0), window, said)


def on_planned(state: State, step: int, plan: Plan | None, error: str) -> tuple[State, Decision]:
    """What a plan that was made leads to."""
    state = replace(state, planning=False, cool_until=step + state.settings.window)
    if plan is None:
        return _keep(state, step, f"no plan was found: {error}")
    name, own = plan_name(plan), plan_name(state.plan)
    if state.forced:
        reason = f"memory is {state.corrections.memory:g} times what was predicted: the fastest plan that fits"
        return replace(state, forced=False), Decision(step, AdaptAction.SWITCH, reason, state.corrections, name)
    if name == own:
        return _keep(state, step, "the plan under way is the fastest by the corrected profile too")
    if name in state.blocked:
        return _keep(state, step, f"plan {name} made steps slower when it was tried")
    return _weigh(state, step, plan, name)


def on_done(state: State, step: int, seconds: float, plan: Plan, error: str = "") -> State:
    """The state once a switch to a plan was made, or was not."""
    cool = step + state.settings.cool_down
    if error:
        return replace(state, cool_until=cool, blocked=state.blocked | {plan_name(plan)}, former=None)
    going_back = state.former is not None
    return replace(
        state, plan=plain(plan), cool_until=cool,
        former=None if going_back else state.plan, former_seconds=0.0 if going_back else state.measured,
        left=state.left | {plan_name(state.plan)}, switch_seconds=max(seconds, state.switch_seconds),
        blocked=state.blocked | {plan_name(state.plan)} if going_back else state.blocked,
    )  # fmt: skip


def on_exhausted(state: State, factor: float) -> State:
    """The state once memory ran out: plans are to take less by this factor than was predicted."""
    known = replace(state.corrections, memory=factor)
    return replace(state, corrections=known, planning=True, former=None, deviating=0, forced=True)


def _keep(state: State, step: int, reason: str) -> tuple[State, Decision]:
    return state, Decision(step, AdaptAction.KEEP, reason, state.corrections)


def _after_switch(state: State, window: StepWindow, observation: str) -> tuple[State, Decision]:
    """Whether a switch has proved itself, by the first window behind it."""
    former, before = state.former, state.former_seconds
    assert former is not None
    if window.seconds[0] > before * (1.0 + state.settings.least_gain):
        reason = f"{observation}; {format_seconds(before)} before the switch: it is undone"
        return state, Decision(window.step, AdaptAction.BACK, reason, state.corrections, plan_name(former))
    settled = replace(state, former=None, corrections=_with_residual(state, window))
    return _keep(settled, window.step, f"{observation}, {format_seconds(before)} before the switch")


def _with_residual(state: State, window: StepWindow) -> Corrections:
    """The corrections with the factor that makes the prediction the window's median."""
    bare = replace(state.corrections, residual=1.0)
    predicted = step_seconds(state.profile, bare, state.plan)
    return replace(bare, residual=round(window.seconds[1] / predicted, 3)) if predicted else bare


def _memory(state: State, window: StepWindow) -> float:
    """Factor of the bytes measured on those predicted."""
    by_stage = device_memory(evaluate(state.profile, state.plan))
    return memory_factor(window, [one.total for one in by_stage for _ in range(state.plan.stage_devices)])


def _corrected(state: State, window: StepWindow, observation: str) -> tuple[State, Decision]:
    """The profile is corrected by a window; a plan is made where that says more than a factor for all."""
    threshold, before = state.settings.threshold, state.corrections
    links = link_factors(window.links, threshold)
    groups = predicted_groups(corrected(state.profile, Corrections(links)), state.plan)
    devices = device_factors(window.groups, groups, state.profile.cluster.devices, threshold)
    memory = max(before.memory, _memory(state, window))
    known = replace(state, corrections=Corrections(links, devices, memory))
    known = replace(known, corrections=_with_residual(known, window))
    found = _differences(known.corrections)
    if _alike(before, known.corrections, threshold):
        return _keep(known, window.step, f"{observation}; corrected before ({found})")
    reason = f"{observation}; {found}: a plan is made for that"
    return replace(known, planning=True), Decision(window.step, AdaptAction.PLAN, reason, known.corrections)


def _differences(corrections: Corrections) -> str:
    """Corrections in words."""
    links = [
        f"{link.level} takes {link.per_byte:g} times as long a byte"
        + (f" and {format_seconds(link.latency)} more a message" if link.latency else "")
        for link in corrections.links
    ]
    slow = [f"rank {rank} computes {factor:g} times as long" for rank, factor in enumerate(corrections.devices)]
    if len(set(corrections.devices)) == 1:
        slow = [f"layers take {corrections.devices[0]:g} times as long"]
    memory = [f"memory is {corrections.memory:g} times what was predicted"] if corrections.memory > 1.0 else []
    known = [*links, *slow, *memory] or ["links, devices and memory are as profiled"]
    return ", ".join([*known, f"a factor of {corrections.residual:g} is left unexplained"])


def _alike_links(state: State, window: StepWindow) -> bool:
    """Whether the links are as they were corrected to be."""
    now = replace(state.corrections, links=link_factors(window.links, state.settings.threshold))
    return _alike(state.corrections, now, state.settings.threshold)


def _alike(one: Corrections, other: Corrections, threshold: float) -> bool:
    """Whether no factor differs by more than the threshold; what is unexplained changes no plan."""
    levels = {link.level for link in (*one.links, *other.links)}
    count = max(len(one.devices), len(other.devices))
    pairs = [
        *((_link(one, level).per_byte, _link(other, level).per_byte) for level in levels),
        *zip(one.devices or (1.0,) * count, other.devices or (1.0,) * count, strict=True),
        (one.memory, other.memory),
    ]
    grown = [abs(_link(one, level).latency - _link(other, level).latency) for level in levels]
    return all(abs(b / a - 1.0) <= threshold for a, b in pairs) and all(more < 1e-3 for more in grown)


def _link(corrections: Corrections, level: str) -> LinkFactor:
    return next((link for link in corrections.links if link.level == level), LinkFactor(level, 1.0))


def _weigh(state: State, step: int, plan: Plan, name: str) -> tuple[State, Decision]:
    """Whether another plan is worth going over to."""
    settings = state.settings
    now, then = state.predicted, step_seconds(state.profile, state.corrections, plan)
    gain = 1.0 - then / now
    least = settings.least_gain * (_BACK if name in state.left else 1.0)
    ahead = settings.horizon if settings.steps is None else max(settings.steps - step, 0)
    cost = max(switch_cost(state.profile, state.plan, plan).seconds, state.switch_seconds)
    said = f"{format_seconds(now)} a step becomes {format_seconds(then)} ({gain:.1%} less) by prediction"
    if gain < least:
        return _keep(state, step, f"{said}: less than {least:.1%}")
    if ahead * (now - then) <= cost:
        return _keep(state, step, f"{said}: the switch of {format_seconds(cost)} does not pay in {ahead} steps")
    reason = (
        f"{said}: {ahead} steps gain {format_seconds(ahead * (now - then))}, the switch costs {format_seconds(cost)}"
    )
    return state, Decision(step, AdaptAction.SWITCH, reason, state.corrections, name)
