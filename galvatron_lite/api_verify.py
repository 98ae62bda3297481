"""``verify_plan``: whether a plan does on this machine what it says, without its cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galvatron_lite.errors import InputError
from galvatron_lite.verify.asked import Checks, checks_named

if TYPE_CHECKING:
    from torch import nn

    from galvatron_lite.plans.schema import Plan
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.verify.schema import Verification
    from galvatron_lite.verify.source import ModelSource

    Progress = Callable[[int, int, str], None]


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
    journal: Path | None = None,
    identity: str = "",
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
        journal: file that keeps what is done until all is, so that a run that was interrupted can go on from there.
        identity: tells one model from others of its name, for the journal.
        profile: that communication is priced with, or its file; the one that the plan was made from if not given, where
            it is found.

    Raises:
        InputError: a plan that cannot be read or is not for the model, an unknown check.
    """
    from galvatron_lite.plans.io import check_plan, read_plan
    from galvatron_lite.plans.schema import Plan
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.profiler.store import read_profile
    from galvatron_lite.verify.run import run_checks

    given = check_plan(plan) if isinstance(plan, Plan) else read_plan(Path(plan))
    wanted = checks_named(checks)
    if processes is not None and processes < 2:
        raise InputError("--processes", processes, "At least 2 are needed to split anything.")
    source = find_source(given, model, batch, loss_fn, sequence)
    known = profile if profile is None or isinstance(profile, Profile) else read_profile(Path(profile))
    return run_checks(
        source, given, wanted, processes=processes, progress=progress or (lambda *_: None), journal=journal,
        identity=identity, profile=known,
    )  # fmt: skip


def find_source(plan: Plan, model: Any, batch: Any, loss_fn: Any, sequence: int | None) -> ModelSource:
    """Where the model of a plan comes from; see ``verify_plan``.

    Raises:
        InputError: no model is known by the names in the plan.
    """
    from galvatron_lite.verify.source import given_source, module_source, named_source

    if isinstance(model, str):
        if model.endswith(".py"):
            raise InputError("--model", model, f"Name the function that makes it, too: {model}:FUNCTION.")
        _check_name(model)
        return named_source(model, sequence)
    if callable(getattr(model, "named_modules", None)):
        return module_source(model, batch, loss_fn)
    if callable(model):
        return given_source(model)
    made_from = plan.provenance
    for name in (plan.model, made_from.profile if made_from is not None else ""):
        if _is_known(name):
            return named_source(name, sequence)
    remedy = f"The plan is for {plan.model}, which is no model known here: --model NAME or SCRIPT.py:FACTORY."
    raise InputError("--model", None, remedy)


def _is_known(name: str) -> bool:
    try:
        _check_name(name)
    except InputError:
        return False
    return True


def _check_name(name: str) -> None:
    """Raise InputError where there is no model of a name."""
    from galvatron_lite.model.shapes import load_shape
    from galvatron_lite.model.zoo import size_named

    if size_named(name) is None:
        load_shape(name)
