"""Why plans are as they are, as functions: ``explain`` and ``compare``. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from galvatron_lite.cluster.budget import DEFAULT_BUDGET

if TYPE_CHECKING:
    from galvatron_lite.analysis.explanation import Comparison, Explanation
    from galvatron_lite.analysis.setting import Setting
    from galvatron_lite.api import Progress, Setup
    from galvatron_lite.plans.schema import Plan
    from galvatron_lite.profiler.schema import Profile

SECONDS = 120.0
"""For planning anew, where nobody says."""


def explain(
    plan: Plan | str | Path,
    profile: Profile | str | Path | None = None,
    *,
    what_if: bool = True,
    seconds: float | None = SECONDS,
    **setup: Unpack[Setup],
) -> Explanation:
    """Why a plan is as it is: what each choice buys, what binds, where the time goes, what would change it.

    Args:
        plan: a plan, or a file: ours, one written by hand, or Hetu-Galvatron's.
        profile: what it is priced with; with neither a profile nor a model, what the plan says it was made from, as far
            as that is here.
        what_if: whether to plan anew for the price of memory, runner-ups and what-ifs.
        seconds: for planning anew; what there was no time for is said. None: no end.
        setup: see ``plan``: what the plan was asked for with, where that was more than a budget and a batch. ``mem`` is
            the plan's own budget if not given.

    Raises:
        InputError: a file, layer or number that cannot be used; no profile that the plan was made from.
    """
    from galvatron_lite.analysis.explain import explain_plan

    setting, done, progress = question_of(plan, profile, setup)
    return explain_plan(setting, done, what_if=what_if, seconds=seconds, progress=progress)


def question_of(
    plan: Plan | str | Path, profile: Profile | str | Path | None, setup: Setup
) -> tuple[Setting, Plan, Progress | None]:
    """What a plan is the answer to, the plan with its prediction, and who is told of progress; see ``explain``.

    Raises:
        InputError: a file, layer or number that cannot be used; no profile that the plan was made from.
    """
    from galvatron_lite.analysis.arguments import memory
    from galvatron_lite.api import _setting
    from galvatron_lite.api_sources import budget_of, given_plan
    from galvatron_lite.peers.plan_files import priced
    from galvatron_lite.search.ways import Delay

    given, known = given_plan(plan, profile, setup)
    budget = None if "mem" in setup else budget_of(given)
    mem = memory(setup.get("mem", DEFAULT_BUDGET if budget is None else budget.least))
    asked: Setup = {**setup, "model": None, "cluster": None, "gpus": None, "sequence": None, "precision": None}
    asked |= {"mode": given.mode, "mem": mem}
    if given.provenance is not None:
        asked.setdefault("margin", given.provenance.margin)
    asked.setdefault("backend", given.backend.value)
    setting, batch, progress = _setting(known, asked, ("what_if", "seconds"))
    if budget is not None:
        setting = replace(setting, budget=budget, memory=None)
    if given.cyclic is not None and setting.delay is None:
        setting = replace(setting, delay=Delay())
    return setting, priced(given, known, mem, batch), progress


def compare(
    plans: Sequence[Plan | str | Path] | Mapping[str, Plan | str | Path],
    profile: Profile | str | Path | None = None,
    **setup: Unpack[Setup],
) -> Comparison:
    """Plans of one model side by side, all priced with the same profile.

    Args:
        plans: two or more, or files; named by their files, by their place, or by the keys of a mapping.
        profile: what all are priced with; with neither a profile nor a model, what the first of them that names one was
            made from, as far as that is here.
        setup: ``model``, ``cluster``, ``gpus``, ``sequence``, ``precision`` and ``mem`` as for ``plan``.

    Raises:
        InputError: fewer than two plans, one that is not of the profile's model, a file that cannot be used.
    """
    from galvatron_lite.analysis.arguments import memory
    from galvatron_lite.analysis.compare import compare_plans
    from galvatron_lite.api_sources import given_plans

    named, known = given_plans(plans, profile, setup)
    return compare_plans(named, known, memory(setup["mem"]) if "mem" in setup else None)
