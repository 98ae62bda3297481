"""Predicts a published run through the path that the planner takes: graph, profile, plan, cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import GalvatronError
from galvatron_lite.model.graph import ModelGraph, Recompute, Role
from galvatron_lite.model.shapes import Shape, build_graph
from galvatron_lite.plans.schema import Plan, Prediction
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.stacks.schema import Stack
from galvatron_lite.units import ITEM_BYTES
from galvatron_lite.validate.clusters import cluster_of
from galvatron_lite.validate.fitting import fitting
from galvatron_lite.validate.images import image_model
from galvatron_lite.validate.memory import peak_of
from galvatron_lite.validate.models import shape_of
from galvatron_lite.validate.outcome import Predicted, Skipped
from galvatron_lite.validate.plans import plan_of
from galvatron_lite.validate.rows import PublishedRun
from galvatron_lite.validate.said import compute_precision
from galvatron_lite.validate.shared import predict_shared, shares_samples
from galvatron_lite.validate.software import stack_of
from galvatron_lite.validate.understood import not_understood

MOST_PASSES = 1_000_000
"""Micro-batches of a step times stages of its pipeline that are gone through; more cost minutes a row."""

Point = tuple[str, int, bool, Recompute, int]
"""Kind, tensor degree, sequence parallel, recomputation, samples on a device: what is estimated."""


@dataclass(slots=True)
class Remembered:
    """What repeats from run to run: graphs, clusters, pricers."""

    graphs: dict[object, ModelGraph] = field(default_factory=dict)
    clusters: dict[object, Cluster | Skipped] = field(default_factory=dict)
    pricers: dict[object, LayerPricer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Understood:
    """A published run in our words.

    Attributes:
        graph: what is trained.
        cluster: where.
        stack: with which software.
        precision: of compute.
        plan: how, priced.
    """

    graph: ModelGraph
    cluster: Cluster
    stack: Stack
    precision: str
    plan: Plan

    @property
    def prediction(self) -> Prediction:
        """Of the plan."""
        assert self.plan.prediction is not None
        return self.plan.prediction

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.prediction.step_seconds

    @property
    def peak(self) -> int:
        """Bytes on the fullest device."""
        return self.prediction.peak_memory


def predict_run(run: PublishedRun, calibration: Calibration, memory: Remembered) -> Predicted | Skipped:
    """Step time and peak memory of a run, or why it cannot be represented."""
    if run.problem is not None:
        return Skipped("a field cannot be read", run.problem)
    try:
        if shares_samples(run):
            return not_understood(run) or _shared(run, calibration, memory)
        understood = not_understood(run) or understand(run, calibration, memory)
        return understood if isinstance(understood, Skipped) else _outcome(run, understood)
    except GalvatronError as error:
        return Skipped(_short(error), str(error))
    except Exception as error:  # one odd row must not cost the scores of the others; it is counted by what broke
        return Skipped(f"internal error: {type(error).__name__}", str(error))


def _shared(run: PublishedRun, calibration: Calibration, memory: Remembered) -> Predicted | Skipped:
    """A run whose devices share samples."""
    cluster = _cluster(run, calibration, memory)
    if isinstance(cluster, Skipped):
        return cluster
    precision = compute_precision(run.precision, cluster.device)
    stack = stack_of(run, precision, calibration)
    graph = _graph(run, stack, precision, memory)
    return graph if isinstance(graph, Skipped) else predict_shared(run, graph, cluster, stack, precision, calibration)


def understand(run: PublishedRun, calibration: Calibration, memory: Remembered) -> Understood | Skipped:
    """What a run trains, where, with which software and by which plan; or why it cannot be represented.

    Raises:
        InputError: the plan cannot be run on this model.
    """
    cluster = _cluster(run, calibration, memory)
    if isinstance(cluster, Skipped):
        return cluster
    precision = compute_precision(run.precision, cluster.device)
    stack = stack_of(run, precision, calibration)
    found = _with(run, stack, precision, cluster, calibration, memory)
    if isinstance(found, Skipped) or found.peak <= cluster.device.memory or not stack.regathers_at_need:
        return found
    lean = replace(stack, kernels=replace(stack.kernels, regather=True, regather_recomputed=True))
    return _with(run, lean, precision, cluster, calibration, memory)


def _with(
    run: PublishedRun, stack: Stack, precision: str, cluster: Cluster, calibration: Calibration, memory: Remembered
) -> Understood | Skipped:
    """``understand`` on a known machine with known software."""
    graph = _graph(run, stack, precision, memory)
    if isinstance(graph, Skipped):
        return graph
    plan = plan_of(run, graph, stack, precision)
    if isinstance(plan, Skipped):
        return plan
    if plan.pipeline > 1 and len(plan.stages) * plan.microbatches > MOST_PASSES:
        return Skipped("does not fit: global_batch", _too_long(plan))

    def price(candidate: Plan) -> Plan:
        return price_plan(_pricer(graph, cluster, stack, precision, candidate, calibration, memory), candidate)

    priced = fitting(run, plan, graph, price, cluster.device.memory)
    if priced.prediction is None or not 0 < priced.prediction.step_seconds < inf:
        return Skipped("not priced")
    return Understood(graph, cluster, stack, precision, priced)


def _too_long(plan: Plan) -> str:
    """What to say of a pipeline that would take minutes to go through."""
    passes = f"{plan.microbatches:,} micro-batches in {len(plan.stages):,} stages"
    return f"global_batch: {plan.global_batch} makes {passes}. Their product may be {MOST_PASSES:,} at most."


def _cluster(run: PublishedRun, calibration: Calibration, memory: Remembered) -> Cluster | Skipped:
    key = (run.gpu, run.n_gpus, run.gpus_per_node, run.intra_link, run.inter_net, run.inter_node_gbps)
    if key not in memory.clusters:
        memory.clusters[key] = cluster_of(run, calibration)
    return memory.clusters[key]


def _graph(run: PublishedRun, stack: Stack, precision: str, memory: Remembered) -> ModelGraph | Skipped:
    shape = _shape(run, stack)
    if isinstance(shape, (Skipped, ModelGraph)):
        return shape
    held = precision if precision in ITEM_BYTES else "fp8"
    key = (shape, stack.kernels, held)
    if key not in memory.graphs:
        memory.graphs[key] = build_graph(shape, precision=held, kernels=stack.kernels)
    return memory.graphs[key]


def _shape(run: PublishedRun, stack: Stack) -> Shape | ModelGraph | Skipped:
    """A transformer's shape; models of images come from a module of their own."""
    arch = (run.arch or "").lower()
    if not any(word in arch for word in ("cnn", "vit", "unet", "image")):
        return shape_of(run, stack)
    return image_model(run, stack)


