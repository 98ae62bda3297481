"""Functions on plans that exist: ``explain``, ``compare`` and ``verify_plan``, and what a plan was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from galvatron_lite.api_profile import profile_if_here, profile_of
from galvatron_lite.cluster.budget import Budget
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.files import read_data
from galvatron_lite.model.trainable import Trainable
from galvatron_lite.peers.plan_files import any_plan, check_devices, priced
from galvatron_lite.plans.io import check_plan, plan_in, read_plan, refuse_phases
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import profile_hash, read_profile
from galvatron_lite.request import PlanArguments, PlanRequest, Progress, texts
from galvatron_lite.verify.schema import Checks, checks_named

if TYPE_CHECKING:
    from torch import nn

    from galvatron_lite.analysis.explanation import Comparison, Explanation
    from galvatron_lite.analysis.setting import PlanSetting
    from galvatron_lite.verify.schema import Verification
    from galvatron_lite.verify.source import ModelSource

PlanSource = Plan | str | Path


class _PlanData:
    """A plan, or what its file holds, which is read once."""

    def __init__(self, source: PlanSource) -> None:
        self.path = Path() if isinstance(source, Plan) else Path(source)
        self.data = None if isinstance(source, Plan) else read_data(self.path)
        self.plan = source if isinstance(source, Plan) else None  # None where it is not of ours
        if self.plan is None:
            refuse_phases(self.data, self.path)
            with suppress(GalvatronError):  # written by hand, or of another planner, which name no profile
                self.plan = plan_in(self.data, self.path)

    def of(self, profile: Profile, batch: int | None = None) -> Plan:
        """The plan, its layers held against a profile's."""
        if self.data is None and self.plan is not None:
            return self.plan
        return any_plan(self.data, self.path, profile, batch)


def _profile_for(plans: Iterable[_PlanData], request: PlanRequest, stack: str = "") -> Profile:
    """The profile of a request, else that of the first plan that says what it was made from."""
    if request.profile is not None or request.estimated:
        return request.profile_on(request.gpus, stack)
    return profile_of(next((plan.plan for plan in plans if plan.plan is not None and plan.plan.provenance), None))


def read_with_profile(
    plan: PlanSource, request: PlanRequest, stack: str = "", *, last: bool = False
) -> tuple[Plan, Profile]:
    """A plan, and what it is priced with.

    Args:
        plan: or its file.
        request: whose profile or model; without either, what the plan says.
        stack: training software whose costs are estimated.
        last: whether a plan that names no profile is priced with the last one that was made here.

    Raises:
        InputError: a file that cannot be used, one of phases, no profile, or a plan for other devices.
    """
    read = _PlanData(plan)
    if last and (read.plan is None or read.plan.provenance is None):
        known = request.profile_on(request.gpus, stack)
    else:
        known = _profile_for([read], request, stack)
    found = read.of(known, request.batch)
    check_devices(found, known, request.gpus)
    return found, known


def read_priced(path: Path, request: PlanRequest, mem: str | int | None = None) -> tuple[Plan, Profile | None]:
    """A plan from its file with its prediction, and what that was made with; None where it is not here.

    With neither a profile nor a model the plan stays as its file says it; with one it is priced anew, unless that is
    the profile that it was made from.
    """
    if request.profile is None and not request.estimated:
        plan = read_plan(path)
        return plan, profile_if_here(plan)
    read, known = _PlanData(path), request.profile_on(request.gpus)
    made_from = None if read.plan is None else read.plan.provenance
    same = made_from is not None and made_from.profile_hash == profile_hash(known)
    if read.plan is not None and same and mem is request.batch is None:
        return read.plan, known
    return priced(read.of(known, request.batch), known, mem, request.batch), known


def _names(plans: Sequence[PlanSource]) -> list[str]:
    """Of each its file without what all have in common, or its place; all unlike."""
    names = [f"plan {place}" if isinstance(plan, Plan) else Path(plan).stem for place, plan in enumerate(plans, 1)]
    if len(set(names)) == len(names):
        return names
    full = [name if isinstance(plan, Plan) else str(plan) for name, plan in zip(names, plans, strict=True)]
    return full if len(set(full)) == len(full) else [f"{name} ({place})" for place, name in enumerate(full, 1)]


SECONDS = 120.0
"""For planning anew, where nobody says."""


