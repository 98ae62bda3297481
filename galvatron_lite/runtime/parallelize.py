"""From a plan to a model that trains by it: layers are assigned and examined, stages cut, and every layer split."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from galvatron_lite.errors import TraceError
from galvatron_lite.model.batch import LossFn
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.cyclic.stages import structure_of
from galvatron_lite.parallelism.data.apply import GradientReducer
from galvatron_lite.parallelism.pipeline.deferral import Deferral, defer_weights
from galvatron_lite.parallelism.pipeline.flow import LayerFlow, flow_of
from galvatron_lite.parallelism.pipeline.runner import Chunk, PipelineRunner
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
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.plans.execution import pipeline_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.activations.hooks import hooks_of, install_hooks
from galvatron_lite.runtime.activations.layout import Layout
from galvatron_lite.runtime.activations.redistribute import BoxExchange
from galvatron_lite.runtime.activations.traffic import ActivationRedistributor, border_of, rules_under
from galvatron_lite.runtime.assignment import (
    LayerAssignment,
    LayerPlans,
    Stages,
    glue_layout,
    glue_of,
    layer_plans,
    place_layers,
    tensor_plans,
)
from galvatron_lite.runtime.compiled import compile_blocks
from galvatron_lite.runtime.loss.routers import check_router_losses, install_router_losses
from galvatron_lite.runtime.mesh import Meshes, StrategyGroups
from galvatron_lite.runtime.parameters.managed import (
    ManagedParameter,
    Updates,
    hides_norm,
    managed_parameters,
    reduced_parameters,
)
from galvatron_lite.runtime.parameters.materialize import Materializer
from galvatron_lite.runtime.peers import broadcast_values, share_random_state, shares_samples
from galvatron_lite.runtime.sharding import Sharded, StageSplitter

Place = Callable[[nn.Module, Layer], None]
"""Brings a layer of a structure out of which a stage was cut already onto the device."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What a plan needs to know of the full model, found by running it on an example."""

    splits: LayerPlans  # how the layers of some stages are split inside
    flow: LayerFlow | None  # which layers read what, where there are several stages


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
    examined: Examined | None = None  # of the first plan


@dataclass(slots=True)
class StageRuntime:
    """A stage of this rank, ready to train."""

    stage: tuple[LayerAssignment, ...]  # its layers and strategies
    meshes: Meshes
    owned: list[ManagedParameter]  # its parameters
    sharded: Sharded  # how they were split
    reducer: GradientReducer  # sums the gradients that FSDP does not
    traffic: ActivationRedistributor  # shared by the hooks
    pipeline: PipelineRunner | None  # runs the schedule; None for a single stage
    shared: SharedCopies | None  # copies of parameters on several stages; None for a single stage
    updates: Updates  # brings gradients to what the optimizer updates, and updated values back
    model: nn.Module  # holds its modules, under the names of the full model
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


