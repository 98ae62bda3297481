"""The report of plans: one HTML file that needs no network.

For each plan it shows the prediction, the timeline of a step, memory, an explanation, the front of memory against time
and a measured run, and says what is missing.
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
    device_groups,
    layer_strip,
    named_runs,
    strategy_styles,
)
from galvatron_lite.analysis.report.run_figures import PlanMark, front_figure, measured
from galvatron_lite.analysis.report.timeline_data import drawn_groups, group_name, memory_curve, packed
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
NO_FRONT = "The front of memory against time was not found within its time: --search gives it more."
STEPS = 16  # budgets of the front differ by at least this fraction of the whole


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan and what is shown of it."""

    name: str  # of its file
    plan: Plan
    profile: Profile | None = None  # that it is priced with; None if not known
    timeline: Timeline | None = None  # of a step; None if it has none
    front: ParetoFront | None = None  # memory against time; None if not searched
    explanation: Explanation | None = None  # None if not wanted
    run: RecordedRun | None = None  # measured; None without a run
    missing: tuple[str, ...] = ()  # what is not shown, and why, a sentence each

    def budget_of(self, stage: int) -> int:
        """The budget of a stage's devices, in bytes; 0 if not known."""
        provenance = self.plan.provenance
        return 0 if provenance is None else provenance.budget_of(self.plan.stages[stage])


def check_priced(view: PlanView) -> PlanView:
    """Return the view, or raise ``InputError`` if its plan has no prediction."""
    if view.plan.prediction is None:
        remedy = "It has no prediction: give --profile FILE, or --model and --cluster, to price it with."
        raise InputError("plan", view.name, remedy)
    return view


def with_timeline(view: PlanView) -> PlanView:
    """Add the timeline of a step, or the reason why there is none."""
    reason = NO_PROFILE if view.profile is None else untimed(view.plan)
    if reason or view.profile is None:
        return replace(view, missing=(*view.missing, reason))
    return replace(view, timeline=timeline(view.profile, view.plan))


def with_run(view: PlanView, run: RecordedRun) -> PlanView:
    """Add a measured run, and a warning if it was trained under another plan."""
    if _without_prediction(run.plan) == _without_prediction(view.plan):
        return replace(view, run=run)
    warning = f"The run in {run.folder} was last under another plan than this one: what was measured is of that plan."
    return replace(view, run=run, missing=(*view.missing, warning))


def _without_prediction(plan: Plan) -> Plan:
    stages = tuple(replace(stage, memory=MemoryBreakdown(), microbatch_seconds=0.0, device="") for stage in plan.stages)
    return replace(plan, stages=stages, prediction=None, provenance=None, alternatives=(), left_out=(), order=None)


