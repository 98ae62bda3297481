"""Predicts step time and memory of published runs as the planner does: from graph, profile and plan to cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.cluster.cluster import Cluster, Device
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.memory import reserved
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.cost.step import busy_seconds, straggling
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.model.graph import ModelGraph, Recompute, Role
from galvatron_lite.model.shapes import build_graph
from galvatron_lite.model.trainable import Trainable
from galvatron_lite.oracle.pricing import price_layout, profile_on, reading_seconds
from galvatron_lite.oracle.rows import Method, RowQuestion
from galvatron_lite.parallelism.pictures import is_picture
from galvatron_lite.plans.schema import MemoryBreakdown, Plan, Prediction, TimeBreakdown
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.stacks.schema import Stack, workspace_bytes
from galvatron_lite.units import ITEM_BYTES
from galvatron_lite.validate.checks import check_understood, cluster_of, stack_of
from galvatron_lite.validate.model import image_model, is_image, shape_of
from galvatron_lite.validate.plans import Batch, batch_of, compute_precision, fitting, plan_of
from galvatron_lite.validate.results import MeasuredRun, Predicted, ScoredRun, SkipError, judge
from galvatron_lite.validate.rows import PublishedRun


def _peak_of(run: PublishedRun, stack: Stack, plan: Plan, device: Device) -> tuple[MemoryBreakdown, int]:
    """Return the memory of the stage that a run reports, and the bytes that the run would have measured there.

    A run reports the last rank, the sum over all devices, or (by default) the fullest stage; and what ``nvidia-smi``
    shows, what PyTorch reserved, or (by default) what it allocated with the libraries' workspaces.
    """
    memories = [stage.memory for stage in plan.stages[-plan.pipeline :]]
    workspaces = workspace_bytes(stack, device)

    def counted(memory: MemoryBreakdown) -> int:
        shown = "nvidia-smi" in run.remarks
        if shown or stack.reports_reserved:
            buffers = memory.gradients if stack.states.buffered_gradients else 0
            used = reserved(memory, device.memory, buffers)
            return used if shown else used - memory.context + workspaces
        return memory.tensors + workspaces

    fullest = max(memories, key=counted)
    if "last rank" in run.remarks:
        return memories[-1], counted(memories[-1])
    if "sum over all gpus" in run.remarks:
        return fullest, sum(counted(memory) for memory in memories) * plan.stage_devices
    return fullest, counted(fullest)


def question_of(run: PublishedRun) -> RowQuestion:
    """Return the oracle's question for a run whose groups of devices share pixels or filters."""
    pixels, filters = run.spatial or 1, run.filter or 1
    group, devices = pixels * filters, run.n_gpus or 0
    if min(pixels, filters) > 1:
        raise SkipError("pixels and filters shared at once", f"spatial: {pixels}, filter: {filters}.")
    if (run.tp or 1) * (run.pp or 1) * (run.cp or 1) > 1 or devices % group:
        raise SkipError("degrees do not multiply to the number of GPUs", f"groups of {group}, n_gpus: {devices}.")
    groups = devices // group
    batch = run.micro_batch or (run.global_batch or 0) // groups
    if not batch or (run.global_batch or batch * groups) != batch * groups or (run.grad_accum or 1) != 1:
        raise SkipError("batch does not divide", f"micro_batch: {run.micro_batch}, global_batch: {run.global_batch}.")
    alone, beside = (Method.SPATIAL, Method.DATA_SPATIAL) if pixels > 1 else (Method.FILTER, Method.DATA_FILTER)
    return RowQuestion(alone if groups == 1 else beside, devices, batch, batch * groups, group)


def step_seconds(pricer: LayerPricer, plan: Plan) -> float:
    """Return the predicted seconds of a step of a plan."""
    prediction = price_plan(pricer, plan).prediction
    assert prediction is not None
    return prediction.step_seconds


MOST_PASSES = 1_000_000
"""Most micro-batches of a step times stages of its pipeline; more would take minutes a row."""

Point = tuple[str, int, bool, Recompute, int]
"""A point of a profile: kind, tensor degree, sequence parallel, recomputation, samples on a device."""


@dataclass(frozen=True, slots=True)
class InterpretedRun:
    """A published run as model, cluster, software and plan."""

    graph: ModelGraph
    cluster: Cluster
    stack: Stack
    precision: str  # precision of compute
    plan: Plan  # priced

    @property
    def prediction(self) -> Prediction:
        """The plan's prediction."""
        assert self.plan.prediction is not None
        return self.plan.prediction


