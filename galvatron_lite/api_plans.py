"""Functions of the public API on existing plans: ``explain``, ``compare`` and ``verify_plan``."""

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
from galvatron_lite.peers.plan_files import any_plan, check_devices, needs_notes, priced
from galvatron_lite.plans.io import check_plan, plan_in, read_plan, refuse_phases
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import PlanNeeds, Profile
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
    """A plan, or the content of its file."""

    def __init__(self, source: PlanSource) -> None:
        self.path = Path() if isinstance(source, Plan) else Path(source)
        self.data = None if isinstance(source, Plan) else read_data(self.path)
        self.plan = source if isinstance(source, Plan) else None  # None if it is written by hand or of other software
        if self.plan is None:
            refuse_phases(self.data, self.path)
            with suppress(GalvatronError):
                self.plan = plan_in(self.data, self.path)

    def with_layers_of(self, profile: Profile, batch: int | None = None) -> Plan:
        """The plan; one from a file is checked against the layers of a profile."""
        if self.data is None and self.plan is not None:
            return self.plan
        return any_plan(self.data, self.path, profile, batch)


def _profile_for(plans: Iterable[_PlanData], request: PlanRequest, stack: str = "") -> Profile:
    """The profile of a request, or that of the first plan that names one."""
    if request.profile is not None or request.estimated:
        return request.profile_on(request.gpus, stack)
    return profile_of(next((data.plan for data in plans if data.plan is not None and data.plan.provenance), None))


def read_with_profile(
    plan: PlanSource, request: PlanRequest, stack: str = "", *, last: bool = False
) -> tuple[Plan, Profile]:
    """Find the profile for a plan, and check the plan against it.

    Args:
        plan: a plan, or its file.
        request: for its profile or model; without either, the profile that the plan names is used.
        stack: training software whose costs are estimated.
        last: for a plan that names no profile, use the last one made in this folder.

    Raises:
        InputError: a file that cannot be used, or of phases; no profile; or a plan for other devices.
    """
    data = _PlanData(plan)
    if last and (data.plan is None or data.plan.provenance is None):
        profile = request.profile_on(request.gpus, stack)
    else:
        profile = _profile_for([data], request, stack)
    loaded = data.with_layers_of(profile, request.batch)
    check_devices(loaded, profile, request.gpus)
    return loaded, profile


def read_priced(path: Path, request: PlanRequest, mem: str | int | None = None) -> tuple[Plan, Profile | None]:
    """Read a plan with its prediction, and find its profile (None if it is not here).

    With neither a profile nor a model the plan stays as it is in its file. With one it is priced again, unless that is
    the profile that it was made from.
    """
    if request.profile is None and not request.estimated:
        plan = read_plan(path)
        return plan, profile_if_here(plan)
    data, profile = _PlanData(path), request.profile_on(request.gpus)
    source = None if data.plan is None else data.plan.provenance
    same = source is not None and source.profile_hash == profile_hash(profile)
    if data.plan is not None and same and mem is request.batch is None:
        return data.plan, profile
    return priced(data.with_layers_of(profile, request.batch), profile, mem, request.batch), profile


def _names(plans: Sequence[PlanSource]) -> list[str]:
    """Distinct names: the stems of files, their paths if stems repeat, or numbers."""
    names = [f"plan {number}" if isinstance(plan, Plan) else Path(plan).stem for number, plan in enumerate(plans, 1)]
    if len(set(names)) == len(names):
        return names
    paths = [name if isinstance(plan, Plan) else str(plan) for name, plan in zip(names, plans, strict=True)]
    return paths if len(set(paths)) == len(paths) else [f"{name} ({number})" for number, name in enumerate(paths, 1)]


SECONDS = 120.0  # default time limit of the searches of an explanation


def explain(
    plan: PlanSource,
    profile: Profile | str | Path | None = None,
    *,
    what_if: bool = True,
    seconds: float | None = SECONDS,
    **setup: Unpack[PlanArguments],
) -> Explanation:
    """Explain a plan: where its time goes, what each choice gains, what limits it, and what would change it.

    Args:
        plan: a plan, or a file: ours, one written by hand, or Hetu-Galvatron's.
        profile: with neither a profile nor a model, the profile that the plan was made from, if it is here.
        what_if: search again for the price of memory, runners-up and what-ifs.
        seconds: time limit of these searches; what is left over is listed. None: no limit.
        setup: see ``plan``: the arguments that the plan was searched with, besides budget and batch. ``mem`` is by
            default the plan's budget.

    Raises:
        InputError: a file, layer or number that cannot be used; or the plan's profile was not found.
    """
    from galvatron_lite.analysis.explain import explain_plan

    request = PlanRequest.parse(profile, setup, ("what_if", "seconds"))
    loaded, used_profile = read_with_profile(plan, request)
    searched = replace(used_profile, needs=PlanNeeds()) if needs_notes(loaded, used_profile) else used_profile
    setting, mem = _setting_of(loaded, request.on(searched), setup)
    with_prediction = priced(loaded, used_profile, mem, request.batch)
    return explain_plan(setting, with_prediction, what_if=what_if, seconds=seconds, progress=request.progress)


