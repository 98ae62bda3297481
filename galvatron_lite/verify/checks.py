"""Run the checks of a plan: those on a dry run of one rank of each role, and the one on numbers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from galvatron_lite.api_profile import profile_if_here
from galvatron_lite.capture.shared import items_of
from galvatron_lite.capture.trace import trace
from galvatron_lite.model.discover import watch_model
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.peers.plan_files import needs_notes
from galvatron_lite.plans.describe import other_size
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.verify.conformance.groups import gradients_summed, groups_fit
from galvatron_lite.verify.conformance.layers import PlannedLayers, layer_checks
from galvatron_lite.verify.conformance.memory import stack_of
from galvatron_lite.verify.conformance.volume import VOLUME, volume
from galvatron_lite.verify.dry.mode import DryRunError
from galvatron_lite.verify.dry.roles import Progress, named_for, run_roles
from galvatron_lite.verify.dry.step import subject_of
from galvatron_lite.verify.match.meeting import match
from galvatron_lite.verify.numbers.check import NAME as NUMBERS
from galvatron_lite.verify.numbers.check import check_numbers, training_fork
from galvatron_lite.verify.schema import Check, Checks, RoleRun, Verdict, Verification, not_run
from galvatron_lite.verify.source import ModelSource, example_of

NAME = "dry run"
SIZE = "the model is the plan's"  # listed only if it is not
NEEDS = "trains like one process"  # listed only if the profile says that it does not


def check_dry(
    source: ModelSource, plan: Plan, progress: Progress, profile: Profile | None = None
) -> tuple[list[Check], list[RoleRun]]:
    """Run a step of one rank of each role without data, and check its messages, splits and memory against the plan.

    Args:
        source: of the model that the plan is for.
        plan: of any size.
        progress: called with (done, total, label).
        profile: prices communication; by default the one that the plan was made from, if it is found.
    """
    reason = "Branches on devices of their own are run with data alone." if plan.branches else not_run(plan)
    if reason:
        return [Check(NAME, Verdict.SKIPPED, reason)], []
    parts = source.on_meta()
    model, batch, loss_fn = parts[0], example_of(parts), parts[2]
    watched = watch_model(model, batch)
    layers = watched.layers
    plan_of_model = named_for(plan, layers, items_of(model.parameters()))
    subject = subject_of(model, plan_of_model, batch, loss_fn=loss_fn, layers=layers)
    graph = trace(model, batch, loss_fn=loss_fn, watched=watched)
    try:
        runs = run_roles(subject, plan_of_model, progress, chained=not graph.tensors)
    except DryRunError as error:
        return [Check(NAME, Verdict.SKIPPED, f"The model cannot be run without data. {error}")], []
    progress(len(runs), len(runs), "messages")
    return dry_run_checks(runs, plan_of_model, graph, profile or profile_if_here(plan)), runs


def dry_run_checks(runs: list[RoleRun], plan: Plan, graph: ModelGraph, profile: Profile | None) -> list[Check]:
    """Return all checks of dry runs of a plan; ``profile`` prices communication."""
    seconds = sum(run.seconds for run in runs)
    summary = (
        f"{len(runs)} of {plan.devices} ranks did a whole step without data, in {seconds:.0f} s of processor time."
    )
    cluster = None if profile is None else profile.cluster
    planned = PlannedLayers(plan, graph)
    broken: Sequence[str] = ()
    if profile is not None and len(profile.graph.layers) == len(graph.layers):
        broken = needs_notes(plan, profile)
    return [
        Check(NAME, Verdict.PASSED, summary),
        *(Check(SIZE, Verdict.DIFFERS, line) for line in other_size(plan, graph.parameters)),
        *(Check(NEEDS, Verdict.DIFFERS, f"{line}.") for line in broken),
        *match(runs, plan),
        *layer_checks(runs, planned, cluster),
        gradients_summed(runs, planned),
        groups_fit(runs, planned),
        _check_volume(runs, plan, profile),
    ]


def _check_volume(runs: list[RoleRun], plan: Plan, profile: Profile | None) -> Check:
    """Check communication against its prices; skip the check if no profile has prices for the model."""
    planned = sum(run.count for stage in plan.stages for run in stage.runs)
    if stack := stack_of(plan):
        reason = f"The plan is priced as {stack} sends, not as galvatron's own runtime."
    elif profile is None:
        reason = "The profile that the plan was made from is not found: --profile FILE."
    elif planned != len(profile.graph.layers):
        reason = (
            f"The profile is of {len(profile.graph.layers)} layers, the plan of {planned}: give that of this model."
        )
    elif profile.graph.precision == "fp64":
        reason = "Prices are of parameters and gradients in fp32; this model is in fp64."
    elif any(tensor.borrowed for tensor in profile.graph.tensors):
        reason = "What layers read of others besides their input (an encoder's output, biases) is sent unlike priced."
    else:
        return volume(runs, plan, profile)
    return Check(VOLUME, Verdict.SKIPPED, reason)


def launch_checks(source: ModelSource, plan: Plan) -> list[Check]:
    """Return the checks of a plan that run at launch."""
    return check_dry(source, plan, lambda *_: None)[0]


def run_checks(
    source: ModelSource,
    plan: Plan,
    checks: Sequence[Checks],
    *,
    processes: int | None = None,
    progress: Progress = lambda *_: None,
    profile: Profile | None = None,
) -> Verification:
    """Return the verdicts on a plan; for the arguments see ``api_plans.verify_plan`` and ``check_dry``."""
    results: list[Check] = []
    roles: list[RoleRun] = []
    with ExitStack() as stack:
        # fork first: once this process has run a backward pass it must not fork
        training = stack.enter_context(training_fork(source)) if Checks.NUMBERS in checks else None
        if Checks.DRY in checks:
            results, roles = check_dry(source, plan, progress, profile)
        if training is not None:
            progress(len(roles), len(roles) + 1, "numbers")
            reason = not_run(plan)
            skipped = Check(NUMBERS, Verdict.SKIPPED, reason)
            results = [*results, skipped if reason else check_numbers(source, plan, training, processes)]
    return Verification(tuple(results), tuple(roles))
