"""The stages of this rank: cut out of the user's model, split, and joined into a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.cyclic.stages import structure_of
from galvatron_lite.parallelism.data.apply import GradientReducer
from galvatron_lite.parallelism.pipeline.deferral import Deferral, defer_weights
from galvatron_lite.parallelism.pipeline.runner import Chunk, PipelineRunner, pipeline_groups
from galvatron_lite.parallelism.pipeline.stage import StageEnd, StageModel
from galvatron_lite.parallelism.pipeline.tied import SharedCopies, shared_before, tie, untie
from galvatron_lite.parallelism.precision import hold_frozen, narrow_experts, narrow_norms
from galvatron_lite.parallelism.sharded.calls import intercept_custom_functions
from galvatron_lite.plans.io import pipeline_of
from galvatron_lite.runtime.activations.hooks import hooks_of, install_hooks
from galvatron_lite.runtime.activations.layout import ActivationLayout
from galvatron_lite.runtime.activations.traffic import ActivationRedistributor, redistributor_of
from galvatron_lite.runtime.assignment import LayerAssignment, glue_layout, glue_of
from galvatron_lite.runtime.compiled import compile_blocks
from galvatron_lite.runtime.loss.routers import install_router_losses
from galvatron_lite.runtime.mesh import Meshes
from galvatron_lite.runtime.parameters.guard import hides_norm, read_full_values
from galvatron_lite.runtime.parameters.managed import ManagedParameter, Updates, managed_parameters, reduced_parameters
from galvatron_lite.runtime.parameters.materialize import Materializer
from galvatron_lite.runtime.preparation import Examined, Prepared, SetupOptions
from galvatron_lite.runtime.sharding import Sharded, StageSplitter


@dataclass(slots=True)
class StageRuntime:
    """A stage of this rank, ready to train."""

    stage: tuple[LayerAssignment, ...]  # its layers and strategies
    meshes: Meshes
    owned: list[ManagedParameter]  # its parameters
    sharded: Sharded  # how they were split
    reducer: GradientReducer  # sums the gradients that FSDP does not
    traffic: ActivationRedistributor  # shared by the hooks
    updates: Updates  # carries gradients to what the optimizer updates, and updated values back
    model: nn.Module  # contains its modules, under the names of the full model
    pipeline: PipelineRunner | None = None  # runs the schedule; None for a single stage
    shared: SharedCopies | None = None  # copies of parameters on several stages; None for a single stage
    is_last: bool = True  # whether this stage computes the loss

    @property
    def samples_group(self) -> dist.ProcessGroup | None:
        """Ranks with other samples in the layer that shares them most; None: all have the same.

        A number that this layer returns, such as a term of the loss, is a mean over its rank's samples.
        """
        layers = (glue_of(self.stage), *self.stage)
        return self.meshes.groups(max(layers, key=lambda placed: placed.strategy.batch_degree).strategy).batch

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """Names of parameters that another stage counts in the gradient's norm."""
        return frozenset() if self.shared is None else self.shared.counted_elsewhere

    @property
    def holds_shares(self) -> bool:
        """Whether parameters, or masters of them, are split over ranks, or some are on other stages."""
        split = any(managed.shard is not None or isinstance(managed.held, DTensor) for managed in self.owned)
        return split or bool(self.sharded.experts) or self.pipeline is not None


@dataclass(frozen=True, slots=True)
class RankStage:
    """A stage that was cut out of a copy of the model's structure."""

    number: int
    model: nn.Module  # the copy; of this rank's first stage the user's model
    cut: StageModel | None  # None if the plan has one stage
    deferral: Deferral | None  # of the gradients of weights, if the schedule computes them in passes of their own
    incoming: frozenset[ActivationLayout]  # layouts that tensors from earlier stages may have


def cut_stages(model: nn.Module, prepared: Prepared, meshes: Meshes, device: torch.device) -> list[RankStage]:
    """Cut this rank's stages out of the model, in order: the first of the user's model, the others of copies of it."""
    pipeline, stages = pipeline_of(prepared.plan), prepared.stages
    models: dict[int, nn.Module] = {}
    for number in pipeline.stages_of(meshes.stage_index):
        models[number] = structure_of(model) if models else model
    cuts: list[RankStage] = []
    for number, structure in models.items():
        cut = _cut_stage(structure, prepared, number, device) if len(stages) > 1 else None
        deferral = Deferral() if cut is not None and pipeline.splits_backward else None
        incoming = {
            layout for stage in stages[:number] for layout in (glue_layout(stage), *(placed.layout for placed in stage))
        }
        rank_stage = RankStage(number, structure, cut, deferral, frozenset(incoming))
        untie(structure, tied_before(rank_stage, cuts, prepared))
        if deferral is not None:
            _defer(structure, stages[number], deferral)
        cuts.append(rank_stage)
    return cuts