def _pricer(
    graph: ModelGraph,
    cluster: Cluster,
    stack: Stack,
    precision: str,
    plan: Plan,
    calibration: Calibration,
    memory: Remembered,
) -> LayerPricer:
    """Prices of the points that a plan needs; those of an equal model on an equal machine are kept."""
    wanted = wanted_points(graph, plan)
    strategies = [run.strategy for stage in plan.stages for run in stage.runs]
    expert, context = (max(getattr(one, name) for one in strategies) for name in ("expert", "context"))
    software = (stack.name, stack.kernels, stack.states, stack.optimizer, precision)
    key = (id(graph), id(cluster), *software, wanted, expert, context)
    if key not in memory.pricers:
        profile = estimate_profile(
            graph,
            cluster,
            precision=precision,
            name=graph.name,
            samples=sorted({point[4] for point in wanted}),
            optimizer=stack.optimizer,
            stack=stack,
            calibration=calibration,
            wanted=wanted,
            expert=expert,
            context=context,
        )
        memory.pricers[key] = LayerPricer(profile)
    return memory.pricers[key]


def wanted_points(graph: ModelGraph, plan: Plan) -> frozenset[Point]:
    """The points of a profile that pricing a plan looks up."""
    strategies = (run.strategy for stage in plan.stages for run in stage.runs for _ in range(run.count))
    return frozenset(
        (
            layer.kind,
            strategy.tensor,
            strategy.sequence_parallel,
            strategy.recompute if layer.role is Role.BLOCK else Recompute.NONE,
            max(plan.microbatch // strategy.batch_degree, 1),
        )
        for layer, strategy in zip(graph.layers, strategies, strict=True)
    )


def _outcome(run: PublishedRun, understood: Understood) -> Predicted:
    device = understood.cluster.device
    stage, peak = peak_of(run, understood.stack, understood.plan, device)
    return Predicted(
        step_seconds=understood.seconds,
        peak_memory=peak,
        device_memory=understood.peak,
        capacity=device.memory,
        time=understood.prediction.time,
        memory=stage,
    )


def _short(error: GalvatronError) -> str:
    field_name = getattr(error, "field", "")
    return f"does not fit: {field_name}" if field_name else str(error)
