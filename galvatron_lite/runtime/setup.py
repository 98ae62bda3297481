"""Making a stage ready to train: values, splitting, hooks, gradient reduction, pipeline."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from galvatron_lite.errors import TraceError
from galvatron_lite.model.batch import LossFn
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace_run import check_folded, sample_arguments
from galvatron_lite.parallelism.cyclic.stages import structure_of
from galvatron_lite.parallelism.data.apply import GradientReducer
from galvatron_lite.parallelism.pipeline.deferral import Deferral, defer_weights
from galvatron_lite.parallelism.pipeline.flow import LayerFlow, flow_of
from galvatron_lite.parallelism.pipeline.runner import Chunk, Luggage, PipelineRunner
from galvatron_lite.parallelism.pipeline.stage import StageEnd, StageModel, check_stages
from galvatron_lite.parallelism.pipeline.tied import (
    COPIES,
    SharedCopies,
    SharedParameter,
    check_shared,
    find_shared,
    holding_groups,
    holding_stages,
    shared_before,
    tie,
    untie,
)
from galvatron_lite.parallelism.pipeline.transfer import pipeline_groups, place_groups
from galvatron_lite.parallelism.precision import narrow_experts, narrow_norms
from galvatron_lite.parallelism.process_groups import ProcessGroups
from galvatron_lite.parallelism.rng.modules import Draws
from galvatron_lite.parallelism.sharded.calls import intercept_custom_functions
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.plans.execution import pipeline_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.alike import broadcast_values, share_random_state, shares_samples
from galvatron_lite.runtime.border import border_of, rules_under
from galvatron_lite.runtime.channel_plans import channel_plans
from galvatron_lite.runtime.compiled import compile_blocks
from galvatron_lite.runtime.gradient_guard import hides_norm
from galvatron_lite.runtime.hooks import hooks_of, install_hooks
from galvatron_lite.runtime.layout import Layout
from galvatron_lite.runtime.materialize import Materializer
from galvatron_lite.runtime.mesh import Meshes, StrategyGroups
from galvatron_lite.runtime.placement import LayerAssignment, Stages, glue_layout, glue_of, place_layers
from galvatron_lite.runtime.redistribute import Mover
from galvatron_lite.runtime.router_losses import check_router_losses, install_router_losses
from galvatron_lite.runtime.sharding import (
    LayerPlans,
    Owned,
    Sharded,
    owned_parameters,
    reduced_parameters,
    shard_stage,
)
from galvatron_lite.runtime.tensor_plans import tensor_plans
from galvatron_lite.runtime.traffic import Traffic
from galvatron_lite.runtime.updates import Updates

Place = Callable[[nn.Module, Layer], None]
"""Brings a layer of a structure out of which a stage was cut already onto the device."""


@dataclass(frozen=True, slots=True)
class SetupOptions:
    """How a model is set up; see ``ParallelModel``."""

    device: torch.device
    compute: torch.dtype | None
    tensor_plans: Mapping[str, TensorPlan] | None
    init_fn: Callable[[nn.Module], None] | None
    seed: int
    loss_fn: LossFn | None = None
    expert_capacity: float | None = None
    groups: ProcessGroups = field(default_factory=ProcessGroups)
    compile: str = ""
    draws: Draws | None = None


@dataclass(slots=True)
class StageRuntime:
    """What this rank's stage is made of."""

    stage: tuple[LayerAssignment, ...]  # its layers and strategies
    meshes: Meshes  # process groups
    owned: list[Owned]  # its parameters
    sharded: Sharded  # how they were split
    reducer: GradientReducer  # sums the gradients of the others
    traffic: Traffic  # shared by the hooks
    pipeline: PipelineRunner | None  # runs the schedule; None for a single stage
    shared: SharedCopies | None  # copies of parameters on several stages; None for a single stage
    updates: Updates  # brings gradients to what the optimizer updates, and updated values back
    model: nn.Module  # holds its modules, under the names of the whole model
    is_last: bool = True  # whether this stage computes the loss

    @property
    def glue_groups(self) -> StrategyGroups:
        """Groups of a layer in whose layout glue code runs."""
        return self.meshes.groups(glue_of(self.stage).strategy)

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """Names of parameters that another stage counts in the gradient's norm."""
        return frozenset() if self.shared is None else self.shared.counted_elsewhere

    @property
    def holds_shares(self) -> bool:
        """Whether parameters are split over ranks, or other stages have theirs."""
        split = any(one.shard is not None or isinstance(one.parameter, DTensor) for one in self.owned)
        return split or bool(self.sharded.experts) or self.pipeline is not None


