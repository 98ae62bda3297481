"""Decisions of adaptation: a pure function from a state and an event to the next state and a decision; and their log.

If a window of steps is slower or faster than predicted, the links are measured. After ``patience`` consecutive windows
that deviate, the profile is corrected, and if the corrections changed, a new plan is searched. Training switches to it
if it saves enough of each step, and the remaining steps save more than the switch costs. In the next ``cool_down``
steps no plan is searched. If steps are slower than before the switch, it is undone, and the plan is never tried again.

Decisions read no clock: the same events yield the same decisions, so a log can be replayed. A log has one JSON line for
each event and decision.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.step import device_memory
from galvatron_lite.cost.switching import switch_cost
from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import check_regular, parse_record, to_data
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runtime.monitor.correct import (
    corrected,
    device_factors,
    link_factors,
    memory_factor,
    predicted_groups,
)
from galvatron_lite.runtime.monitor.planning import answer, plan_name, step_seconds
from galvatron_lite.runtime.monitor.schema import (
    LOG_VERSION,
    Adapt,
    AdaptAction,
    Corrections,
    Decided,
    Decision,
    Done,
    Event,
    Exhausted,
    LinkFactor,
    PlannedRecord,
    Record,
    Started,
    StepWindow,
    WindowRecord,
)
from galvatron_lite.units import format_seconds

AS_PROFILED = Corrections()
_RETURN_FACTOR = 2.0
"""Factor on the least gain of a plan that was left before."""


@dataclass(frozen=True, slots=True)
class State:
    """The state that decisions depend on."""

    settings: Adapt
    profile: Profile  # uncorrected
    plan: Plan  # the current plan
    corrections: Corrections = AS_PROFILED
    cool_until: int = 0  # no plan is searched before this step
    deviating: int = 0  # consecutive windows that deviated
    planning: bool = False  # whether a plan is being searched
    target: Plan | None = None  # the plan to switch to
    former: Plan | None = None  # the plan before the last switch, until a window shows that the switch pays
    former_seconds: float = 0.0  # median seconds of a step under the former plan
    measured: float = 0.0  # median seconds of a step in the last window
    left: frozenset[str] = frozenset()  # names of plans that were left
    blocked: frozenset[str] = frozenset()  # names of plans that made steps slower
    switch_seconds: float = 0.0  # the longest switch so far
    probed: int = 0  # step at which links were last measured
    forced: bool = False  # whether the current plan does not fit, so that any plan that fits is taken

    @property
    def predicted(self) -> float:
        """Seconds of a step by the corrected profile."""
        return step_seconds(self.profile, self.corrections, self.plan)

    def query(self, step: int) -> Started:
        """Return the query for a new plan."""
        return Started(LOG_VERSION, self.settings, self.profile, self.plan, step, self.corrections)


def begin(started: Started) -> State:
    """Return the state at the start of a log."""
    return State(started.settings, started.profile, started.plan, started.corrections)


def decide(state: State, event: Event) -> tuple[State, Decision | None]:
    """Return the state after an event, and the decision, if the event needs one."""
    if isinstance(event, WindowRecord):
        return _on_window(state, event.window)
    if isinstance(event, PlannedRecord):
        return _on_planned(state, event)
    if isinstance(event, Exhausted):
        corrections = replace(state.corrections, memory=event.factor)
        return replace(state, corrections=corrections, planning=True, former=None, deviating=0, forced=True), None
    return _on_done(state, event), None


def deviates(state: State, window: StepWindow) -> bool:
    """Whether three quarters of the steps of a window are slower, or faster, than predicted by the threshold."""
    low, _, high = window.seconds
    threshold, predicted = state.settings.threshold, state.predicted
    return low > predicted * (1.0 + threshold) or high < predicted * (1.0 - threshold)


def wants_links(state: State, window: StepWindow) -> bool:
    """Whether to measure the links after a window: if it deviates, or if a slow link may have recovered.

    A link's recovery does not show in the steps of a plan that avoids the link, so it is measured now and then.
    """
    if state.planning or state.former is not None or window.step < state.cool_until:
        return False
    due = bool(state.corrections.links) and window.step >= state.probed + state.settings.cool_down
    return deviates(state, window) or due or state.deviating > 0


def _on_window(state: State, window: StepWindow) -> tuple[State, Decision]:
    """Decide after a window."""
    step, settings = window.step, state.settings
    state = replace(state, measured=window.seconds[1], probed=step if window.links else state.probed)
    observed = f"{format_seconds(window.seconds[1])} a step, predicted {format_seconds(state.predicted)}"
    if state.former is not None:
        return _after_switch(state, window, state.former, observed)
    if state.planning:
        return _keep(state, step, f"{observed}; a plan is being made")
    if step < state.cool_until:
        return _keep(state, step, f"{observed}; cooling down until step {state.cool_until}")
    links = replace(state.corrections, links=link_factors(window.links, settings.threshold))
    changed = bool(window.links) and not _agree(state.corrections, links, settings.threshold)
    fuller = _memory(state, window) > state.corrections.memory * (1.0 + settings.threshold)
    if not deviates(state, window) and not fuller and not changed:
        return _keep(replace(state, deviating=0), step, f"{observed}: as predicted")
    state = replace(state, deviating=state.deviating + 1)
    if state.deviating < settings.patience:
        return _keep(state, step, f"{observed}; deviates, {state.deviating} of {settings.patience} windows")
    return _correct(replace(state, deviating=0), window, observed)


def _on_planned(state: State, planned: PlannedRecord) -> tuple[State, Decision]:
    """Decide on a new plan."""
    step, plan = planned.step, planned.plan
    state = replace(state, planning=False, cool_until=step + state.settings.window)
    if plan is None:
        return _keep(state, step, f"no plan was found: {planned.error}")
    name = plan_name(plan)
    if state.forced:
        reason = f"memory is {state.corrections.memory:g} times what was predicted: the fastest plan that fits"
        return _change(replace(state, forced=False), step, AdaptAction.SWITCH, reason, plan)
    if name == plan_name(state.plan):
        return _keep(state, step, "the plan under way is the fastest by the corrected profile too")
    if name in state.blocked:
        return _keep(state, step, f"plan {name} made steps slower when it was tried")
    return _weigh(state, step, plan, name)


def _on_done(state: State, done: Done) -> State:
    """The state after a switch that succeeded or failed."""
    plan = state.target
    if plan is None:
        return state
    state = replace(state, target=None, cool_until=done.step + state.settings.cool_down)
    if done.error:
        return replace(state, blocked=state.blocked | {plan_name(plan)}, former=None)
    left = {plan_name(state.plan)}
    undone = state.former is not None
    return replace(
        state,
        plan=plan,
        former=None if undone else state.plan,
        former_seconds=0.0 if undone else state.measured,
        left=state.left | left,
        blocked=state.blocked | left if undone else state.blocked,
        switch_seconds=max(done.seconds, state.switch_seconds),
    )


def _keep(state: State, step: int, reason: str) -> tuple[State, Decision]:
    return state, Decision(step, AdaptAction.KEEP, reason, state.corrections)


def _change(state: State, step: int, action: AdaptAction, reason: str, plan: Plan) -> tuple[State, Decision]:
    return replace(state, target=plan), Decision(step, action, reason, state.corrections, plan_name(plan))


def _after_switch(state: State, window: StepWindow, former: Plan, observed: str) -> tuple[State, Decision]:
    """Undo a switch if the first window after it is slower than the last one before it."""
    before = state.former_seconds
    if window.seconds[0] > before * (1.0 + state.settings.least_gain):
        reason = f"{observed}; {format_seconds(before)} before the switch: it is undone"
        return _change(state, window.step, AdaptAction.BACK, reason, former)
    settled = replace(state, former=None, corrections=_with_residual(state, window))
    return _keep(settled, window.step, f"{observed}, {format_seconds(before)} before the switch")


def _with_residual(state: State, window: StepWindow) -> Corrections:
    """The corrections with the residual factor that makes the predicted step time the window's median."""
    corrections = replace(state.corrections, residual=1.0)
    predicted = step_seconds(state.profile, corrections, state.plan)
    return replace(corrections, residual=round(window.seconds[1] / predicted, 3)) if predicted else corrections


