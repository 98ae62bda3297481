"""What has to be searched for: why a plan is as it is, and the front of memory against time. No torch here."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from galvatron_lite.errors import GalvatronError
from galvatron_lite.report.gathered import Shown

if TYPE_CHECKING:
    from galvatron_lite.plans.schema import Plan
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.questions.front import Front
    from galvatron_lite.questions.setting import Setting

STEPS = 16
"""Budgets of the front differ by such a part of the whole at the least."""
NO_FRONT = "The front of memory against time was not found within its time: --search gives it more."


def with_answers(shown: Shown, seconds: float) -> Shown:
    """With an explanation and the front, as far as they are found in time.

    Args:
        shown: with its profile; else nothing is looked for.
        seconds: for both, half for each; what the first does not need is the second's.
    """
    from galvatron_lite.explainer.whole import explain_plan

    if shown.profile is None or shown.plan.provenance is None:
        return shown
    setting = setting_of(shown.plan, shown.profile)
    begun = monotonic()
    explained = replace(shown, explanation=explain_plan(setting, shown.plan, seconds=seconds / 2))
    if shown.plan.cyclic is not None or shown.plan.branches:
        return explained
    try:
        return replace(explained, front=front_of(setting, shown.plan, seconds - (monotonic() - begun)))
    except (GalvatronError, KeyboardInterrupt):
        return replace(explained, missing=(*shown.missing, NO_FRONT))


def setting_of(plan: Plan, profile: Profile) -> Setting:
    """What a plan was chosen from: its devices, its budget, what trains by it.

    Args:
        plan: with its provenance.
        profile: that it is priced with.
    """
    from galvatron_lite.cluster.budget import Budget
    from galvatron_lite.questions.counts import first_devices
    from galvatron_lite.questions.setting import Setting

    made_from = plan.provenance
    assert made_from is not None
    cluster = first_devices(profile.cluster, plan.devices)
    known = profile if cluster.devices == profile.cluster.devices else profile.on(cluster)
    budget = Budget(made_from.budget, tuple(made_from.budgets.items()))
    margin = 0.0 if plan.provenance is None else plan.provenance.margin
    return Setting(known, budget, backend=plan.backend.value, mode=plan.mode, margin=margin)


def front_of(setting: Setting, plan: Plan, seconds: float) -> Front:
    """The front from the plan's budget down, for its devices and batch.

    Raises:
        KeyboardInterrupt: the time was over before a plan was found.
        InfeasibleError: nothing fits the budget.
    """
    from galvatron_lite.cluster.budget import Budget
    from galvatron_lite.questions.front import pareto_front

    end = monotonic() + max(seconds, 0.0)

    def look(*_: object) -> None:
        if monotonic() > end:
            raise KeyboardInterrupt  # as Ctrl-C does: what was found so far is kept

    most = setting.budget.most if isinstance(setting.budget, Budget) else setting.budget
    return pareto_front(setting, plan.global_batch, step=max(most // STEPS, 1), progress=look, searching=look)