def set_up(
    model: nn.Module, plan: Plan, layers: Sequence[Layer], batch: Any, meshes: Meshes, options: SetupOptions
) -> list[StageRuntime]:
    """Split the model as the plan says, in place, and make what trains it. All ranks call it together.

    Returns:
        One of each of the rank's stages, in the order of the model.

    Raises:
        InputError: the plan does not fit the model.
    """
    prepared = prepare(model, plan, layers, batch, meshes.stage_index, options)
    broadcast_values(model, options.device)
    if shares_samples(plan):
        share_random_state(options.device)
    runtimes = build(model, prepared, meshes, options)
    if runtimes[0].shared is not None:
        runtimes[0].shared.start_equal()
        for runtime in runtimes:
            runtime.updates.take()
    return runtimes


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan for a model, and all that must be found out of the whole model before it is split."""

    plan: Plan  # for this model
    layers: Sequence[Layer]  # of the model
    stages: Stages  # the layers of each stage, with their strategies
    ties: tuple[SharedParameter, ...]  # parameters that layers share
    known: tuple[ModelFacts, ...]  # of each of this rank's stages: how layers are split inside
    flow: LayerFlow | None  # which layers read what, where there are several stages

    @property
    def names(self) -> list[list[str]]:
        """Names of the layers of each stage."""
        return [[placed.layer.name for placed in stage] for stage in self.stages]

    @property
    def strategies(self) -> dict[str, Strategy]:
        """By the layer's name."""
        return {placed.layer.name: placed.strategy for stage in self.stages for placed in stage}


def prepare(
    model: nn.Module, plan: Plan, layers: Sequence[Layer], batch: Any, group: int, options: SetupOptions
) -> Prepared:
    """What splitting a whole model needs to know, which is not changed; no communication.

    Args:
        model: the whole one.
        plan: for it.
        layers: of the model.
        batch: an example.
        group: number of this rank's group of devices; its stage, where each has one.
        options: of the model.

    Raises:
        InputError: the plan does not fit the model.
    """
    stages = place_layers(plan, layers)
    everything = [placed for stage in stages for placed in stage]
    ties = find_shared(model, layers)
    check_shared(ties, {placed.layer.name: placed.strategy for placed in everything})
    if options.tensor_plans is None:
        options = replace(options, tensor_plans=tensor_plans(model, everything, batch))
    check_router_losses(model, batch, plan)
    own = pipeline_of(plan).stages_of(group)
    known = tuple(examine(model, everything, stages[number], batch, options) for number in own)
    flow = known_flow(model, layers, batch, options.loss_fn) if len(stages) > 1 else None
    check_stages(layers, [[placed.layer.name for placed in stage] for stage in stages], flow)
    return Prepared(plan, layers, stages, ties, known, flow)


def build(
    model: nn.Module, prepared: Prepared, meshes: Meshes, options: SetupOptions, place: Place | None = None
) -> list[StageRuntime]:
    """Split a model in place, and make what trains it. All ranks call it together; it moves no values.

    Args:
        model: the whole one; where the rank has several stages, the first is made of it, the others of copies of its
            structure.
        prepared: for it.
        meshes: process groups.
        options: of the model.
        place: brings a layer of such a structure onto the device; gives it its values if not given.

    Returns:
        One of each of the rank's stages, in the order of the model.
    """
    pipeline = pipeline_of(prepared.plan)
    numbers = pipeline.stages_of(meshes.stage_index)
    structures = [model, *(structure_of(model) for _ in numbers[1:])]
    models: dict[int, nn.Module] = {}
    cuts = []
    for structure, number in zip(structures, numbers, strict=True):
        cuts.append(_cut_stage(structure, prepared.layers, prepared.names, number, prepared.flow, options.device))
        untie(structure, shared_before(models, number, prepared.ties, prepared.names))
        models[number] = structure
    made = [
        _build_stage(prepared, models, number, cut, known, meshes, options, place)
        for number, cut, known in zip(numbers, cuts, prepared.known, strict=True)
    ]
    runtimes = [runtime for runtime, _ in made]
    if len(prepared.stages) > 1:
        arguments = prepared.ties, prepared.names, prepared.strategies
        reduced = {one.parameter: one.reduced for runtime in runtimes for one in runtime.owned}
        shared = SharedCopies(models, *arguments, options.groups, reduced, pipeline)
        chunks = [chunk for _, chunk in made if chunk is not None]
        groups = pipeline_groups(pipeline.groups, options.groups, turns=pipeline.virtual > 1)
        runner = PipelineRunner(chunks, groups, pipeline, meshes.stage_index, options.device)
        for runtime in runtimes:
            runtime.shared, runtime.pipeline = shared, runner
            runtime.updates.lowering.late, runtime.updates.guarded = shared.parameters, True
    return runtimes


