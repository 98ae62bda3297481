"""The stages of this rank: cut out of the user's model, and joined into a pipeline once each is split."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from galvatron_lite.parallelism.cyclic.stages import structure_of
from galvatron_lite.parallelism.data.apply import GradientReducer
from galvatron_lite.parallelism.pipeline.deferral import Deferral, defer_weights
from galvatron_lite.parallelism.pipeline.runner import Chunk, PipelineRunner, pipeline_groups
from galvatron_lite.parallelism.pipeline.stage import StageEnd, StageModel
from galvatron_lite.parallelism.pipeline.tied import SharedCopies, shared_before, untie
from galvatron_lite.plans.io import pipeline_of
from galvatron_lite.runtime.activations.layout import ActivationLayout
from galvatron_lite.runtime.activations.traffic import ActivationRedistributor
from galvatron_lite.runtime.assignment import LayerAssignment, glue_layout, glue_of
from galvatron_lite.runtime.mesh import Meshes, StrategyGroups
from galvatron_lite.runtime.parameters.managed import ManagedParameter, Updates
from galvatron_lite.runtime.preparation import Prepared, SetupOptions
from galvatron_lite.runtime.sharding import Sharded


@dataclass(slots=True)
class StageRuntime:
    """A stage of this rank, ready to train."""

    stage: tuple[LayerAssignment, ...]  # its layers and strategies
    meshes: Meshes
    owned: list[ManagedParameter]  # its parameters
    sharded: Sharded  # how they were split
    reducer: GradientReducer  # sums the gradients that FSDP does not
    traffic: ActivationRedistributor  # shared by the hooks
    updates: Updates  # brings gradients to what the optimizer updates, and updated values back
    model: nn.Module  # holds its modules, under the names of the full model
    pipeline: PipelineRunner | None = None  # runs the schedule; None for a single stage
    shared: SharedCopies | None = None  # copies of parameters on several stages; None for a single stage
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
        """Whether parameters, or masters of them, are split over ranks, or other stages have theirs."""
        split = any(one.shard is not None or isinstance(one.held, DTensor) for one in self.owned)
        return split or bool(self.sharded.experts) or self.pipeline is not None


@dataclass(frozen=True, slots=True)
class RankStage:
    """A stage that was cut out of a structure of the model."""

    number: int
    model: nn.Module  # the structure
    cut: StageModel | None  # None where the plan has one stage
    deferral: Deferral | None  # of the gradients of weights, where the schedule leaves them to passes of their own
    incoming: frozenset[ActivationLayout]  # in which what earlier stages send may lie: they pass on what came to them


def cut_stages(model: nn.Module, prepared: Prepared, meshes: Meshes, device: torch.device) -> list[RankStage]:
    """This rank's stages, in the order of the model: the first of the user's model, the others of copies of it."""
    pipeline, stages = pipeline_of(prepared.plan), prepared.stages
    models: dict[int, nn.Module] = {}
    cuts = []
    for number in pipeline.stages_of(meshes.stage_index):
        structure = structure_of(model) if models else model
        models[number] = structure
    for number, structure in models.items():
        cut = _cut_stage(structure, prepared, number, device) if len(stages) > 1 else None
        earlier = {other: model for other, model in models.items() if other < number}
        untie(structure, shared_before(earlier, number, prepared.ties, prepared.names))
        deferral = Deferral() if cut is not None and pipeline.splits_backward else None
        if deferral is not None:
            _defer(structure, stages[number], deferral)
        incoming = {
            layout for stage in stages[:number] for layout in (glue_layout(stage), *(placed.layout for placed in stage))
        }
        cuts.append(RankStage(number, structure, cut, deferral, frozenset(incoming)))
    return cuts


def _cut_stage(model: nn.Module, prepared: Prepared, number: int, device: torch.device) -> StageModel:
    """Make the model run one stage.

    The model's forward then returns None behind the stage's last layer, instead of being left by an exception: FSDP's
    hooks behind it must run, or a later step's gathering would not wait for the optimizer.
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
    """Leave the gradients of weights to passes of their own, but where ZeRO reduces them when backward ends."""
    for placed in stage:
        for path in placed.layer.modules if placed.strategy.parameter_shards == 1 else ():
            defer_weights(model.get_submodule(path), deferral)


def join_stages(
    runtimes: Sequence[StageRuntime],
    cuts: Sequence[RankStage],
    prepared: Prepared,
    meshes: Meshes,
    options: SetupOptions,
) -> None:
    """Connect the split stages of this rank to the others, by the plan's schedule; nothing to do for one stage."""
    chunks = [
        Chunk(cut.cut, runtime.traffic.pack, runtime.traffic.unpack, cut.deferral)
        for cut, runtime in zip(cuts, runtimes, strict=True)
        if cut.cut is not None
    ]
    if not chunks:
        return
    pipeline = pipeline_of(prepared.plan)
    strategies = {placed.layer.name: placed.strategy for stage in prepared.stages for placed in stage}
    owned = [one for runtime in runtimes for one in runtime.owned]
    reduced, held = {one.parameter: one.reduced for one in owned}, {one.parameter: one.held for one in owned}
    models = {cut.number: cut.model for cut in cuts}
    shared = SharedCopies(models, prepared.ties, prepared.names, strategies, options.groups, reduced, held, pipeline)
    groups = pipeline_groups(pipeline.groups, options.groups, turns=pipeline.virtual > 1)
    runner = PipelineRunner(chunks, groups, pipeline, meshes.stage_index, options.device)
    for runtime in runtimes:
        runtime.shared, runtime.pipeline = shared, runner
        runtime.updates.lowering.late, runtime.updates.guarded = shared.parameters, True
