"""The report of plans: one HTML file with everything in it, which opens without a network.

Of each plan it shows prediction, timeline, explanation, front and a run, and says what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from time import monotonic
from typing import TYPE_CHECKING, Any

from galvatron_lite import __version__
from galvatron_lite.analysis.explain import explain_plan
from galvatron_lite.analysis.explanation import Explanation
from galvatron_lite.analysis.report.plan_figures import (
    StrategyStyle,
    groups_in,
    layer_strip,
    looks_of,
    parts_of,
)
from galvatron_lite.analysis.report.run_figures import PlanMark, front_figure, measured
from galvatron_lite.analysis.report.timeline_data import course_of, name_of, packed, shown_groups
from galvatron_lite.analysis.setting import PlanSetting, first_devices
from galvatron_lite.analysis.sweeps import ParetoFront, pareto_front
from galvatron_lite.analysis.tables import price_lines, tables, trust_lines
from galvatron_lite.cluster.budget import Budget
from galvatron_lite.cost.timeline import GroupTimeline, Timeline, timeline, untimed
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.parallelism.pipeline.schedule import Pass
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.describe import fullest_of, headline, memory_parts, time_parts
from galvatron_lite.plans.schema import MemoryBreakdown, Mode, Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runs.schema import RecordedRun
from galvatron_lite.search.result import summary
from galvatron_lite.svg import change, percent
from galvatron_lite.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from jinja2 import Environment


NO_PROFILE = (
    "The timeline, memory over time, the cluster's nodes and the front need what the plan was priced with: give "
    "--profile FILE, or --model and --cluster."
)


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan and all that is known of it."""

    name: str  # of its file
    plan: Plan  # with its prediction, where it could be priced
    profile: Profile | None = None  # what it is priced with; None where that is not known
    timeline: Timeline | None = None  # of a step; None where there is none
    front: ParetoFront | None = None  # memory against time; None where it was not looked for
    explanation: Explanation | None = None  # why it is as it is; None where it was not asked for
    run: RecordedRun | None = None  # what was measured; None where no run is given
    missing: tuple[str, ...] = ()  # what is not shown, and why, a sentence each

    def budget_of(self, stage: int) -> int:
        """Bytes that a device of a stage may take; 0: not known."""
        made_from = self.plan.provenance
        return 0 if made_from is None else made_from.budget_of(self.plan.stages[stage])


def with_timeline(shown: PlanView) -> PlanView:
    """With the timeline of its step, or why it has none."""
    if shown.profile is None:
        return replace(shown, missing=(*shown.missing, NO_PROFILE))
    why = untimed(shown.plan)
    if why:
        return replace(shown, missing=(*shown.missing, why))
    return replace(shown, timeline=timeline(shown.profile, shown.plan))


def with_run(shown: PlanView, run: RecordedRun) -> PlanView:
    """With what was measured, and a word where the run was of another plan."""
    if _bare(run.plan) == _bare(shown.plan):
        return replace(shown, run=run)
    warning = f"The run in {run.folder} was last under another plan than this one: what was measured is of that plan."
    return replace(shown, run=run, missing=(*shown.missing, warning))


def _bare(plan: Plan) -> Plan:
    """What a plan does, without what it was predicted to cost and made from."""

    stages = tuple(replace(stage, memory=MemoryBreakdown(), microbatch_seconds=0.0, device="") for stage in plan.stages)
    return replace(plan, stages=stages, prediction=None, provenance=None, alternatives=(), left_out=(), order=None)


def check_priced(shown: PlanView) -> PlanView:
    """The same."""
    if shown.plan.prediction is None:
        raise InputError(
            "plan", shown.name,
            "It has no prediction: give --profile FILE, or --model and --cluster, to price it with.",
        )  # fmt: skip
    return shown


STEPS = 16  # budgets of the front differ by such a part of the whole at the least
NO_FRONT = "The front of memory against time was not found within its time: --search gives it more."