def _build_stage(
    prepared: Prepared,
    models: Mapping[int, nn.Module],
    number: int,
    cut: StageModel | None,
    facts: ModelFacts,
    meshes: Meshes,
    options: SetupOptions,
    place: Place | None,
) -> tuple[StageRuntime, Chunk | None]:
    """One of the rank's stages, and what the pipeline runs of it."""
    model, layers, stages = models[number], prepared.layers, prepared.stages
    earlier = {other: one for other, one in models.items() if other < number}
    tied = shared_before(earlier, number, prepared.ties, prepared.names)
    incoming = frozenset().union(*map(_layouts_of, stages[:number]))
    deferral = Deferral() if cut is not None and pipeline_of(prepared.plan).splits_backward else None
    if deferral is not None:
        _defer(model, stages[number], deferral)
    own = None if place is None else functools.partial(place, model)
    runtime = assemble(model, layers, stages[number], meshes, facts, options, incoming, place=own, tied=tied)
    runtime.is_last = number == len(stages) - 1
    if cut is None:
        return runtime, None
    return runtime, Chunk(cut, Luggage(runtime.traffic.pack, runtime.traffic.unpack), deferral)


def _layouts_of(stage: Sequence[LayerAssignment]) -> set[Layout]:
    """How what a stage hands on may lie: it passes on what came from earlier ones as well."""
    return {glue_layout(stage), *(placed.layout for placed in stage)}


def _defer(model: nn.Module, stage: Sequence[LayerAssignment], deferral: Deferral) -> None:
    """Leave the gradients of weights to passes of their own, but where ZeRO reduces them when backward ends."""
    for placed in stage:
        whole = placed.strategy.zero_stage in (0, 1)
        for path in placed.layer.modules if whole else ():
            defer_weights(model.get_submodule(path), deferral)


