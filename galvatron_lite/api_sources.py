"""Plans that somebody gives, with the profile that they are priced with: the one given, or the one that a plan says it
was made from. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from galvatron_lite.api_profile import PROFILES, find_profile
from galvatron_lite.cluster.budget import Budget
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.files import read_data
from galvatron_lite.peers.plan_files import check_devices, read_any_plan
from galvatron_lite.plans.io import read_plan
from galvatron_lite.plans.phases import is_phased
from galvatron_lite.plans.schema import Plan, Provenance
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import profile_hash, read_profile

if TYPE_CHECKING:
    from galvatron_lite.api import Setup

_SEQUENCES = (None, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens a sample that are tried where a plan's model by name was planned at a length of its own."""


def profile_of(plan: Plan | None) -> Profile:
    """The profile that a plan says it was made from: the last one made here, one in ``profiles/``, or the estimate of
    its model by name on its cluster by name; taken only where its digest is the plan's.

    Raises:
        InputError: the plan names none, or none that is here is the one.
    """
    made_from = None if plan is None else plan.provenance
    if plan is None or made_from is None:
        remedy = "The plan names no profile: give --profile FILE, or --model and --cluster."
        raise InputError("--profile", None, remedy)
    for known in (_last(), *_kept(made_from), *_estimates(plan, made_from)):
        if known is not None and profile_hash(known) == made_from.profile_hash:
            return known
    remedy = (
        f"The plan was made from {made_from.profile} ({made_from.profile_origin}), which is not here as it was then: "
        "give --profile FILE, or --model and --cluster."
    )
    raise InputError("--profile", None, remedy)


def _last() -> Profile | None:
    try:
        return find_profile()
    except GalvatronError:
        return None


def _kept(made_from: Provenance) -> Iterator[Profile]:
    """Profiles whose files are named like the one it was made from, in the folder of profiles."""
    for path in sorted(PROFILES.glob(f"*/{Path(made_from.profile).name}*.yaml")):
        try:
            yield read_profile(path)
        except GalvatronError:
            continue


def _estimates(plan: Plan, made_from: Provenance) -> Iterator[Profile]:
    """Estimates of the model by name, at the usual lengths of samples."""
    if not made_from.profile_origin.startswith("estimated"):
        return
    for sequence in _SEQUENCES:
        try:
            yield find_profile(
                model=plan.model, cluster=made_from.cluster, gpus=plan.devices, sequence=sequence,
                precision=plan.precision,
            )  # fmt: skip
        except GalvatronError:
            return


def budget_of(plan: Plan) -> Budget | None:
    """The budget that a plan says it was made within; None where it says none."""
    made_from = plan.provenance
    if made_from is None or not made_from.budget:
        return None
    return Budget(made_from.budget, tuple(made_from.budgets.items()))


Given = Plan | str | Path


def given_plan(plan: Given, profile: Profile | str | Path | None, setup: Setup) -> tuple[Plan, Profile]:
    """A plan, and what it is priced with.

    Args:
        plan: or its file.
        profile: or its file; None: see ``setup``, else what the plan says.
        setup: ``model``, ``cluster``, ``gpus``, ``sequence`` and ``precision`` of ``plan``.

    Raises:
        InputError: a file that cannot be used, one of phases, no profile, or a plan for other devices.
    """
    known = _known([plan], profile, setup)
    given = plan if isinstance(plan, Plan) else _read(Path(plan), known, setup.get("batch"))
    check_devices(given, known, setup.get("gpus"))
    return given, known


def given_plans(
    plans: Sequence[Given] | Mapping[str, Given], profile: Profile | str | Path | None, setup: Setup
) -> tuple[dict[str, Plan], Profile]:
    """Plans by name, and what all of them are priced with; see ``given_plan``.

    Raises:
        InputError: fewer than two, and as ``given_plan``.
    """
    named = dict(plans) if isinstance(plans, Mapping) else dict(zip(_names(plans), plans, strict=True))
    if len(named) < 2:
        raise InputError("plans", len(named), "Give two or more to compare.")
    known = _known(list(named.values()), profile, setup)
    given = {
        name: plan if isinstance(plan, Plan) else _read(Path(plan), known, setup.get("batch"))
        for name, plan in named.items()
    }
    for plan in given.values():
        check_devices(plan, known)
    return given, known


def _names(plans: Sequence[Given]) -> list[str]:
    """Of each its file without what all have in common, or its place; all unlike."""
    names = [f"plan {place}" if isinstance(plan, Plan) else Path(plan).stem for place, plan in enumerate(plans, 1)]
    if len(set(names)) == len(names):
        return names
    whole = [name if isinstance(plan, Plan) else str(plan) for name, plan in zip(names, plans, strict=True)]
    return whole if len(set(whole)) == len(whole) else [f"{name} ({place})" for place, name in enumerate(whole, 1)]


def _known(plans: Sequence[Given], profile: Profile | str | Path | None, setup: Setup) -> Profile:
    """The profile that is given, else that of the first plan that says what it was made from."""
    if profile is not None or setup.get("model") is not None:
        return find_profile(
            profile, model=setup.get("model"), cluster=setup.get("cluster"), gpus=setup.get("gpus"),
            sequence=setup.get("sequence"), precision=setup.get("precision"),
        )  # fmt: skip
    made = [plan if isinstance(plan, Plan) else _planned(Path(plan)) for plan in plans]
    return profile_of(next((plan for plan in made if plan is not None and plan.provenance), None))


def _planned(path: Path) -> Plan | None:
    """A plan of ours from a file; None where it is written by hand or of others, which name no profile."""
    _refuse_phases(path)
    with suppress(GalvatronError):
        return read_plan(path)
    return None


def _read(path: Path, known: Profile, batch: int | None) -> Plan:
    _refuse_phases(path)
    return read_any_plan(path, known, batch)


def _refuse_phases(path: Path) -> None:
    if is_phased(read_data(path)):
        remedy = (
            "It holds the plans of several phases: explain one at a time, planned with the phase's batch and --seq."
        )
        raise InputError("plan", str(path), remedy)
