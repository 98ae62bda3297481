"""Check the memory of dry runs against the prediction and the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

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
"""Share of the predicted peak by which the peak, and each category at the peak, may differ."""
EXPLAINED = 0.25
"""Share of the predicted peak up to which a difference may come from the CPU's kernels, which dry runs use."""
PIECE = 2 * 2**20
"""Bytes by which a category may differ however small the peak is: the smallest block that PyTorch's allocator requests
from a device (``kSmallBuffer`` of c10/cuda/CUDACachingAllocator). The peak itself has no such margin."""
_CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary", "communication")


def memory_checks(runs: Sequence[RoleRun], plan: Plan, cluster: Cluster | None = None) -> list[Check]:
    """Check peaks against the prediction, and against the budget with the predicted memory of the driver added."""
    if plan.prediction is None:
        text = "The plan has no prediction: evaluate it first."
        return [Check(name, Verdict.SKIPPED, text) for name in (MEMORY, BUDGET)]
    if stack := stack_of(plan):
        text = f"The plan is priced as {stack} runs it, which this run of galvatron's own runtime does not show."
        return [Check(name, Verdict.SKIPPED, text) for name in (MEMORY, BUDGET)]
    predicted = device_memory(plan)
    return [_check_prediction(runs, predicted), _check_budget(runs, plan, predicted, cluster)]


def stack_of(plan: Plan) -> str:
    """Return the name of the other software that a plan is priced for; empty for this project's runtime."""
    return "" if plan.provenance is None else plan.provenance.stack


def _check_prediction(runs: Sequence[RoleRun], predicted: Sequence[MemoryBreakdown]) -> Check:
    differences = folded(line for run in runs for line in _memory_differences(run, predicted[run.stage]))
    if not differences:
        peaks = f"Peaks are within {TOLERANCE:.0%} of the predicted ones"
        categories = f"no category is off by more than that of a peak or {format_bytes(PIECE)}"
        return Check(MEMORY, Verdict.PASSED, f"{peaks}, {categories}.")
    pairs = [(run.peak.tensors, predicted[run.stage].tensors) for run in runs]
    explained = all(abs(peak - expected) <= EXPLAINED * max(expected, 1) for peak, expected in pairs)
    verdict = Verdict.DIFFERS if explained else Verdict.FAILED
    return Check(MEMORY, verdict, first_of(differences), tuple(differences[1:]))


def _memory_differences(run: RoleRun, predicted: MemoryBreakdown) -> Iterator[str]:
    expected = max(predicted.tensors, 1)
    if abs(run.peak.tensors - expected) > TOLERANCE * expected:
        yield _describe(run, "its peak", run.peak.tensors, expected)
    actual = run.peak
    if not predicted.activations:  # the prediction's peak is in the optimizer's step, so compare with that one
        updates = [sample.memory for sample in run.samples if sample.phase is During.OPTIMIZER]
        actual = max(updates, key=lambda memory: memory.total, default=actual)
    for category in _CATEGORIES:
        actual_bytes, planned_bytes = getattr(actual, category), getattr(predicted, category)
        if abs(actual_bytes - planned_bytes) > max(TOLERANCE * expected, PIECE):
            yield _describe(run, category, actual_bytes, planned_bytes)


def _describe(run: RoleRun, label: str, actual: int, predicted: int) -> str:
    rank = f"Rank {run.rank} (stage {run.stage})"
    share = f" ({(actual - predicted) / predicted:+.1%})" if predicted else ""
    return f"{rank}: {label} {format_bytes(actual)}, predicted {format_bytes(predicted)}{share}."


def _check_budget(
    runs: Sequence[RoleRun], plan: Plan, predicted: Sequence[MemoryBreakdown], cluster: Cluster | None
) -> Check:
    """Fail for a peak above the budget, unless it is the default budget and the rest of the device has room for it."""
    provenance = plan.provenance
    if provenance is None:
        return Check(BUDGET, Verdict.SKIPPED, "The plan was made for no budget.")
    lines, fails, remedy_bytes = list[str](), False, provenance.budget
    devices: list[tuple[int, int, int]] = []  # used bytes, budget, stage
    for run in runs:
        stage, context = plan.stages[stage_at(plan.schedule, plan.pipeline, run.stage, 0)], predicted[run.stage].context
        budget, used = provenance.budget_of(stage), run.peak.tensors + context
        devices.append((used, budget, run.stage))
        if used > budget:
            reserve = _reserve(provenance, stage, cluster)
            lines.append(_describe_excess(run, used, budget, context, reserve))
            fails |= used > budget + reserve
            remedy_bytes = min(remedy_bytes, budget - (used - budget))
    if not lines:
        used, budget, group = max(devices, key=itemgetter(0))
        usage = f"takes {format_bytes(used)} of {format_bytes(budget)}"
        return Check(BUDGET, Verdict.PASSED, f"The fullest device, of stage {group}, {usage}.")
    lines = folded(lines)
    if not fails:
        return Check(BUDGET, Verdict.DIFFERS, first_of(lines), tuple(lines[1:]))
    remedy = f"Plan with less: --mem {format_budget(remedy_bytes)}." if remedy_bytes > 0 else "Plan for more devices."
    return Check(BUDGET, Verdict.FAILED, f"{first_of(lines)} {remedy}", tuple(lines[1:]))


def _describe_excess(run: RoleRun, used: int, budget: int, context: int, reserve: int) -> str:
    driver = f", {format_bytes(context)} of the driver included" * (context > 0)
    peak = f"Rank {run.rank} (stage {run.stage}): {format_bytes(used)} at the peak{driver}"
    excess = f"{format_bytes(used - budget)} more than the budget of {format_bytes(budget)}"
    within = f", within the {format_bytes(reserve)} that {DEFAULT_BUDGET} of the device leaves free"
    return f"{peak}, {excess}{within if used - budget <= reserve else ''}."


def _reserve(provenance: Provenance, stage: Stage, cluster: Cluster | None) -> int:
    """Return the bytes that the default budget leaves free on a stage's devices; 0 for any other budget."""
    if cluster is None:
        return 0
    budget, default = provenance.budget_of(stage), budget_on(cluster, DEFAULT_BUDGET)
    capacities = [group.device.memory for group in cluster.groups if stage.device in ("", group.device.name)]
    return min(capacities, default=budget) - budget if budget == default.of(stage.device) else 0