def make_pipeline_groups(prepared: Prepared, groups: ProcessGroups) -> None:
    """Make the process groups between stages beforehand; every rank of the world calls it."""
    if len(prepared.stages) == 1:
        return
    pipeline = pipeline_of(prepared.plan)
    for shared in prepared.ties:
        if len(places := holding_groups(holding_stages(shared, prepared.names), pipeline)) > 1:
            groups.create(place_groups(places, pipeline.groups), COPIES)
    pipeline_groups(pipeline.groups, groups, turns=pipeline.virtual > 1)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What must be found out of a whole model before it is changed."""

    plans: LayerPlans  # how layers are split inside
    sampled: Mapping[str, Mapping[str, int]]  # how arguments of layers hold the samples; see ``Traffic``


def examine(
    model: nn.Module,
    everything: Sequence[LayerAssignment],
    stage: Sequence[LayerAssignment],
    batch: Any,
    options: SetupOptions,
) -> ModelFacts:
    """What splitting a stage needs to know.

    Args:
        model: the whole one, unchanged.
        everything: the layers of all stages.
        stage: those of this rank's stage.
        batch: an example.
        options: of the model.

    Raises:
        InputError: a layer that cannot be split as its strategy says.
    """
    matmuls = tensor_plans(model, everything, batch) if options.tensor_plans is None else options.tensor_plans
    plans = LayerPlans(matmuls, channel_plans(model, stage, batch), options.expert_capacity)
    return ModelFacts(plans, _sample_arguments(model, stage, glue_layout(stage), batch))


def assemble(
    model: nn.Module,
    layers: Sequence[Layer],
    stage: tuple[LayerAssignment, ...],
    meshes: Meshes,
    facts: ModelFacts,
    options: SetupOptions,
    incoming: Collection[Layout] = (),
    roots: Sequence[nn.Module] = (),
    place: Callable[[Layer], None] | None = None,
    tied: Mapping[str, nn.Parameter] | None = None,
) -> StageRuntime:
    """Split a stage in place and make what trains it, without pipeline. All ranks of the stage call it together.

    Args:
        model: holds the stage's layers, and no parameter of others that is not hollow.
        layers: those of the model.
        stage: those of the stage.
        meshes: process groups.
        facts: from ``examine``.
        options: of the model.
        incoming: layouts in which what stages before this one send may lie.
        roots: the modules of the model that are called; the model itself if not given.
        place: brings a layer onto the device; gives it its values if not given.
        tied: parameters that another stage of this rank has and trains, by their names here.
    """
    intercept_custom_functions()
    users = hooks_of(model)
    compile_blocks(model, stage, meshes, options.compile)
    place = place or Materializer(model, layers, options.device, options.seed, options.init_fn).place
    if options.compute is not None:
        narrow_experts(model)
    sharded = _split(model, layers, stage, meshes, facts.plans, options, roots or [model], place)
    if options.compute is not None:
        narrow_norms(model)
    glue = glue_of(stage)
    groups = meshes.groups(glue.strategy)
    border = border_of(glue_layout(stage), glue.strategy, groups)
    mover = Mover(meshes.groups(stage[0].strategy).everyone, meshes.index_in_stage)
    traffic = Traffic(mover, border, rules_under(glue.strategy), options.compute, facts.sampled)
    install_hooks(model, sharded.borders, traffic, incoming, users)
    install_router_losses(model, stage, meshes, sharded.experts)
    tie(model, tied or {})
    owned = owned_parameters(model, stage, meshes, sharded.shards, sharded.experts)
    owned = [one for one in owned if not tied or all(one.parameter is not other for other in tied.values())]
    reducer = GradientReducer(reduced_parameters(owned))
    updates = Updates(owned, reducer, guarded=hides_norm(owned, meshes.stage_devices))
    return StageRuntime(stage, meshes, owned, sharded, reducer, traffic, None, None, updates, model)


def known_flow(model: nn.Module, layers: Sequence[Layer], batch: Any, loss_fn: LossFn | None) -> LayerFlow | None:
    """Which layers read what; None where no example says so, and each must read the layer before it alone."""
    if batch is None:
        return None
    try:
        return flow_of(model, layers, batch, loss_fn)
    except TraceError as unseen:
        remedy = "Each layer is taken to read what the layer before it made alone; one that reads more is refused."
        warnings.warn(f"{unseen} {remedy}", stacklevel=2)
        return None


def _cut_stage(
    model: nn.Module,
    layers: Sequence[Layer],
    names: Sequence[Sequence[str]],
    index: int,
    flow: LayerFlow | None,
    device: torch.device,
) -> StageModel | None:
    """Make the model run one stage; None where there is only one.

    The model's forward then returns None behind the stage's last layer, instead of being left by an exception: FSDP's
    hooks behind it must run, or a later step's gathering would not wait for the optimizer.
    """
    if len(names) == 1:
        return None
    cut = StageModel(model, layers, names[index], device, flow)
    forward = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except StageEnd:
            return None

    model.forward = run
    return cut


def _split(
    model: nn.Module,
    layers: Sequence[Layer],
    stage: Sequence[LayerAssignment],
    meshes: Meshes,
    plans: LayerPlans,
    options: SetupOptions,
    roots: Sequence[nn.Module],
    place: Callable[[Layer], None],
) -> Sharded:
    for layer in layers:
        # it has no parameters on later stages, but its buffers may still be read
        if layer.role is Role.BEFORE and all(placed.layer is not layer for placed in stage):
            place(layer)
    return shard_stage(model, stage, meshes, plans, place, options.compute, roots, options.draws)


def _sample_arguments(
    model: nn.Module, stage: Sequence[LayerAssignment], glue: Layout, batch: Any
) -> Mapping[str, Mapping[str, int]]:
    """What must be known of the arguments of blocks that split samples in another way than the glue code."""
    unlike = {
        placed.layer.name: placed.layout.batch
        for placed in stage
        if placed.layer.role is Role.BLOCK and replace(placed.layout, sequence=1) != replace(glue, sequence=1)
    }
    if not unlike or batch is None:
        return {}
    found = sample_arguments(model, list(unlike), batch)
    check_folded({name: own for name, own in found.items() if unlike[name] != glue.batch})
    return found