def _setting_of(plan: Plan, request: PlanRequest, setup: PlanArguments) -> tuple[PlanSetting, str | int]:
    """The setting that a plan was searched in, as far as it is known, and its budget; see ``explain``."""
    from galvatron_lite.search.space import Delay

    source, budget = plan.provenance, None
    if source is not None and source.budget and setup.get("mem") is None:
        budget = Budget(source.budget, tuple(source.budgets.items()))
    mem = request.mem if budget is None else budget.least
    request = replace(request, mode=plan.mode, mem=mem)
    if "backend" not in setup and "target" not in setup:
        request = replace(request, backend=plan.backend.value)
    if "margin" not in setup and source is not None:
        request = replace(request, margin=source.margin)
    setting = request.resolved
    setting = replace(setting, needs=PlanNeeds())  # their notes are those of searched plans
    if budget is not None:
        setting = replace(setting, budget=budget, memory=None)
    if plan.cyclic is not None and setting.delay is None:
        setting = replace(setting, delay=Delay())
    return setting, mem


def compare(
    plans: Sequence[PlanSource] | Mapping[str, PlanSource],
    profile: Profile | str | Path | None = None,
    **setup: Unpack[PlanArguments],
) -> Comparison:
    """Compare plans of one model, all priced with the same profile.

    Args:
        plans: two or more plans or files; named by their files, their numbers, or the keys of a mapping.
        profile: with neither a profile nor a model, the profile of the first plan that names one, if it is here.
        setup: ``model``, ``cluster``, ``gpus``, ``sequence``, ``precision``, ``trainable``, ``freeze`` and ``mem`` as
            for ``plan``.

    Raises:
        InputError: fewer than two plans, a plan that is not of the profile's model, or a file that cannot be used.
    """
    from galvatron_lite.analysis.compare import compare_plans

    named = dict(plans) if isinstance(plans, Mapping) else dict(zip(_names(plans), plans, strict=True))
    if len(named) < 2:
        raise InputError("plans", len(named), "Give two or more to compare.")
    request = PlanRequest.parse(profile, setup)
    data = {name: _PlanData(plan) for name, plan in named.items()}
    used_profile = _profile_for(data.values(), request)
    loaded = {name: plan.with_layers_of(used_profile, request.batch) for name, plan in data.items()}
    for plan in loaded.values():
        check_devices(plan, used_profile)
    return compare_plans(loaded, used_profile, None if setup.get("mem") is None else request.mem)


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
    """Verify that a plan does what it says; no GPU and no cluster are needed.

    Args:
        plan: a plan, or its file.
        model: the plan's model: a module, a function that returns the model, (model, batch) or (model, batch, loss_fn),
            or a name (``gpt-tiny``, ``llama3-70b``); by default the model that the plan names.
        batch: an example batch, for a module.
        loss_fn: ``loss_fn(output, batch)``, for a module whose output does not hold its loss.
        sequence: tokens a sample, for a model by name.
        trainable: what trains in a model by name, as for ``plan``; without this and ``freeze``, as the plan says.
        freeze: names of layers without gradients, for a model by name.
        checks: ``dry``: one rank of each role runs a step without data; its messages are matched with those of all
            ranks, and its memory is compared with the prediction. ``numbers``: a small model is trained under a small
            plan of the same kind on processes of this machine, and compared with one process.
        processes: largest number of processes for ``numbers``; by default 4, or 8 if the plan's features need them.
        progress: called with (done, total, label).
        profile: profile for the price of communication, or its file; by default the one that the plan was made from,
            if it is found.

    Raises:
        InputError: a plan that cannot be read or is not for the model, or an unknown check.
    """
    from galvatron_lite.verify.checks import run_checks

    loaded = check_plan(plan) if isinstance(plan, Plan) else read_plan(Path(plan))
    chosen = checks_named(checks)
    if processes is not None and processes < 2:
        raise InputError("--processes", processes, "At least 2 are needed to split anything.")
    trains = Trainable.parse(trainable, texts("freeze", freeze))
    source = _find_source(loaded, model, batch, loss_fn, sequence, trains)
    profile = profile if profile is None or isinstance(profile, Profile) else read_profile(Path(profile))
    progress = progress or (lambda *_: None)
    return run_checks(source, loaded, chosen, processes=processes, progress=progress, profile=profile)


def _find_source(
    plan: Plan, model: Any, batch: Any, loss_fn: Any, sequence: int | None, trainable: Trainable | None
) -> ModelSource:
    """The source of a plan's model; see ``verify_plan``."""
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
        names = (plan.model, plan.provenance.profile if plan.provenance is not None else "")
        model = next((name for name in names if _model_exists(name)), None)
    if model is None:
        remedy = f"The plan is for {plan.model}, which is no model known here: --model NAME or SCRIPT.py:FACTORY."
        raise InputError("--model", None, remedy)
    if trainable is None and plan.provenance is not None and plan.provenance.trains:
        trains, *frozen = plan.provenance.trains
        trainable = Trainable.parse(trains, frozen)
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