@dataclass(slots=True)
class Predictor:
    """Predicts published runs; caches graphs, clusters and pricers, which repeat from run to run."""

    calibration: Calibration
    graphs: dict[object, ModelGraph] = field(default_factory=dict)
    _clusters: dict[object, Cluster] = field(default_factory=dict)
    _pricers: dict[object, LayerPricer] = field(default_factory=dict)

    def judge(self, run: PublishedRun) -> ScoredRun:
        """Return a run with its measurement and prediction; runs of grade C are not predicted."""
        if run.quality == "C" and run.problem is None:
            return ScoredRun(run, None, SkipError("grade C is not scored", "quality: 'C'."))
        outcome = self.predict(run)
        if isinstance(outcome, SkipError):
            return ScoredRun(run, None, outcome)
        try:
            measured = measured_of(run, batch_of(run))
        except SkipError as skipped:
            return ScoredRun(run, None, skipped)
        return judge(run, measured, outcome)

    def predict(self, run: PublishedRun) -> Predicted | SkipError:
        """Return step time and peak memory of a run, or why it cannot be represented."""
        if run.problem is not None:
            return SkipError("a field cannot be read", run.problem)
        try:
            check_understood(run)
            if max(run.spatial or 1, run.filter or 1) > 1:
                return self._predict_shared(run)
            interpreted = self.interpret(run)
            device, prediction = interpreted.cluster.device, interpreted.prediction
            stage, peak = _peak_of(run, interpreted.stack, interpreted.plan, device)
            return Predicted(
                prediction.step_seconds, peak, prediction.peak_memory, device.memory, prediction.time, stage
            )
        except SkipError as skipped:
            return skipped
        except GalvatronError as error:
            name = getattr(error, "field", "")
            return SkipError(f"does not fit: {name}" if name else str(error), str(error))
        except Exception as error:  # one odd row must not cost the scores of the others; it is counted as skipped
            return SkipError(f"internal error: {type(error).__name__}", str(error))

    def _environment(self, run: PublishedRun) -> tuple[Cluster, str, Stack]:
        """Return the cluster, precision of compute and software of a run."""
        key = (run.gpu, run.n_gpus, run.gpus_per_node, run.intra_link, run.inter_net, run.inter_node_gbps)
        if key not in self._clusters:
            self._clusters[key] = cluster_of(run, self.calibration)
        cluster = self._clusters[key]
        precision = compute_precision(run.precision, cluster.device, match_stack(run.framework).multiplies_tf32)
        return cluster, precision, stack_of(run, precision, self.calibration)

    def _predict_shared(self, run: PublishedRun) -> Predicted:
        """Predict a run whose groups of devices share pixels or filters, by the oracle's cost model."""
        cluster, precision, stack = self._environment(run)
        graph = self._graph(run, stack, precision)
        if not any(is_picture(kind) for kind in graph.kinds.values()):
            raise SkipError("spatial or filter parallelism", "spatial, filter: the model does not work on pictures.")
        question = question_of(run)
        pricer = LayerPricer(profile_on(graph, cluster, precision, question.batch, stack, self.calibration))
        layout = price_layout(pricer, question)
        (seconds,), (cost,) = busy_seconds(pricer.profile, layout.shape, layout.costs), layout.costs
        step = (seconds + cost.step + pricer.profile.overhead.step) * straggling(pricer.profile, question.devices)
        step = max(step, reading_seconds(pricer.profile, question))
        names = ("forward", "backward", "recompute", "update")
        forward, backward, again, update = (sum(getattr(layer, name) for layer in cost.layers) for name in names)
        other = step - forward - backward - again - update - layout.moved.total
        time = TimeBreakdown(forward, backward, again, layout.moved.total, 0.0, update, other)
        counted = cost.memory.tensors + workspace_bytes(stack, cluster.device)
        return Predicted(step, counted, cost.memory.total, cluster.device.memory, time, cost.memory)

    def interpret(self, run: PublishedRun) -> InterpretedRun:
        """Return the model, cluster, software and priced plan of a run.

        Raises:
            SkipError: a run that cannot be represented.
        """
        cluster, precision, stack = self._environment(run)
        interpreted = self._interpret(run, stack, precision, cluster)
        if not stack.regathers_at_need or interpreted.prediction.peak_memory <= cluster.device.memory:
            return interpreted
        regathering = replace(stack, kernels=replace(stack.kernels, regather=True, regather_recomputed=True))
        return self._interpret(run, regathering, precision, cluster)

    def _interpret(self, run: PublishedRun, stack: Stack, precision: str, cluster: Cluster) -> InterpretedRun:
        graph = self._graph(run, stack, precision)
        plan = plan_of(run, graph, stack, precision)
        if plan.pipeline > 1 and len(plan.stages) * plan.microbatches > MOST_PASSES:
            passes = f"{plan.microbatches:,} micro-batches in {len(plan.stages):,} stages"
            detail = f"global_batch: {plan.global_batch} makes {passes}. Their product may be {MOST_PASSES:,} at most."
            raise SkipError("does not fit: global_batch", detail)

        def price(candidate: Plan) -> Plan:
            return price_plan(self.pricer(graph, cluster, stack, precision, candidate), candidate)

        priced = fitting(run, plan, graph, price, cluster.device.memory)
        if priced.prediction is None or not 0 < priced.prediction.step_seconds < inf:
            raise SkipError("not priced")
        return InterpretedRun(graph, cluster, stack, precision, priced)

    def _graph(self, run: PublishedRun, stack: Stack, precision: str) -> ModelGraph:
        if is_image(run):
            return image_model(run, stack)
        shape = shape_of(run, stack)
        storage = precision if precision in ITEM_BYTES else "fp8"
        try:
            trainable = Trainable.parse(run.trainable, (run.freeze or "").split())
            key = (shape, stack.kernels, storage, trainable)
            if key not in self.graphs:
                self.graphs[key] = build_graph(shape, precision=storage, kernels=stack.kernels, trainable=trainable)
        except InputError as error:
            raise SkipError("trainable parameters not understood", str(error)) from error
        return self.graphs[key]

    def profile_of(self, run: InterpretedRun, plan: Plan) -> Profile:
        """Return the estimated profile of a run's model on its cluster, with the points that ``plan`` needs."""
        return self.pricer(run.graph, run.cluster, run.stack, run.precision, plan).profile

    def pricer(self, graph: ModelGraph, cluster: Cluster, stack: Stack, precision: str, plan: Plan) -> LayerPricer:
        """Return the prices of a model's estimated layers, with the points that ``plan`` needs."""
        wanted = wanted_points(graph, plan)
        strategies = [run.strategy for stage in plan.stages for run in stage.runs]
        expert, context = (max(getattr(strategy, name) for strategy in strategies) for name in ("expert", "context"))
        software = (stack.name, stack.kernels, stack.states, stack.optimizer, precision)
        key = (id(graph), id(cluster), *software, wanted, expert, context)
        if key not in self._pricers:
            profile = estimate_profile(
                graph, cluster, precision=precision, name=graph.name, samples=sorted({point[4] for point in wanted}),
                optimizer=stack.optimizer, stack=stack, calibration=self.calibration, wanted=wanted, expert=expert,
                context=context,
            )  # fmt: skip
            self._pricers[key] = LayerPricer(profile)
        return self._pricers[key]