def _memory(state: State, window: StepWindow) -> float:
    stages = device_memory(evaluate(state.profile, state.plan))
    return memory_factor(window, [memory.total for memory in stages for _ in range(state.plan.stage_devices)])


def _correct(state: State, window: StepWindow, observed: str) -> tuple[State, Decision]:
    """Correct the profile by a window, and search for a plan if more than the residual factor changes."""
    threshold, before = state.settings.threshold, state.corrections
    links = link_factors(window.links, threshold)
    groups = predicted_groups(corrected(state.profile, Corrections(links)), state.plan)
    devices = device_factors(window.groups, groups, state.profile.cluster.devices, threshold)
    memory = max(before.memory, _memory(state, window))
    state = replace(state, corrections=Corrections(links, devices, memory))
    state = replace(state, corrections=_with_residual(state, window))
    differences = _differences(state.corrections)
    if _agree(before, state.corrections, threshold):
        return _keep(state, window.step, f"{observed}; corrected before ({differences})")
    reason = f"{observed}; {differences}: a plan is made for that"
    return replace(state, planning=True), Decision(window.step, AdaptAction.PLAN, reason, state.corrections)


def _differences(corrections: Corrections) -> str:
    """Describe corrections for people."""
    links = [
        f"{link.level} takes {link.per_byte:g} times as long a byte"
        + (f" and {format_seconds(link.latency)} more a message" if link.latency else "")
        for link in corrections.links
    ]
    slow = [f"rank {rank} computes {factor:g} times as long" for rank, factor in enumerate(corrections.devices)]
    if len(set(corrections.devices)) == 1:
        slow = [f"layers take {corrections.devices[0]:g} times as long"]
    memory = [f"memory is {corrections.memory:g} times what was predicted"] if corrections.memory > 1.0 else []
    differences = [*links, *slow, *memory] or ["links, devices and memory are as profiled"]
    return ", ".join([*differences, f"a factor of {corrections.residual:g} is left unexplained"])


