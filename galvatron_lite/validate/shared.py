"""Published runs whose devices share pixels or channels of samples: as the oracle lays them out. No torch here."""

from __future__ import annotations

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.cost.groups import busy_seconds
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.step import straggling
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.oracle.case import Kind
from galvatron_lite.oracle.laid import Laid, laid_out
from galvatron_lite.oracle.machine import profile_on
from galvatron_lite.oracle.question import Question
from galvatron_lite.parallelism.pictures import is_picture
from galvatron_lite.plans.schema import TimeBreakdown
from galvatron_lite.stacks.schema import Stack
from galvatron_lite.stacks.workspaces import workspace_bytes
from galvatron_lite.validate.outcome import Predicted, Skipped
from galvatron_lite.validate.rows import PublishedRun


def shares_samples(run: PublishedRun) -> bool:
    """Whether several devices work on the pixels or the channels of one sample."""
    return (run.spatial or 1) > 1 or (run.filter or 1) > 1


def question_of(run: PublishedRun) -> Question | Skipped:
    """What a run asks of the oracle: samples are of a group's, as ``micro_batch`` is where devices share them."""
    pixels, filters = run.spatial or 1, run.filter or 1
    group, devices = pixels * filters, run.n_gpus or 0
    if min(pixels, filters) > 1:
        return Skipped("pixels and filters shared at once", f"spatial: {pixels}, filter: {filters}.")
    if (run.tp or 1) * (run.pp or 1) * (run.cp or 1) > 1 or devices % group:
        return Skipped("degrees do not multiply to the number of GPUs", f"groups of {group}, n_gpus: {devices}.")
    groups = devices // group
    batch = run.micro_batch or (run.global_batch or 0) // groups
    if not batch or (run.global_batch or batch * groups) != batch * groups or (run.grad_accum or 1) != 1:
        return Skipped("batch does not divide", f"micro_batch: {run.micro_batch}, global_batch: {run.global_batch}.")
    alone, beside = (Kind.SPATIAL, Kind.DATA_SPATIAL) if pixels > 1 else (Kind.FILTER, Kind.DATA_FILTER)
    return Question(alone if groups == 1 else beside, devices, batch, batch * groups, group)


def predict_shared(
    run: PublishedRun, graph: ModelGraph, cluster: Cluster, stack: Stack, precision: str, calibration: Calibration
) -> Predicted | Skipped:
    """Step time and peak memory of such a run.

    Raises:
        InputError: the network cannot be split so.
    """
    if not any(is_picture(kind) for kind in graph.kinds.values()):
        return Skipped("spatial or filter parallelism", "spatial, filter: the model does not work on pictures.")
    question = question_of(run)
    if isinstance(question, Skipped):
        return question
    pricer = LayerPricer(profile_on(graph, cluster, precision, question.batch, stack, calibration))
    laid = laid_out(pricer, question)
    (seconds,) = busy_seconds(pricer.profile, laid.shape, laid.costs)
    (cost,) = laid.costs
    host = pricer.profile.overhead.step
    whole = (seconds + cost.step + host) * straggling(pricer.profile, question.devices)
    memory, device = cost.memory, cluster.device
    counted = memory.total - memory.context + workspace_bytes(stack, device)
    return Predicted(whole, counted, memory.total, device.memory, _parts(laid, whole), memory)


def _parts(laid: Laid, seconds: float) -> TimeBreakdown:
    layers = laid.costs[0].layers
    forward, backward, again, update = (
        sum(getattr(one, name) for one in layers) for name in ("forward", "backward", "recompute", "update")
    )
    left = seconds - forward - backward - again - update - laid.moved.total
    return TimeBreakdown(forward, backward, again, laid.moved.total, 0.0, update, left)