def tied_before(cut: RankStage, cuts: Sequence[RankStage], prepared: Prepared) -> dict[str, nn.Parameter]:
    """Parameters that a stage shares with earlier stages of this rank, by name in the stage."""
    earlier = {other.number: other.model for other in cuts if other.number < cut.number}
    return shared_before(earlier, cut.number, prepared.ties, prepared.names)


def _cut_stage(model: nn.Module, prepared: Prepared, number: int, device: torch.device) -> StageModel:
    """Make the model run one stage.

    The model's forward then returns None behind the stage's last layer, instead of raising an exception: FSDP's hooks
    behind it must run, or a later step's gathering would not wait for the optimizer.
    """
    names = prepared.names
    cut = StageModel(model, prepared.layers, names[number], device, prepared.examined.flow, names)
    forward = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except StageEnd:
            return None

    model.forward = run
    return cut


def _defer(model: nn.Module, stage: Sequence[LayerAssignment], deferral: Deferral) -> None:
    """Compute the gradients of weights in passes of their own, except where ZeRO reduces them when backward ends."""
    for placed in stage:
        for path in placed.layer.modules if placed.strategy.parameter_shards == 1 else ():
            defer_weights(model.get_submodule(path), deferral)


def split_stage(
    model: nn.Module,
    layers: Sequence[Layer],
    stage: tuple[LayerAssignment, ...],
    meshes: Meshes,
    examined: Examined,
    options: SetupOptions,
    incoming: Collection[ActivationLayout] = (),
    roots: Sequence[nn.Module] = (),
    place: Callable[[Layer], None] | None = None,
    tied: Mapping[str, nn.Parameter] | None = None,
) -> StageRuntime:
    """Split a stage in place, and create what trains it, except for the pipeline. All ranks of the stage call it.

    Args:
        model: contains the layers of the stage, and no real parameter of others.
        layers: of the full model.
        incoming: layouts that tensors from earlier stages may have.
        roots: the modules of the model that are called; default: the model itself.
        place: moves a layer to the device; default: initialise layers on the meta device.
        tied: parameters that another stage of this rank trains, by name in this stage.
    """
    intercept_custom_functions()
    read_full_values()
    users, tied = hooks_of(model), tied or {}
    compile_blocks(model, stage, meshes, options.compile)
    if options.compute is not None:
        narrow_experts(model)
    place = place or Materializer(model, layers, options.device, options.seed, options.init_fn).place
    for layer in layers:
        # it has no parameters on later stages, but its buffers may still be read
        if layer.role is Role.BEFORE and all(placed.layer is not layer for placed in stage):
            place(layer)
    sharded = StageSplitter(model, stage, meshes, examined, options).split(place, roots or [model])
    if options.compute is not None:
        narrow_norms(model)
        hold_frozen(model)
    traffic = redistributor_of(stage, meshes, examined.sampled, options.compute)
    install_hooks(model, stage, sharded.borders, traffic, incoming, users)
    install_router_losses(model, stage, meshes, sharded.experts)
    tie(model, tied)
    trained_elsewhere = {id(parameter) for parameter in tied.values()}
    managed = [
        managed
        for managed in managed_parameters(model, stage, meshes, sharded.shards, sharded.experts, options.compute)
        if id(managed.parameter) not in trained_elsewhere
    ]
    reducer = GradientReducer(reduced_parameters(managed))
    updates = Updates(managed, reducer, guarded=hides_norm(managed, meshes.stage_devices))
    return StageRuntime(stage, meshes, managed, sharded, reducer, traffic, updates, model)


def join_stages(
    runtimes: Sequence[StageRuntime],
    cuts: Sequence[RankStage],
    prepared: Prepared,
    meshes: Meshes,
    options: SetupOptions,
) -> None:
    """Connect the split stages of this rank to the others, by the plan's schedule; do nothing for a single stage."""
    chunks = [
        Chunk(cut.cut, runtime.traffic.pack, runtime.traffic.unpack, cut.deferral)
        for cut, runtime in zip(cuts, runtimes, strict=True)
        if cut.cut is not None
    ]
    if not chunks:
        return
    pipeline = pipeline_of(prepared.plan)
    strategies = {placed.layer.name: placed.strategy for stage in prepared.stages for placed in stage}
    parameters = [managed for runtime in runtimes for managed in runtime.owned]
    reduced = {managed.parameter: managed.reduced for managed in parameters}
    held = {managed.parameter: managed.held for managed in parameters}
    models = {cut.number: cut.model for cut in cuts}
    shared = SharedCopies(models, prepared.ties, prepared.names, strategies, options.groups, reduced, held, pipeline)
    groups = pipeline_groups(pipeline.groups, options.groups, turns=pipeline.virtual > 1)
    runner = PipelineRunner(chunks, groups, pipeline, meshes.stage_index, options.device)
    for runtime in runtimes:
        runtime.shared, runtime.pipeline = shared, runner
        runtime.updates.lowering.late, runtime.updates.guarded = shared.parameters, True
