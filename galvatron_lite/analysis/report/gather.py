"""What a report shows of a plan: prediction, timeline, explanation, front and a run; and what it leaves out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic

from galvatron_lite.analysis.explain import explain_plan
from galvatron_lite.analysis.explanation import Explanation
from galvatron_lite.analysis.setting import PlanSetting, first_devices
from galvatron_lite.analysis.sweeps import ParetoFront, pareto_front
from galvatron_lite.cluster.budget import Budget
from galvatron_lite.cost.timeline import Timeline, timeline, untimed
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.plans.schema import MemoryBreakdown, Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runs.schema import RecordedRun

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