def with_answers(shown: PlanView, seconds: float) -> PlanView:
    """With an explanation and the front, as far as they are found in time."""

    plan, profile, made_from = shown.plan, shown.profile, shown.plan.provenance
    if profile is None or made_from is None:
        return shown
    cluster = first_devices(profile.cluster, plan.devices)
    on_cluster = profile if cluster.devices == profile.cluster.devices else profile.on(cluster)
    budget = Budget(made_from.budget, tuple(made_from.budgets.items()))
    setting = PlanSetting(
        on_cluster, budget, backend=plan.backend.value, mode=plan.mode, margin=made_from.margin
    )  # fmt: skip
    end = monotonic() + seconds
    explained = replace(shown, explanation=explain_plan(setting, plan, seconds=seconds / 2))
    if plan.cyclic is not None or plan.branches:
        return explained

    def look(*_: object) -> None:
        if monotonic() > end:
            raise KeyboardInterrupt  # as Ctrl-C does: what was found so far is kept

    try:
        step = max(budget.most // STEPS, 1)
        front = pareto_front(setting, plan.global_batch, step=step, progress=look, searching=look)
        return replace(explained, front=front)
    except (GalvatronError, KeyboardInterrupt):
        return replace(explained, missing=(*shown.missing, NO_FRONT))


TIME_WORDS = {
    "forward": "forward", "backward": "backward", "recompute": "computing again", "communication": "communication",
    "pipeline": "waiting for other stages", "optimizer": "optimizer", "other": "host and stragglers",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Card:
    name: str  # of what
    value: str  # in words
    note: str = ""  # below it
    share: float | None = None  # of a bar below it; None for none
    alarm: bool = False  # whether it is a warning


@dataclass(frozen=True, slots=True)
class _TableRow:
    cells: tuple[str, ...]  # texts
    chosen: bool = False  # whether it is of the plan itself


def _view_of(shown: PlanView, number: int, looks: Mapping[Strategy, StrategyStyle]) -> dict[str, Any]:
    plan, step, why = shown.plan, shown.timeline, shown.explanation
    made_from = plan.provenance
    budgets = [] if step is None else [shown.budget_of(group.stages[0]) for group in step.groups]
    drawn = [] if step is None else shown_groups(step)
    front = _marks_of(shown)
    shared = plan.devices > 1 and not plan.branches and plan.cyclic is None
    return {
        "number": number,
        "name": shown.name,
        "title": headline(plan),
        "origin": "" if made_from is None else made_from.profile_origin.partition(": ")[2],
        "estimated": made_from is None or not made_from.profile_origin.startswith("measured"),
        "cards": tuple(_cards_of(shown)),
        "notes": () if made_from is None else made_from.notes,
        "strip": layer_strip(plan, looks),
        "layers": tuple(_layer_rows(plan, looks)),
        "time": tuple(_time_of(plan)),
        "step": format_seconds(plan.prediction.step_seconds) if plan.prediction else "",
        "packed": None if step is None else packed(step, budgets, [_ranks_of(group, plan) for group in step.groups]),
        "splits_backward": step is not None and any(pass_.what is Pass.WEIGHT for pass_ in step.groups[0].passes),
        "overlapping": step is not None and step.overlapping,
        "groups": () if step is None else tuple(_group_rows(step, plan)),
        "courses": () if step is None else tuple(course_of(group, step, budgets[group.group]) for group in drawn),
        "all_drawn": step is not None and len(drawn) == len(step.groups),
        "memory": tuple(_memory_rows(shown)),
        "dimensions": tuple(groups_in(plan, shown.profile.cluster.levels[0].size)) if shared and shown.profile else (),
        "front": front_figure(front, 0 if made_from is None else made_from.budget) if len(front) > 1 else None,
        "front_rows": tuple(_front_rows(front)),
        "front_words": _front_words(shown),
        "runners_up": tuple(_runner_rows(plan)),
        "explanation": why,
        "price": () if why is None or why.price is None else tuple(price_lines(why.price)),
        "tables": () if why is None else tuple(tables(why)),
        "trust": () if why is None else tuple(trust_lines(why.trust)),
        "measured": None if shown.run is None else measured(shown.run, plan),
        "missing": (*shown.missing, *plan.left_out),
    }


def _cards_of(shown: PlanView) -> list[_Card]:
    plan, prediction = shown.plan, shown.plan.prediction
    assert prediction is not None
    unit = "pass" if plan.mode is Mode.INFERENCE else "step"
    batch = f"{plan.microbatches} micro-batches of {plan.microbatch}" if plan.microbatches > 1 else "in one micro-batch"
    tokens = prediction.tokens_per_second
    plain = tokens == prediction.samples_per_second
    if shown.profile is not None:
        device = " and ".join(dict.fromkeys(group.device.name for group in shown.profile.cluster.types))
    else:
        device = plan.provenance.cluster if plan.provenance is not None else "device"
    stages = "no pipeline" if len(plan.stages) == 1 else f"{len(plan.stages)} stages, {plan.schedule.value}"
    if plan.branches:
        stages = f"{len(plan.branches)} branches on devices of their own"
    return [
        _Card(f"{unit.capitalize()} time", format_seconds(prediction.step_seconds), _proof(plan)),
        _Card("Samples a second", format_count(prediction.samples_per_second),
              "" if plain else f"{format_count(tokens)} tokens/s"),
        _Card("MFU", f"{100 * prediction.mfu:.1f} %", "of the devices' peak", share=prediction.mfu),
        _memory_card(plan),
        _Card("Devices", f"{plan.devices}", f"{device}; {stages}"),
        _Card("Batch", f"{plan.global_batch}", f"{batch}, {plan.precision}"),
    ]  # fmt: skip


def _proof(plan: Plan) -> str:
    made_from = plan.provenance
    if made_from is None:
        return ""
    if made_from.gap:
        return f"at most {percent(made_from.gap)} from the fastest"
    return {"proven": "proven the fastest", "given": "plan as given", "feasible": "not proven the fastest"}[
        made_from.proof
    ]


def _memory_card(plan: Plan) -> _Card:
    made_from = plan.provenance
    assert plan.prediction is not None
    if made_from is None:
        return _Card("Memory", format_bytes(plan.prediction.peak_memory), "budget not known")
    fullest = fullest_of(plan.stages, made_from)
    share = fullest.memory.total / made_from.budget_of(fullest) if made_from.budget_of(fullest) else 0.0
    words = f"{100 * share:.1f} % of the budget of {format_bytes(made_from.budget_of(fullest))}"
    if not plan.fits:
        words = f"does not fit: {words}"
    return _Card("Memory", format_bytes(fullest.memory.total), words, share, alarm=not plan.fits)


def _layer_rows(plan: Plan, looks: Mapping[Strategy, StrategyStyle]) -> list[_TableRow]:
    parts = parts_of(plan)
    rows = []
    for _, same in groupby(
        parts, key=lambda part: (part[0].isdigit(), tuple((run.strategy, run.count) for run in part[1]))
    ):
        own = list(same)
        label = own[0][0] if len(own) == 1 else f"{own[0][0]} – {own[-1][0]}"
        for place, run in enumerate(own[0][1]):
            last = own[-1][1][place].last
            layers = run.first if run.first == last else f"{run.first} … {last}"
            look = looks[run.strategy]
            count = f"{run.count}" if len(own) == 1 else f"{run.count} a stage"
            rows.append(_TableRow((label if place == 0 else "", layers, count, look.letter, look.strategy, look.words)))
    return rows


def _time_of(plan: Plan) -> list[dict[str, Any]]:
    if plan.prediction is None:
        return []
    shares = [
        (name, part, part / (plan.prediction.time.total or 1.0)) for name, part in time_parts(plan.prediction.time)
    ]
    return [
        {"name": TIME_WORDS[name], "value": format_seconds(seconds), "share": share, "words": percent(share),
         "class_": f"time-{name}"}
        for name, seconds, share in shares
    ]  # fmt: skip


def _ranks_of(group: GroupTimeline, plan: Plan) -> str:
    device = plan.stages[group.stages[0]].device
    last = group.ranks.stop - 1
    ranks = f"rank {last}" if len(group.ranks) == 1 else f"ranks {group.ranks.start}–{last}"
    return ", ".join(filter(None, (ranks, device)))


def _group_rows(step: Timeline, plan: Plan) -> list[_TableRow]:
    rows = []
    for group in step.groups:
        busy = group.end - group.begin + step.host if step.overlapping else step.span
        once = sum(one.end - one.start for one in group.closing)
        rows.append(_TableRow((
            name_of(group), _ranks_of(group, plan), f"{len(group.passes)}", percent(group.busy / busy),
            percent(max(1.0 - (group.busy + step.host) / busy, 0.0)),
            format_seconds(group.begin) if group.begin else "0 s",
            format_seconds(group.passes[-1].free),
            format_seconds(once) if once else "–",
        )))  # fmt: skip
    return rows


def _memory_rows(shown: PlanView) -> list[_TableRow]:
    plan, step = shown.plan, shown.timeline
    rows = []
    for number, stage in enumerate(plan.stages):
        group = None if step is None else next(group for group in step.groups if number in group.stages)
        if group is not None and group.stages[0] != number:
            continue
        budget = shown.budget_of(number)
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory_parts(stage.memory)[:4])
        share = f"{100 * stage.memory.total / budget:.1f} %" if budget else "–"
        name = f"stage {number}" if group is None else name_of(group)
        moment = ""
        if group is not None:
            peak = group.peak
            worst = group.passes[peak.place]
            passed = f"{worst.what.value} of micro-batch {worst.microbatch}, layer {peak.layer}"
            moment = "optimizer" if peak.place < 0 else passed
        rows.append(_TableRow((name, format_bytes(stage.memory.total), share, moment, parts)))
    return rows


def _marks_of(shown: PlanView) -> list[PlanMark]:
    plan, prediction = shown.plan, shown.plan.prediction
    assert prediction is not None
    marks = [PlanMark(prediction.peak_memory, prediction.step_seconds, "plan", "this plan")]
    for point in () if shown.front is None else shown.front.points:
        if point.plan is not None and (point.peak, point.seconds) != (prediction.peak_memory, prediction.step_seconds):
            marks.append(PlanMark(point.peak, point.seconds, "front", summary(point.plan)))
    for alternative in plan.alternatives:
        kind = "other" if alternative.fits else "overfull"
        marks.append(PlanMark(alternative.peak_memory, alternative.step_seconds, kind, alternative.summary))
    return marks


def _front_rows(marks: Sequence[PlanMark]) -> list[_TableRow]:
    order = sorted((mark for mark in marks if mark.kind in ("plan", "front")), key=lambda mark: mark.memory)
    slower = {mark: change(mark.seconds / marks[0].seconds - 1) for mark in order if mark.kind == "front"}
    return [
        _TableRow((mark.words, format_bytes(mark.memory), format_seconds(mark.seconds), slower.get(mark, "")),
            mark.kind == "plan")
        for mark in order
    ]  # fmt: skip


def _front_words(shown: PlanView) -> str:
    if shown.front is None:
        return "The front itself was not looked for (--search SECONDS): this plan and its runners-up alone are shown."
    if not shown.front.complete:
        return "The search ran out of time: there may be plans that need less memory."
    return f"Between plans of the front, budgets less than {format_bytes(shown.front.step)} apart were not looked at."


def _runner_rows(plan: Plan) -> list[_TableRow]:
    if plan.prediction is None:
        return []
    chosen = plan.prediction.step_seconds
    return [
        _TableRow((runner.summary, format_seconds(runner.step_seconds), change(runner.step_seconds / chosen - 1.0),
             format_bytes(runner.peak_memory), "yes" if runner.fits else "no"))
        for runner in plan.alternatives
    ]  # fmt: skip


def page(shown: Sequence[PlanView]) -> str:
    """The HTML of a report."""
    plans = [check_priced(one).plan for one in shown]
    looks = looks_of(plans)
    views = [_view_of(one, number, looks) for number, one in enumerate(shown)]
    title = views[0]["title"].partition(":")[0] if len(views) == 1 else f"{len(views)} plans"
    environment = _environment()
    source = environment.loader.get_source if environment.loader is not None else None
    assert source is not None
    return environment.get_template("report.html").render(
        title=title, version=__version__, views=views, looks=list(looks.values()),
        compared=_comparison_rows(shown),
        style=source(environment, "report.css")[0], script=source(environment, "report.js")[0],
    )  # fmt: skip


def _comparison_rows(shown: Sequence[PlanView]) -> list[_TableRow]:
    if len(shown) == 1:
        return []
    columns = [_cards_of(one) for one in shown]
    rows = [
        _TableRow((cards[0].name, *(f"{card.value}\n{card.note}" for card in cards)))
        for cards in zip(*columns, strict=True)
    ]
    if len({one.plan.model for one in shown}) == 1:
        rates = [one.plan.prediction.samples_per_second for one in shown if one.plan.prediction is not None]
        shares = (change(rate / rates[0] - 1.0) for rate in rates[1:])
        rows.append(_TableRow(("Samples a second against the first", "–", *shares)))
    return rows


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("galvatron_lite.analysis.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"seconds": format_seconds, "capfirst": lambda words: words[:1].upper() + words[1:]}
    return environment