def explain(
    plan: PlanSource,
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
        setup: see ``plan``: what the plan was requested with, where that was more than a budget and a batch. ``mem`` is
            the plan's own budget if not given.

    Raises:
        InputError: a file, layer or number that cannot be used; no profile that the plan was made from.
    """
    from galvatron_lite.analysis.explain import explain_plan

    setting, done, progress = _question_of(plan, profile, setup)
    return explain_plan(setting, done, what_if=what_if, seconds=seconds, progress=progress)


def _question_of(
    plan: PlanSource, profile: Profile | str | Path | None, setup: PlanArguments
) -> tuple[PlanSetting, Plan, Progress | None]:
    """What a plan is the answer to, the plan with its prediction, and who is told of progress; see ``explain``."""
    from galvatron_lite.search.space import Delay

    request = PlanRequest.parse(profile, setup, ("what_if", "seconds"))
    found, known = read_with_profile(plan, request)
    made_from, budget = found.provenance, None
    if made_from is not None and made_from.budget and setup.get("mem") is None:
        budget = Budget(made_from.budget, tuple(made_from.budgets.items()))
    mem = request.mem if budget is None else budget.least
    request = replace(request.on(known), mode=found.mode, mem=mem)
    if "backend" not in setup and "target" not in setup:
        request = replace(request, backend=found.backend.value)
    if "margin" not in setup and made_from is not None:
        request = replace(request, margin=made_from.margin)
    setting = request.setting
    if budget is not None:
        setting = replace(setting, budget=budget, memory=None)
    if found.cyclic is not None and setting.delay is None:
        setting = replace(setting, delay=Delay())
    return setting, priced(found, known, mem, request.batch), request.progress


def compare(
    plans: Sequence[PlanSource] | Mapping[str, PlanSource],
    profile: Profile | str | Path | None = None,
    **setup: Unpack[PlanArguments],
) -> Comparison:
    """Plans of one model side by side, all priced with the same profile.

    Args:
        plans: two or more, or files; named by their files, by their place, or by the keys of a mapping.
        profile: what all are priced with; with neither a profile nor a model, what the first of them that names one was
            made from, as far as that is here.
        setup: ``model``, ``cluster``, ``gpus``, ``sequence``, ``precision``, ``trainable``, ``freeze`` and ``mem`` as
            for ``plan``.

    Raises:
        InputError: fewer than two plans, one that is not of the profile's model, a file that cannot be used.
    """
    from galvatron_lite.analysis.compare import compare_plans

    named = dict(plans) if isinstance(plans, Mapping) else dict(zip(_names(plans), plans, strict=True))
    if len(named) < 2:
        raise InputError("plans", len(named), "Give two or more to compare.")
    request = PlanRequest.parse(profile, setup)
    read = {name: _PlanData(plan) for name, plan in named.items()}
    known = _profile_for(read.values(), request)
    found = {name: one.of(known, request.batch) for name, one in read.items()}
    for plan in found.values():
        check_devices(plan, known)
    return compare_plans(found, known, None if setup.get("mem") is None else request.mem)


def verify_plan(
    plan: PlanSource,
    model: nn.Module | Callable[[], Any] | str | None = None,
    batch: Any = None,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    sequence: int | None = None,
    trainable: str | None = None,
    freeze: str | Sequence[str] = (),
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
        trainable: for a model by name: which parameters train, as for ``plan``; as the plan says if neither this nor
            ``freeze`` is given.
        freeze: the same: names of what gets no gradient.
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

    found = check_plan(plan) if isinstance(plan, Plan) else read_plan(Path(plan))
    wanted = checks_named(checks)
    if processes is not None and processes < 2:
        raise InputError("--processes", processes, "At least 2 are needed to split anything.")
    trains = Trainable.parse(trainable, texts("freeze", freeze))
    source = _find_source(found, model, batch, loss_fn, sequence, trains)
    known = profile if profile is None or isinstance(profile, Profile) else read_profile(Path(profile))
    progress = progress or (lambda *_: None)
    return run_checks(source, found, wanted, processes=processes, progress=progress, profile=known)


def _find_source(
    plan: Plan, model: Any, batch: Any, loss_fn: Any, sequence: int | None, trainable: Trainable | None
) -> ModelSource:
    """Where the model of a plan comes from; see ``verify_plan``."""
    from galvatron_lite.capture.adapters import make_trainable
    from galvatron_lite.capture.named import check_function_named
    from galvatron_lite.verify.source import build_named, factory_source, module_source, named_source

    if isinstance(model, str):
        check_function_named("--model", model)
        _check_name(model)
    elif model is not None and trainable is not None:
        raise InputError("--trainable", None, "A model that is built already trains as it is: freeze it there.")
    elif callable(getattr(model, "named_modules", None)):
        return module_source(model, batch, loss_fn)
    elif callable(model):
        return factory_source(model)
    else:
        made_from = plan.provenance
        names = (plan.model, made_from.profile if made_from is not None else "")
        model = next((name for name in names if _model_exists(name)), None)
    if model is None:
        remedy = f"The plan is for {plan.model}, which is no model known here: --model NAME or SCRIPT.py:FACTORY."
        raise InputError("--model", None, remedy)
    if trainable is None and plan.provenance is not None and plan.provenance.trains:
        how, *frozen = plan.provenance.trains
        trainable = Trainable.parse(how, frozen)
    if trainable is None:
        return named_source(model, sequence)
    return factory_source(lambda: make_trainable(build_named(model, sequence), trainable), model)


def _model_exists(name: str) -> bool:
    with suppress(InputError):
        _check_name(name)
        return True
    return False


def _check_name(name: str) -> None:
    from galvatron_lite.model.shapes import load_shape
    from galvatron_lite.model.zoo import size_named

    if size_named(name) is None:
        load_shape(name)
