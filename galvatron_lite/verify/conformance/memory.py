"""Memory that dry runs take, against the prediction and the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from galvatron_lite.cluster.budget import DEFAULT_BUDGET, budget_on
from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.cost.step import device_memory
from galvatron_lite.parallelism.pipeline.schedule import stage_at
from galvatron_lite.plans.schema import MemoryBreakdown, Plan, Provenance, Stage
from galvatron_lite.units import format_budget, format_bytes
from galvatron_lite.verify.match.words import first_of, folded
from galvatron_lite.verify.schema import Check, During, RoleRun, Verdict

MEMORY = "memory is as predicted"
BUDGET = "memory fits the budget"
TOLERANCE = 0.05
"""Share of the predicted peak by which the peak, and each category of it, may differ."""
EXPLAINED = 0.25
"""Share of the predicted peak up to which the kernels of a CPU, which dry runs have, may explain a difference."""
PIECE = 2 * 2**20
"""Bytes by which a category may differ however small the peak: the least that PyTorch's allocator takes of a device
(``kSmallBuffer`` of c10/cuda/CUDACachingAllocator). The peak itself has no such margin."""
_CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary", "communication")


def memory_checks(runs: Sequence[RoleRun], plan: Plan, cluster: Cluster | None = None) -> list[Check]:
    """Peaks against the prediction, and against the budget (what the device itself takes, as predicted, included)."""
    if plan.prediction is None:
        text = "The plan has no prediction: evaluate it first."
        return [Check(name, Verdict.SKIPPED, text) for name in (MEMORY, BUDGET)]
    if stack := stack_of(plan):
        text = f"The plan is priced as {stack} runs it, which this run of galvatron's own runtime does not show."
        return [Check(name, Verdict.SKIPPED, text) for name in (MEMORY, BUDGET)]
    predicted = device_memory(plan)
    return [_as_predicted(runs, predicted), _budget(runs, plan, predicted, cluster)]


def stack_of(plan: Plan) -> str:
    """Other software that a plan is priced for; empty: our own runtime."""
    return "" if plan.provenance is None else plan.provenance.stack


def _as_predicted(runs: Sequence[RoleRun], predicted: Sequence[MemoryBreakdown]) -> Check:
    differing = folded(line for run in runs for line in _memory_differs(run, predicted[run.stage]))
    if not differing:
        right = (
            f"Peaks are within {TOLERANCE:.0%} of the predicted ones, no category is off by more than that of a peak"
        )
        return Check(MEMORY, Verdict.PASSED, f"{right} or {format_bytes(PIECE)}.")
    peaks = [(run.peak.tensors, predicted[run.stage].tensors) for run in runs]
    # other kernels may be why they differ
    explained = all(abs(peak - expected) <= EXPLAINED * max(expected, 1) for peak, expected in peaks)
    verdict = Verdict.DIFFERS if explained else Verdict.FAILED
    return Check(MEMORY, verdict, first_of(differing), tuple(differing[1:]))


def _memory_differs(run: RoleRun, predicted: MemoryBreakdown) -> Iterator[str]:
    expected = max(predicted.tensors, 1)
    if abs(run.peak.tensors - expected) > TOLERANCE * expected:
        yield _line(run, "its peak", run.peak.tensors, expected)
    moment = run.peak
    if not predicted.activations:  # as many bytes in all may be taken at two moments: those of the optimizer's compare
        updating = [sample.memory for sample in run.samples if sample.phase is During.OPTIMIZER]
        moment = max(updating, key=lambda memory: memory.total, default=moment)
    for name in _CATEGORIES:
        seen, planned = getattr(moment, name), getattr(predicted, name)
        if abs(seen - planned) > max(TOLERANCE * expected, PIECE):
            yield _line(run, name, seen, planned)


def _line(run: RoleRun, what: str, seen: int, predicted: int) -> str:
    share = f" ({(seen - predicted) / predicted:+.1%})" if predicted else ""
    return (
        f"Rank {run.rank} (stage {run.stage}): {what} {format_bytes(seen)}, predicted {format_bytes(predicted)}{share}."
    )


def _budget(
    runs: Sequence[RoleRun], plan: Plan, predicted: Sequence[MemoryBreakdown], cluster: Cluster | None
) -> Check:
    """A peak above the budget fails, unless the budget is the default one and what it leaves free holds the rest."""
    if plan.provenance is None:
        return Check(BUDGET, Verdict.SKIPPED, "The plan was made for no budget.")
    over, fails, least = list[str](), False, plan.provenance.budget
    for run in runs:
        stage = plan.stages[stage_at(plan.schedule, plan.pipeline, run.stage, 0)]
        budget, own = plan.provenance.budget_of(stage), _with_context(run, predicted)
        if own > budget:
            reserve = _left_free(plan.provenance, stage, cluster)
            over.append(_over(run, own, budget, predicted[run.stage].context, reserve))
            fails |= own > budget + reserve
            least = min(least, budget - (own - budget))
    if not over:
        most = max(runs, key=lambda run: _with_context(run, predicted))
        budget = plan.provenance.budget_of(plan.stages[stage_at(plan.schedule, plan.pipeline, most.stage, 0)])
        taken = f"{format_bytes(_with_context(most, predicted))} of {format_bytes(budget)}"
        return Check(BUDGET, Verdict.PASSED, f"The fullest device, of stage {most.stage}, takes {taken}.")
    lines = folded(over)
    if not fails:
        return Check(BUDGET, Verdict.DIFFERS, first_of(lines), tuple(lines[1:]))
    remedy = f"Plan with less: --mem {format_budget(least)}." if least > 0 else "Plan for more devices."
    return Check(BUDGET, Verdict.FAILED, f"{first_of(lines)} {remedy}", tuple(lines[1:]))


def _over(run: RoleRun, room: int, budget: int, context: int, reserve: int) -> str:
    driver = f", {format_bytes(context)} of the driver included" * (context > 0)
    where = f"Rank {run.rank} (stage {run.stage}): {format_bytes(room)} at the peak{driver}, "
    line = f"{where}{format_bytes(room - budget)} more than the budget of {format_bytes(budget)}"
    within = f", within the {format_bytes(reserve)} that {DEFAULT_BUDGET} of the device leaves free"
    return f"{line}{within if 0 < room - budget <= reserve else ''}."


def _left_free(made_from: Provenance, stage: Stage, cluster: Cluster | None) -> int:
    """Bytes that the default budget leaves free on a stage's devices; 0 for a budget that somebody gave."""
    if cluster is None:
        return 0
    budget, usual = made_from.budget_of(stage), budget_on(cluster, DEFAULT_BUDGET)
    capacities = [group.device.memory for group in cluster.groups if stage.device in ("", group.device.name)]
    return min(capacities, default=budget) - budget if budget == usual.of(stage.device) else 0


def _with_context(run: RoleRun, predicted: Sequence[MemoryBreakdown]) -> int:
    return run.peak.tensors + predicted[run.stage].context