def with_answers(view: PlanView, seconds: float) -> PlanView:
    """Add an explanation and the front, as far as they are found in the time."""
    plan, profile, provenance = view.plan, view.profile, view.plan.provenance
    if profile is None or provenance is None:
        return view
    cluster = first_devices(profile.cluster, plan.devices)
    on_cluster = profile if cluster.devices == profile.cluster.devices else profile.on(cluster)
    budget = Budget(provenance.budget, tuple(provenance.budgets.items()))
    setting = PlanSetting(on_cluster, budget, backend=plan.backend.value, mode=plan.mode, margin=provenance.margin)
    end = monotonic() + seconds
    view = replace(view, explanation=explain_plan(setting, plan, seconds=seconds / 2))
    if plan.cyclic is not None or plan.branches:
        return view

    def check_time(*_: object) -> None:
        if monotonic() > end:
            raise KeyboardInterrupt  # as Ctrl-C: the points so far are kept

    try:
        step = max(budget.most // STEPS, 1)
        front = pareto_front(setting, plan.global_batch, step=step, progress=check_time, searching=check_time)
    except (GalvatronError, KeyboardInterrupt):
        return replace(view, missing=(*view.missing, NO_FRONT))
    return replace(view, front=front)


def page(views: Sequence[PlanView]) -> str:
    """Render the report as HTML."""
    styles = strategy_styles([check_priced(view).plan for view in views])
    contents = [_contents(view, number, styles) for number, view in enumerate(views)]
    title = contents[0]["title"].partition(":")[0] if len(contents) == 1 else f"{len(contents)} plans"
    environment = _environment()
    source = environment.loader.get_source if environment.loader is not None else None
    assert source is not None
    return environment.get_template("report.html").render(
        title=title, version=__version__, views=contents, looks=list(styles.values()),
        compared=_comparison_rows(views),
        style=source(environment, "report.css")[0], script=source(environment, "report.js")[0],
    )  # fmt: skip


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("galvatron_lite.analysis.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"seconds": format_seconds, "capfirst": lambda words: words[:1].upper() + words[1:]}
    return environment


Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Card:
    name: str
    value: str
    note: str = ""  # below the value
    share: float | None = None  # filled part of a bar below the value; None: no bar
    alarm: bool = False  # whether it is shown as a warning


def _contents(view: PlanView, number: int, styles: Mapping[Strategy, StrategyStyle]) -> dict[str, Any]:
    """The variables of the template for one plan."""
    plan, step, explanation, provenance = view.plan, view.timeline, view.explanation, view.plan.provenance
    front = _front_marks(view)
    in_stages = plan.devices > 1 and not plan.branches and plan.cyclic is None
    return {
        "number": number,
        "name": view.name,
        "title": headline(plan),
        "origin": "" if provenance is None else provenance.profile_origin.partition(": ")[2],
        "estimated": provenance is None or not provenance.profile_origin.startswith("measured"),
        "cards": tuple(_cards(view)),
        "notes": () if provenance is None else provenance.notes,
        "strip": layer_strip(plan, styles),
        "layers": tuple(_layer_rows(plan, styles)),
        "time": tuple(_time_shares(plan)),
        "step": format_seconds(plan.prediction.step_seconds) if plan.prediction else "",
        "memory": tuple(_memory_rows(view)),
        "dimensions": device_groups(plan, view.profile.cluster.levels[0].size) if in_stages and view.profile else (),
        "front": front_figure(front, 0 if provenance is None else provenance.budget) if len(front) > 1 else None,
        "front_rows": _front_rows(front),
        "front_words": _front_words(view),
        "runners_up": tuple(_runner_up_rows(plan)),
        "explanation": explanation,
        "price": () if explanation is None or explanation.price is None else tuple(price_lines(explanation.price)),
        "tables": () if explanation is None else tuple(tables(explanation)),
        "trust": () if explanation is None else tuple(trust_lines(explanation.trust)),
        "measured": None if view.run is None else measured(view.run, plan),
        "missing": (*view.missing, *plan.left_out),
        "packed": None,
        "courses": (),
        **({} if step is None else _timeline_contents(view, step)),
    }


def _timeline_contents(view: PlanView, step: Timeline) -> dict[str, Any]:
    budgets = [view.budget_of(group.stages[0]) for group in step.groups]
    drawn = drawn_groups(step)
    return {
        "packed": packed(step, budgets, [_ranks(group, view.plan) for group in step.groups]),
        "splits_backward": any(item.what is Pass.WEIGHT for item in step.groups[0].passes),
        "overlapping": step.overlapping,
        "groups": tuple(_group_rows(step, view.plan)),
        "courses": tuple(memory_curve(group, step, budgets[group.group]) for group in drawn),
        "all_drawn": len(drawn) == len(step.groups),
    }


def _cards(view: PlanView) -> list[_Card]:
    plan, prediction, provenance = view.plan, view.plan.prediction, view.plan.provenance
    assert prediction is not None
    unit = "Pass" if plan.mode is Mode.INFERENCE else "Step"
    batch = f"{plan.microbatches} micro-batches of {plan.microbatch}" if plan.microbatches > 1 else "in one micro-batch"
    tokens = prediction.tokens_per_second
    tokens_note = "" if tokens == prediction.samples_per_second else f"{format_count(tokens)} tokens/s"
    if view.profile is not None:
        device = " and ".join(dict.fromkeys(group.device.name for group in view.profile.cluster.types))
    else:
        device = "device" if provenance is None else provenance.cluster
    stages = "no pipeline" if len(plan.stages) == 1 else f"{len(plan.stages)} stages, {plan.schedule.value}"
    if plan.branches:
        stages = f"{len(plan.branches)} branches on devices of their own"
    return [
        _Card(f"{unit} time", format_seconds(prediction.step_seconds), _proof(plan)),
        _Card("Samples a second", format_count(prediction.samples_per_second), tokens_note),
        _Card("MFU", f"{100 * prediction.mfu:.1f} %", "of the devices' peak", share=prediction.mfu),
        _memory_card(plan),
        _Card("Devices", f"{plan.devices}", f"{device}; {stages}"),
        _Card("Batch", f"{plan.global_batch}", f"{batch}, {plan.precision}"),
    ]


def _proof(plan: Plan) -> str:
    if plan.provenance is None:
        return ""
    if plan.provenance.gap:
        return f"at most {percent(plan.provenance.gap)} from the fastest"
    words = {"proven": "proven the fastest", "given": "plan as given", "feasible": "not proven the fastest"}
    return words[plan.provenance.proof]


def _memory_card(plan: Plan) -> _Card:
    assert plan.prediction is not None
    if plan.provenance is None:
        return _Card("Memory", format_bytes(plan.prediction.peak_memory), "budget not known")
    fullest = fullest_of(plan.stages, plan.provenance)
    budget = plan.provenance.budget_of(fullest)
    share = fullest.memory.total / budget if budget else 0.0
    note = f"{'' if plan.fits else 'does not fit: '}{100 * share:.1f} % of the budget of {format_bytes(budget)}"
    return _Card("Memory", format_bytes(fullest.memory.total), note, share, alarm=not plan.fits)


def _layer_rows(plan: Plan, styles: Mapping[Strategy, StrategyStyle]) -> list[Row]:
    """A row for each run of layers; consecutive stages with equal runs share their rows."""
    rows: list[Row] = []
    for _, group in groupby(
        named_runs(plan), key=lambda part: (part[0].isdigit(), tuple((run.strategy, run.count) for run in part[1]))
    ):
        alike = list(group)
        label = alike[0][0] if len(alike) == 1 else f"{alike[0][0]} – {alike[-1][0]}"
        for number, run in enumerate(alike[0][1]):
            last = alike[-1][1][number].last
            layers = run.first if run.first == last else f"{run.first} … {last}"
            count = f"{run.count}" if len(alike) == 1 else f"{run.count} a stage"
            style = styles[run.strategy]
            rows.append((label if number == 0 else "", layers, count, style.letter, style.strategy, style.words))
    return rows


_TIME_NAMES = {
    "forward": "forward", "backward": "backward", "recompute": "computing again", "communication": "communication",
    "pipeline": "waiting for other stages", "optimizer": "optimizer", "other": "host and stragglers",
}  # fmt: skip


def _time_shares(plan: Plan) -> list[dict[str, Any]]:
    if plan.prediction is None:
        return []
    total = plan.prediction.time.total or 1.0
    return [
        {"name": _TIME_NAMES[name], "value": format_seconds(seconds), "share": seconds / total,
         "words": percent(seconds / total), "class_": f"time-{name}"}
        for name, seconds in time_parts(plan.prediction.time)
    ]  # fmt: skip


def _ranks(group: GroupTimeline, plan: Plan) -> str:
    """The ranks of a group and the type of its devices."""
    last = group.ranks.stop - 1
    ranks = f"rank {last}" if len(group.ranks) == 1 else f"ranks {group.ranks.start}–{last}"
    return ", ".join(filter(None, (ranks, plan.stages[group.stages[0]].device)))


def _group_rows(step: Timeline, plan: Plan) -> list[Row]:
    rows: list[Row] = []
    for group in step.groups:
        span = group.end - group.begin + step.host if step.overlapping else step.span
        once_a_step = sum(item.end - item.start for item in group.closing)
        rows.append((
            group_name(group), _ranks(group, plan), f"{len(group.passes)}", percent(group.busy / span),
            percent(max(1.0 - (group.busy + step.host) / span, 0.0)),
            format_seconds(group.begin) if group.begin else "0 s",
            format_seconds(group.passes[-1].free),
            format_seconds(once_a_step) if once_a_step else "–",
        ))  # fmt: skip
    return rows


def _memory_rows(view: PlanView) -> list[Row]:
    """A row for each group of devices; for each stage if there is no timeline."""
    rows: list[Row] = []
    for number, stage in enumerate(view.plan.stages):
        name, moment = f"stage {number}", ""
        if view.timeline is not None:
            group = next(group for group in view.timeline.groups if number in group.stages)
            if group.stages[0] != number:
                continue
            peak, worst = group.peak, group.passes[group.peak.place]
            name, moment = group_name(group), "optimizer"
            if peak.place >= 0:
                moment = f"{worst.what.value} of micro-batch {worst.microbatch}, layer {peak.layer}"
        budget = view.budget_of(number)
        parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in memory_parts(stage.memory)[:4])
        share = f"{100 * stage.memory.total / budget:.1f} %" if budget else "–"
        rows.append((name, format_bytes(stage.memory.total), share, moment, parts))
    return rows


def _front_marks(view: PlanView) -> list[PlanMark]:
    """The plan, the front and the runners-up."""
    plan, prediction = view.plan, view.plan.prediction
    assert prediction is not None
    marks = [PlanMark(prediction.peak_memory, prediction.step_seconds, "plan", "this plan")]
    for point in () if view.front is None else view.front.points:
        if point.plan is not None and (point.peak, point.seconds) != (prediction.peak_memory, prediction.step_seconds):
            marks.append(PlanMark(point.peak, point.seconds, "front", summary(point.plan)))
    for alternative in plan.alternatives:
        kind = "other" if alternative.fits else "overfull"
        marks.append(PlanMark(alternative.peak_memory, alternative.step_seconds, kind, alternative.summary))
    return marks


def _front_rows(marks: Sequence[PlanMark]) -> list[dict[str, Any]]:
    rows = []
    for mark in sorted(marks, key=lambda mark: mark.memory):
        if mark.kind in ("plan", "front"):
            slower = change(mark.seconds / marks[0].seconds - 1) if mark.kind == "front" else ""
            cells = (mark.words, format_bytes(mark.memory), format_seconds(mark.seconds), slower)
            rows.append({"cells": cells, "chosen": mark.kind == "plan"})
    return rows


def _front_words(view: PlanView) -> str:
    if view.front is None:
        return "The front itself was not looked for (--search SECONDS): this plan and its runners-up alone are shown."
    if not view.front.complete:
        return "The search ran out of time: there may be plans that need less memory."
    return f"Between plans of the front, budgets less than {format_bytes(view.front.step)} apart were not looked at."


def _runner_up_rows(plan: Plan) -> list[Row]:
    if plan.prediction is None:
        return []
    chosen = plan.prediction.step_seconds
    return [
        (other.summary, format_seconds(other.step_seconds), change(other.step_seconds / chosen - 1.0),
         format_bytes(other.peak_memory), "yes" if other.fits else "no")
        for other in plan.alternatives
    ]  # fmt: skip


def _comparison_rows(views: Sequence[PlanView]) -> list[Row]:
    if len(views) == 1:
        return []
    columns = [_cards(view) for view in views]
    rows: list[Row] = [
        (cards[0].name, *(f"{card.value}\n{card.note}" for card in cards)) for cards in zip(*columns, strict=True)
    ]
    if len({view.plan.model for view in views}) == 1:
        rates = [view.plan.prediction.samples_per_second for view in views if view.plan.prediction is not None]
        rows.append(("Samples a second against the first", "–", *(change(rate / rates[0] - 1.0) for rate in rates[1:])))
    return rows
