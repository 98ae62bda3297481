"""Prices plans that somebody gives: ours, written by hand, or of another planner. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from galvatron_lite.cluster.budget import budget_on
from galvatron_lite.cost.step import evaluate
from galvatron_lite.files import read_data
from galvatron_lite.plans.schema import Plan, Proof, Provenance
from galvatron_lite.plans.written import plan_from
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import profile_hash


def read_any_plan(path: Path, profile: Profile, batch: int | None = None) -> Plan:
    """A plan from a file: ours, one written by hand (``plans.written``), or Hetu-Galvatron's.

    Args:
        path: YAML or JSON.
        profile: of the model.
        batch: samples a step, for files of another planner that do not say.

    Raises:
        InputError: a file, key, layer or number that cannot be used.
    """
    data = read_data(path)
    if isinstance(data, Mapping) and ("tp_sizes_enc" in data or "global_tp_deg" in data):
        from galvatron_lite.peers.hetu.plan import to_plan
        from galvatron_lite.peers.hetu.strategy import read_hetu_plan

        return to_plan(read_hetu_plan(data, str(path), profile.cluster.devices, batch or 0), profile)
    return plan_from(data, profile.graph, str(path))


def priced(plan: Plan, profile: Profile, mem: str | int | None = None) -> Plan:
    """The plan with its prediction, and what it was priced with.

    Args:
        plan: for the profile's model and at most its devices.
        profile: what layers and communication cost.
        mem: budget a device to compare its memory with: a size, a share, or bytes; all of its memory if not given.

    Raises:
        InputError: the plan does not fit the profile's model, or its numbers do not divide.
    """
    from galvatron_lite import __version__

    budget = budget_on(profile.cluster, "100%" if mem is None else mem)
    made_from = Provenance(
        galvatron=__version__,
        profile=profile.name,
        profile_hash=profile_hash(profile),
        profile_origin=f"{profile.origin.kind.value}: {profile.origin.source}",
        cluster=profile.cluster.name,
        fingerprint=dict(profile.cluster.fingerprint),
        budget=budget.least,
        proof=Proof.GIVEN,
        budgets=dict(budget.own),
    )
    return replace(evaluate(profile, plan), provenance=made_from, alternatives=(), left_out=())


def over_budget(plan: Plan) -> tuple[int, ...]:
    """Numbers of the stages of a priced plan that need more than the budget it was priced with."""
    made_from = plan.provenance
    if made_from is None:
        return ()
    return tuple(number for number, stage in enumerate(plan.stages) if stage.memory.total > made_from.budget_of(stage))
