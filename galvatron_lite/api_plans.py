"""Functions on plans that exist: ``explain``, ``compare`` and ``verify_plan``, and what a plan was made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from galvatron_lite.api_profile import find_profile, profile_of
from galvatron_lite.cluster.budget import DEFAULT_BUDGET, Budget
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.files import read_data
from galvatron_lite.peers.plan_files import check_devices, priced, read_any_plan
from galvatron_lite.plans.io import check_plan, read_plan, refuse_phases
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import profile_hash, read_profile
from galvatron_lite.request import PlanArguments, PlanRequest, Progress, memory_budget, texts
from galvatron_lite.verify.schema import Checks, checks_named

if TYPE_CHECKING:
    from torch import nn

    from galvatron_lite.analysis.explanation import Comparison, Explanation
    from galvatron_lite.analysis.setting import PlanSetting
    from galvatron_lite.verify.schema import Verification
    from galvatron_lite.verify.source import ModelSource


def _budget_of(plan: Plan) -> Budget | None:
    made_from = plan.provenance
    if made_from is None or not made_from.budget:
        return None
    return Budget(made_from.budget, tuple(made_from.budgets.items()))


Given = Plan | str | Path


def read_plan_and_profile(
    plan: Given, profile: Profile | str | Path | None, setup: PlanArguments
) -> tuple[Plan, Profile]:
    """A plan, and what it is priced with.

    Args:
        plan: or its file.
        profile: or its file; None: see ``setup``, else what the plan says.
        setup: ``model``, ``cluster``, ``gpus``, ``sequence`` and ``precision`` of ``plan``.

    Raises:
        InputError: a file that cannot be used, one of phases, no profile, or a plan for other devices.
    """
    known = _profile_for([plan], profile, setup)
    given = plan if isinstance(plan, Plan) else read_any_plan(Path(plan), known, setup.get("batch"))
    check_devices(given, known, setup.get("gpus"))
    return given, known


def read_plans(
    plans: Sequence[Given] | Mapping[str, Given], profile: Profile | str | Path | None, setup: PlanArguments
) -> tuple[dict[str, Plan], Profile]:
    """Plans by name, and what all of them are priced with; see ``read_plan_and_profile``.

    Raises:
        InputError: fewer than two, and as ``read_plan_and_profile``.
    """
    named = dict(plans) if isinstance(plans, Mapping) else dict(zip(_names(plans), plans, strict=True))
    if len(named) < 2:
        raise InputError("plans", len(named), "Give two or more to compare.")
    known = _profile_for(list(named.values()), profile, setup)
    given = {
        name: plan if isinstance(plan, Plan) else read_any_plan(Path(plan), known, setup.get("batch"))
        for name, plan in named.items()
    }
    for plan in given.values():
        check_devices(plan, known)
    return given, known


def read_priced(path: Path, profile: Profile | str | Path | None, setup: PlanArguments) -> tuple[Plan, Profile | None]:
    """A plan from its file with its prediction, and what that was made with; None where it is not here.

    With neither a profile nor a model the plan stays as its file says it; with one it is priced anew, unless that is
    the profile that it was made from.
    """
    if profile is None and setup.get("model") is None:
        plan = read_plan(path)
        with suppress(GalvatronError, OSError):
            return plan, profile_of(plan)
        return plan, None
    known, own = _profile_for([path], profile, setup), _planned(path)
    mem, batch = setup.get("mem"), setup.get("batch")
    made_from = None if own is None else own.provenance
    same = made_from is not None and made_from.profile_hash == profile_hash(known)
    if own is not None and same and mem is batch is None:
        return own, known
    budget = None if mem is None else memory_budget(mem)
    return priced(read_any_plan(path, known, batch), known, budget, batch), known


def _names(plans: Sequence[Given]) -> list[str]:
    """Of each its file without what all have in common, or its place; all unlike."""
    names = [f"plan {place}" if isinstance(plan, Plan) else Path(plan).stem for place, plan in enumerate(plans, 1)]
    if len(set(names)) == len(names):
        return names
    whole = [name if isinstance(plan, Plan) else str(plan) for name, plan in zip(names, plans, strict=True)]
    return whole if len(set(whole)) == len(whole) else [f"{name} ({place})" for place, name in enumerate(whole, 1)]


def _profile_for(plans: Sequence[Given], profile: Profile | str | Path | None, setup: PlanArguments) -> Profile:
    """The profile that is given, else that of the first plan that says what it was made from."""
    if profile is not None or setup.get("model") is not None:
        return find_profile(
            profile, model=setup.get("model"), cluster=setup.get("cluster"), gpus=setup.get("gpus"),
            sequence=setup.get("sequence"), precision=setup.get("precision"), trainable=setup.get("trainable"),
            freeze=texts("freeze", setup.get("freeze")),
        )  # fmt: skip
    made = [plan if isinstance(plan, Plan) else _planned(Path(plan)) for plan in plans]
    return profile_of(next((plan for plan in made if plan is not None and plan.provenance), None))


def named_profile(plan: Given) -> Profile | None:
    """The profile that a plan says it was made from; None where it names none (written by hand, or of another planner).

    Raises:
        InputError: that profile is not here.
    """
    own = plan if isinstance(plan, Plan) else _planned(Path(plan))
    return None if own is None or own.provenance is None else profile_of(own)


def _planned(path: Path) -> Plan | None:
    """A plan of ours from a file; None where it is written by hand or of others, which name no profile."""
    refuse_phases(read_data(path), path)
    with suppress(GalvatronError):
        return read_plan(path)
    return None


SECONDS = 120.0
"""For planning anew, where nobody says."""


def explain(
    plan: Plan | str | Path,
    profile: Profile | str | Path | None = None,
    *,
    what_if: bool = True,
    seconds: float | None = SECONDS,
    **setup: Unpack[PlanArguments],
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
    plan: Plan | str | Path, profile: Profile | str | Path | None, setup: PlanArguments
) -> tuple[PlanSetting, Plan, Progress | None]:
    """What a plan is the answer to, the plan with its prediction, and who is told of progress; see ``explain``.

    Raises:
        InputError: a file, layer or number that cannot be used; no profile that the plan was made from.
    """
    from galvatron_lite.search.space import Delay

    given, known = read_plan_and_profile(plan, profile, setup)
    budget = None if "mem" in setup else _budget_of(given)
    mem = memory_budget(setup.get("mem", DEFAULT_BUDGET if budget is None else budget.least))
    asked: PlanArguments = {**setup, "model": None, "cluster": None, "gpus": None, "sequence": None, "precision": None}
    asked |= {"mode": given.mode, "mem": mem}
    asked.setdefault("backend", given.backend.value)
    if given.provenance is not None:
        asked.setdefault("margin", given.provenance.margin)
    request = PlanRequest.parse(known, asked, ("what_if", "seconds"))
    setting = request.resolve()
    if budget is not None:
        setting = replace(setting, budget=budget, memory=None)
    if given.cyclic is not None and setting.delay is None:
        setting = replace(setting, delay=Delay())
    return setting, priced(given, known, mem, request.batch), request.progress


def compare(
    plans: Sequence[Plan | str | Path] | Mapping[str, Plan | str | Path],
    profile: Profile | str | Path | None = None,
    **setup: Unpack[PlanArguments],
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
    from galvatron_lite.analysis.compare import compare_plans

    named, known = read_plans(plans, profile, setup)
    return compare_plans(named, known, memory_budget(setup["mem"]) if "mem" in setup else None)


def verify_plan(
    plan: Plan | str | Path,
    model: nn.Module | Callable[[], Any] | str | None = None,
    batch: Any = None,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    sequence: int | None = None,
    checks: str | Sequence[str] = tuple(Checks),
    processes: int | None = None,
    progress: Progress | None = None,
    profile: Profile | str | Path | None = None,
) -> Verification:
    """Whether a plan does what it says; no GPU and no cluster are needed.

    Args:
        plan: a plan, or its file.
        model: that it is for: a module, a function that returns the model, (model, batch) or (model, batch, loss_fn),
            or a name (``gpt-tiny``, ``llama3-70b``); that in the plan's sources if not given.
        batch: an example batch, for a module.
        loss_fn: ``loss_fn(output, batch)``, for a module whose output is not or does not hold its loss.
        sequence: tokens a sample, for a model by name.
        checks: ``dry``: one rank of each role does a whole step without data; what it sends is matched across all
            ranks, and its memory is told beside the prediction. ``numbers``: a small model is trained under a small
            plan of the same kind on processes of this machine, and compared with one process.
        processes: the most that ``numbers`` may start; if not given 4, or 8 where 4 have no room for all that the plan
            uses.
        progress: called with (done, total, label).
        profile: that communication is priced with, or its file; the one that the plan was made from if not given, where
            it is found.

    Raises:
        InputError: a plan that cannot be read or is not for the model, an unknown check.
    """
    from galvatron_lite.verify.checks import run_checks

    given = check_plan(plan) if isinstance(plan, Plan) else read_plan(Path(plan))
    wanted = checks_named(checks)
    if processes is not None and processes < 2:
        raise InputError("--processes", processes, "At least 2 are needed to split anything.")
    source = find_source(given, model, batch, loss_fn, sequence)
    known = profile if profile is None or isinstance(profile, Profile) else read_profile(Path(profile))
    progress = progress or (lambda *_: None)
    return run_checks(source, given, wanted, processes=processes, progress=progress, profile=known)


def find_source(plan: Plan, model: Any, batch: Any, loss_fn: Any, sequence: int | None) -> ModelSource:
    """Where the model of a plan comes from; see ``verify_plan``.

    Raises:
        InputError: no model is known by the names in the plan.
    """
    from galvatron_lite.verify.source import factory_source, module_source, named_source

    if isinstance(model, str):
        if model.endswith(".py"):
            raise InputError("--model", model, f"Name the function that makes it, too: {model}:FUNCTION.")
        _check_name(model)
        return named_source(model, sequence)
    if callable(getattr(model, "named_modules", None)):
        return module_source(model, batch, loss_fn)
    if callable(model):
        return factory_source(model)
    made_from = plan.provenance
    for name in (plan.model, made_from.profile if made_from is not None else ""):
        if _model_exists(name):
            return named_source(name, sequence)
    remedy = f"The plan is for {plan.model}, which is no model known here: --model NAME or SCRIPT.py:FACTORY."
    raise InputError("--model", None, remedy)


def _model_exists(name: str) -> bool:
    try:
        _check_name(name)
    except InputError:
        return False
    return True


def _check_name(name: str) -> None:
    from galvatron_lite.model.shapes import load_shape
    from galvatron_lite.model.zoo import size_named

    if size_named(name) is None:
        load_shape(name)