Progress = Callable[[int, int, str], None]


def validate_runs(
    runs: Sequence[PublishedRun], calibration: Calibration, progress: Progress | None = None
) -> list[ScoredRun]:
    """Return each run with its prediction, in order; ``progress`` is called with (done, total, label) after each."""
    predictor, judged = Predictor(calibration), []
    for number, run in enumerate(runs, 1):
        judged.append(predictor.judge(run))
        if progress is not None:
            progress(number, len(runs), run.family)
    return judged


def wanted_points(graph: ModelGraph, plan: Plan) -> frozenset[Point]:
    """Return the points of a profile that pricing a plan needs."""
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


def measured_of(run: PublishedRun, batch: Batch) -> MeasuredRun:
    """Return the step time, stated or from tokens or samples a second, and the peak memory in bytes.

    PyTorch and nvidia-smi print GiB, also under the name GB; only rows that say they were converted are in GB.
    """
    seconds = None
    if run.iter_time_s is not None and run.global_batch is not None:
        seconds = run.iter_time_s
    elif run.tokens_per_s_per_gpu and run.seq_len and run.n_gpus:
        seconds = batch.size * run.seq_len / (run.tokens_per_s_per_gpu * run.n_gpus)
    elif run.samples_per_s:
        seconds = batch.size / run.samples_per_s
    unit = 10**9 if "gib->gb" in run.remarks or "x1.0737" in run.remarks else 2**30
    return MeasuredRun(seconds, None if run.peak_mem_gb is None else round(run.peak_mem_gb * unit))