def parallelize(
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
    """A plan for a model, and all that must be found of the full model before it is split."""

    plan: Plan
    layers: Sequence[Layer]  # of the model
    stages: Stages  # the layers of each stage, with their strategies
    ties: tuple[SharedParameter, ...]  # parameters that layers share
    splits: LayerPlans  # how the layers of this rank's stages are split inside
    flow: LayerFlow | None  # which layers read what, where there are several stages

    @property
    def names(self) -> list[list[str]]:
        """Names of the layers of each stage."""
        return [[placed.layer.name for placed in stage] for stage in self.stages]


def prepare(
    model: nn.Module, plan: Plan, layers: Sequence[Layer], batch: Any, group: int, options: SetupOptions
) -> Prepared:
    """Assign layers to stages, check the plan, and examine the full model, which is not changed; no communication.

    Args:
        model: the full one.
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
    check_router_losses(model, batch, plan)
    examined = options.examined
    if examined is None:
        own = pipeline_of(plan).stages_of(group)
        examined = examine(model, layers, stages, own, batch, options.loss_fn, options.tensor_plans)
    prepared = Prepared(plan, layers, stages, ties, examined.splits, examined.flow)
    check_stages(layers, prepared.names, examined.flow)
    return prepared


def examine(
    model: nn.Module,
    layers: Sequence[Layer],
    stages: Stages,
    some: Iterable[int],
    batch: Any,
    loss_fn: LossFn | None,
    tensor: Mapping[str, TensorPlan] | None = None,
) -> Examined:
    """Run the full model on an example to see how layers of some of the stages can be split, and which read what.

    Raises:
        InputError: a layer that cannot be split as its strategy says.
    """
    if tensor is None:
        tensor = tensor_plans(model, [placed for stage in stages for placed in stage], batch)
    splits = layer_plans(model, [stages[number] for number in some], tensor, batch)
    return Examined(splits, known_flow(model, layers, batch, loss_fn) if len(stages) > 1 else None)


def build(
    model: nn.Module, prepared: Prepared, meshes: Meshes, options: SetupOptions, place: Place | None = None
) -> list[StageRuntime]:
    """Split a model in place, and make what trains it. All ranks call it together; it moves no values.

    Args:
        model: the full one; where the rank has several stages, the first is made of it, the others of copies of its
            structure.
        prepared: for it.
        meshes: process groups.
        options: of the model.
        place: brings a layer of such a structure onto the device; gives it its values if not given.

    Returns:
        One of each of the rank's stages, in the order of the model.
    """
    stages, names, pipeline = prepared.stages, prepared.names, pipeline_of(prepared.plan)
    numbers = pipeline.stages_of(meshes.stage_index)
    models: dict[int, nn.Module] = {}
    cuts: list[StageModel | None] = []
    for structure, number in zip([model, *(structure_of(model) for _ in numbers[1:])], numbers, strict=True):
        cuts.append(_cut_stage(structure, prepared, number, options.device) if len(stages) > 1 else None)
        untie(structure, shared_before(models, number, prepared.ties, names))
        models[number] = structure
    runtimes, chunks = [], []
    for number, cut in zip(numbers, cuts, strict=True):
        structure, stage = models[number], stages[number]
        earlier = {other: one for other, one in models.items() if other < number}
        tied = shared_before(earlier, number, prepared.ties, names)
        incoming = frozenset().union(*map(_layouts_of, stages[:number]))
        deferral = Deferral() if cut is not None and pipeline.splits_backward else None
        if deferral is not None:
            _defer(structure, stage, deferral)
        at = None if place is None else functools.partial(place, structure)
        runtime = assemble(
            structure, prepared.layers, stage, meshes, prepared.splits, options, incoming, place=at, tied=tied
        )
        runtime.is_last = number == len(stages) - 1
        runtimes.append(runtime)
        if cut is not None:
            chunks.append(Chunk(cut, runtime.traffic.pack, runtime.traffic.unpack, deferral))
    if len(stages) > 1:
        strategies = {placed.layer.name: placed.strategy for stage in stages for placed in stage}
        reduced = {one.parameter: one.reduced for runtime in runtimes for one in runtime.owned}
        shared = SharedCopies(models, prepared.ties, names, strategies, options.groups, reduced, pipeline)
        groups = pipeline_groups(pipeline.groups, options.groups, turns=pipeline.virtual > 1)
        runner = PipelineRunner(chunks, groups, pipeline, meshes.stage_index, options.device)
        for runtime in runtimes:
            runtime.shared, runtime.pipeline = shared, runner
            runtime.updates.lowering.late, runtime.updates.guarded = shared.parameters, True
    return runtimes


def assemble(
    model: nn.Module,
    layers: Sequence[Layer],
    stage: tuple[LayerAssignment, ...],
    meshes: Meshes,
    splits: LayerPlans,
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
        splits: how layers are split inside.
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
    for layer in layers:
        # it has no parameters on later stages, but its buffers may still be read
        if layer.role is Role.BEFORE and all(placed.layer is not layer for placed in stage):
            place(layer)
    splitter = StageSplitter(
        model, stage, meshes, splits, options.compute, options.expert_capacity, options.draws
    )  # fmt: skip
    sharded = splitter.split(place, roots or [model])
    if options.compute is not None:
        narrow_norms(model)
    glue = glue_of(stage).strategy
    border = border_of(glue_layout(stage), glue, meshes.groups(glue))
    mover = BoxExchange(meshes.groups(stage[0].strategy).everyone, meshes.index_in_stage)
    traffic = ActivationRedistributor(mover, border, rules_under(glue), options.compute, splits.sampled)
    install_hooks(model, sharded.borders, traffic, incoming, users)
    install_router_losses(model, stage, meshes, sharded.experts)
    tie(model, tied or {})
    elsewhere = {id(parameter) for parameter in (tied or {}).values()}
    every = managed_parameters(model, stage, meshes, sharded.shards, sharded.experts)
    owned = [one for one in every if id(one.parameter) not in elsewhere]
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
        remedy = "Each layer is taken to read the output of the layer before it alone; one that reads more is refused."
        warnings.warn(f"{unseen} {remedy}", stacklevel=2)
        return None


def make_pipeline_groups(prepared: Prepared, groups: ProcessGroups) -> None:
    """Make the process groups between stages beforehand; every rank of the world calls it."""
    if len(prepared.stages) == 1:
        return
    pipeline = pipeline_of(prepared.plan)
    for shared in prepared.ties:
        if len(places := holding_groups(holding_stages(shared, prepared.names), pipeline)) > 1:
            groups.create(place_groups(places, pipeline.groups), COPIES)
    pipeline_groups(pipeline.groups, groups, turns=pipeline.virtual > 1)


def _cut_stage(model: nn.Module, prepared: Prepared, number: int, device: torch.device) -> StageModel:
    """Make the model run one stage.

    The model's forward then returns None behind the stage's last layer, instead of being left by an exception: FSDP's
    hooks behind it must run, or a later step's gathering would not wait for the optimizer.
    """
    cut = StageModel(model, prepared.layers, prepared.names[number], device, prepared.flow)
    forward = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except StageEnd:
            return None

    model.forward = run
    return cut


def _layouts_of(stage: Sequence[LayerAssignment]) -> set[Layout]:
    """How what a stage hands on may lie: it passes on what came from earlier ones as well."""
    return {glue_layout(stage), *(placed.layout for placed in stage)}


def _defer(model: nn.Module, stage: Sequence[LayerAssignment], deferral: Deferral) -> None:
    """Leave the gradients of weights to passes of their own, but where ZeRO reduces them when backward ends."""
    for placed in stage:
        for path in placed.layer.modules if placed.strategy.zero_stage in (0, 1) else ():
            defer_weights(model.get_submodule(path), deferral)