def _agree(first: Corrections, second: Corrections, threshold: float) -> bool:
    """Whether corrections are equal within the threshold, apart from the residual factor, which changes no plan."""
    count = max(len(first.devices), len(second.devices))
    pairs = [
        *zip(first.devices or (1.0,) * count, second.devices or (1.0,) * count, strict=True),
        (first.memory, second.memory),
    ]
    before_of, after_of = ({link.level: link for link in corrections.links} for corrections in (first, second))
    for level in before_of.keys() | after_of.keys():
        before, after = (links.get(level, LinkFactor(level, 1.0)) for links in (before_of, after_of))
        if abs(before.latency - after.latency) >= 1e-3:
            return False
        pairs.append((before.per_byte, after.per_byte))
    return all(abs(after / before - 1.0) <= threshold for before, after in pairs)


def _weigh(state: State, step: int, plan: Plan, name: str) -> tuple[State, Decision]:
    """Decide whether another plan saves enough to pay for the switch."""
    settings = state.settings
    before, after = state.predicted, step_seconds(state.profile, state.corrections, plan)
    gain = 1.0 - after / before
    least = settings.least_gain * (_RETURN_FACTOR if name in state.left else 1.0)
    steps = settings.horizon if settings.steps is None else max(settings.steps - step, 0)
    saved, cost = (
        steps * (before - after),
        max(switch_cost(state.profile, state.plan, plan).seconds, state.switch_seconds),
    )
    compared = f"{format_seconds(before)} a step becomes {format_seconds(after)} ({gain:.1%} less) by prediction"
    if gain < least:
        return _keep(state, step, f"{compared}: less than {least:.1%}")
    if saved <= cost:
        return _keep(state, step, f"{compared}: the switch of {format_seconds(cost)} does not pay in {steps} steps")
    reason = f"{compared}: {steps} steps gain {format_seconds(saved)}, the switch costs {format_seconds(cost)}"
    return _change(state, step, AdaptAction.SWITCH, reason, plan)


_KINDS: dict[str, type[Record]] = {
    "started": Started, "seen": WindowRecord, "planned": PlannedRecord, "decided": Decided, "done": Done,
    "exhausted": Exhausted,
}  # fmt: skip


def write_record(path: str, record: Record) -> None:
    """Append a line to a log; if the path is empty, do nothing."""
    if not path:
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"kind": record.kind, **to_data(record)}, allow_nan=False) + "\n")


def read_log(path: Path) -> list[Record]:
    """Read the records of a log; raise ``FileFormatError`` for the first line that is no record."""
    try:
        lines = check_regular(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError("file", str(path), "There is no such log, or it is no text.") from error
    records = [
        parse_record(line, f"{path}, line {number}", _KINDS, "logs", LOG_VERSION)
        for number, line in enumerate(lines, start=1)
    ]
    if not records or not isinstance(records[0], Started):
        raise FileFormatError(str(path), "its first line", "A log begins with what training started from.")
    return records


@dataclass(frozen=True, slots=True)
class Replayed:
    """A decision of a log, and the same decision taken again."""

    logged: Decision | None  # None: the log has no such decision
    again: Decision  # from the same events

    @property
    def same(self) -> bool:
        """Whether both are equal."""
        return self.logged == self.again


def replay(records: Sequence[Record]) -> list[Replayed]:
    """Take all decisions of a log again; new plans are searched again too."""
    logged = iter([record.decision for record in records if isinstance(record, Decided)])
    first, *events = records
    assert isinstance(first, Started)
    state, replayed = begin(first), list[Replayed]()
    for event in events:
        if isinstance(event, (Started, Decided)):
            continue
        again = answer(state.query(event.step)) if isinstance(event, PlannedRecord) else event
        state, decision = decide(state, again)
        if decision is not None:
            replayed.append(Replayed(next(logged, None), decision))
    return replayed
