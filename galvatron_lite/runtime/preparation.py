"""What is determined of the full model before it is split: how layers are split inside, and which layers read what.

Layers run on the example batch, without storages; the model does not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from galvatron_lite.errors import InputError, TraceError
from galvatron_lite.model.batch import LossFn
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace.run import BlockCall, block_calls, check_folded, sample_arguments
from galvatron_lite.parallelism.channel.infer import infer_channels, shared_by
from galvatron_lite.parallelism.channel.parts import ChannelPlan
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.pipeline.flow import LayerFlow, flow_of
from galvatron_lite.parallelism.pipeline.runner import pipeline_groups, place_groups
from galvatron_lite.parallelism.pipeline.stage import check_stages
from galvatron_lite.parallelism.pipeline.tied import (
    COPIES,
    SharedParameter,
    check_shared,
    find_shared,
    holding_groups,
    holding_stages,
)
from galvatron_lite.parallelism.process_groups import ProcessGroups
from galvatron_lite.parallelism.rng.modules import Draws
from galvatron_lite.parallelism.tensor.infer import held_twice, infer_block, infer_edge
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.plans.io import pipeline_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.assignment import LayerAssignment, Stages, glue_layout, place_layers
from galvatron_lite.runtime.loss.routers import check_router_losses


@dataclass(frozen=True, slots=True)
class Examined:
    """What runs of the full model on an example show."""

    tensor: Mapping[str, TensorPlan] = field(default_factory=dict)  # by name of a layer with tensor parallelism
    channel: Mapping[str, ChannelPlan] = field(default_factory=dict)  # by path of a module whose channels are split
    # how arguments of layers contain the samples; see ``ActivationRedistributor``
    sampled: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    flow: LayerFlow | None = None  # which layers read what; None for a single stage, or if no example shows it


@dataclass(frozen=True, slots=True)
class SetupOptions:
    """Options for setting up a model; see ``ParallelModel``."""

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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan for a model, with all that has to be known of the full model before it is split."""

    plan: Plan
    layers: Sequence[Layer]  # of the model
    stages: Stages  # the layers of each stage, with their strategies
    ties: tuple[SharedParameter, ...]  # parameters that layers share
    examined: Examined  # of this rank's stages

    @property
    def names(self) -> list[list[str]]:
        """Names of the layers of each stage."""
        return [[placed.layer.name for placed in stage] for stage in self.stages]


def prepare(
    model: nn.Module, plan: Plan, layers: Sequence[Layer], batch: Any, group: int, options: SetupOptions
) -> Prepared:
    """Assign layers to stages, check the plan, and examine the full model, without communication.

    ``group`` is the index of this rank's group of devices: its stage, if each group has one stage.

    Raises:
        InputError: the plan does not fit the model.
    """
    stages = place_layers(plan, layers)
    ties = find_shared(model, layers)
    check_shared(ties, {placed.layer.name: placed.strategy for stage in stages for placed in stage})
    check_router_losses(model, batch, plan)
    examined = options.examined
    if examined is None:
        numbers = pipeline_of(plan).stages_of(group)
        examined = examine(model, layers, stages, numbers, batch, options.loss_fn, options.tensor_plans)
    prepared = Prepared(plan, layers, stages, ties, examined)
    check_stages(layers, prepared.names, examined.flow)
    return prepared


def examine(
    model: nn.Module,
    layers: Sequence[Layer],
    stages: Stages,
    numbers: Iterable[int],
    batch: Any,
    loss_fn: LossFn | None,
    tensor: Mapping[str, TensorPlan] | None = None,
) -> Examined:
    """Run the full model on an example to determine how the layers of some stages are split, and which read what.

    ``numbers`` are the indices of the stages whose layers are split on this rank; ``tensor`` is inferred by default.

    Raises:
        InputError: a layer cannot be split as its strategy says.
    """
    if tensor is None:
        tensor = tensor_plans(model, [placed for stage in stages for placed in stage], batch)
    check_samples_move(model, stages, batch)
    examined = layer_plans(model, [stages[number] for number in numbers], tensor, batch)
    return replace(examined, flow=flow_or_none(model, layers, batch, loss_fn)) if len(stages) > 1 else examined


def flow_or_none(model: nn.Module, layers: Sequence[Layer], batch: Any, loss_fn: LossFn | None) -> LayerFlow | None:
    """Determine which layers read what; None, with a warning, if the example does not show it."""
    if batch is None:
        return None
    try:
        return flow_of(model, layers, batch, loss_fn)
    except TraceError as error:
        remedy = "Each layer is taken to read the output of the layer before it alone; one that reads more is refused."
        warnings.warn(f"{error} {remedy}", stacklevel=2)
        return None


def make_pipeline_groups(prepared: Prepared, groups: ProcessGroups) -> None:
    """Create the process groups between stages in advance; every rank of the world calls it."""
    if len(prepared.stages) == 1:
        return
    pipeline = pipeline_of(prepared.plan)
    for shared in prepared.ties:
        places = holding_groups(holding_stages(shared, prepared.names), pipeline)
        if len(places) > 1:
            groups.create(place_groups(places, pipeline.groups), COPIES)
    pipeline_groups(pipeline.groups, groups, turns=pipeline.virtual > 1)


def layer_plans(
    model: nn.Module, stages: Sequence[Sequence[LayerAssignment]], tensor: Mapping[str, TensorPlan], batch: Any
) -> Examined:
    """Determine how the layers of some stages are split inside.

    Raises:
        InputError: a layer cannot be split as its strategy says.
        TraceError: the model does not run on the batch.
    """
    channel = channel_plans(model, [placed for stage in stages for placed in stage], batch)
    unlike = [
        placed.layer.name
        for stage in stages
        for placed in stage
        if placed.layer.role is Role.BLOCK
        and placed.layout.replicated("sequence") != glue_layout(stage).replicated("sequence")
    ]
    sampled = sample_arguments(model, unlike, batch) if unlike and batch is not None else {}
    return Examined(tensor, channel, sampled)


def check_samples_move(model: nn.Module, stages: Sequence[Sequence[LayerAssignment]], batch: Any) -> None:
    """Check that samples can be moved between layers that share them differently.

    Raises:
        InputError: a layer takes or returns them in a form that does not show where they are.
    """
    glue_degrees = [glue_layout(stage).batch for stage in stages]
    unlike = [
        path
        for glue_degree, stage in zip(glue_degrees, stages, strict=True)
        for placed in stage
        if placed.layout.batch != glue_degree or (placed.layer.role is Role.BLOCK and len({*glue_degrees}) > 1)
        for path in placed.layer.modules
    ]
    if batch is not None and unlike:
        check_folded(sample_arguments(model, unlike, batch))


def tensor_plans(model: nn.Module, placed: Collection[LayerAssignment], batch: Any) -> dict[str, TensorPlan]:
    """Infer how layers are split by tensor parallelism, by name; equal blocks are examined once.

    Errors are those of ``layer_plans``, and InputError without a batch.
    """
    split = [assigned for assigned in placed if lines_of(assigned.strategy).matmuls.size > 1]
    blocks = {one.layer.kind: one.layer.name for one in reversed(split) if one.layer.role is Role.BLOCK}
    calls: Mapping[str, BlockCall] = {}
    if blocks:
        if batch is None:
            remedy = "The plan splits blocks by tensor parallelism; give an example batch, so they can be examined."
            raise InputError("batch", None, remedy)
        calls = block_calls(model, list(blocks.values()), batch)
    by_kind = {}
    shared = held_twice(model, [assigned.layer for assigned in placed])
    for kind, name in blocks.items():
        if name not in calls:
            raise InputError("layer", name, "It does not run on the example batch, so it cannot be split.")
        by_kind[kind] = infer_block(model.get_submodule(name), calls[name].args, calls[name].kwargs, shared[kind])
    plans = dict[str, TensorPlan]()
    for layer in (assigned.layer for assigned in split):
        modules = {path: model.get_submodule(path) for path in layer.modules}
        plans[layer.name] = by_kind[layer.kind] if layer.role is Role.BLOCK else infer_edge(modules, model)
    return plans


def channel_plans(model: nn.Module, placed: Iterable[LayerAssignment], batch: Any) -> dict[str, ChannelPlan]:
    """Infer how modules are split by channels, by path; equal blocks are examined once.

    Of the layers before and after the blocks, each module is examined separately; those with nothing to split are left
    out, and stay complete. Errors are those of ``tensor_plans``.
    """
    split = [assigned for assigned in placed if lines_of(assigned.strategy).channels.size > 1]
    if split and batch is None:
        raise InputError("batch", None, "The plan shares channels of layers; give an example batch to examine them on.")
    calls = block_calls(model, {path for one in split for path in one.layer.modules}, batch) if split else {}
    examined: dict[object, ChannelPlan] = {}
    plans: dict[str, ChannelPlan] = {}
    for assigned in split:
        layer, strategy = assigned.layer, assigned.strategy
        of_layer = {}
        for path in layer.modules:
            call = calls.get(path)
            if call is None or next(model.get_submodule(path).parameters(), None) is None:
                continue
            shapes = tuple(tuple(tensor.shape) for tensor in call.inputs)
            key = (layer.kind if layer.role is Role.BLOCK else path, shared_by(strategy), shapes)
            if key not in examined:
                examined[key] = _infer_channels(model, assigned, call)
            of_layer[path] = examined[key]
        if not any(plan.parts for plan in of_layer.values()):
            raise InputError(f"strategy of {layer.name}", str(strategy), "Nothing in it has channels to share.")
        plans |= of_layer
    return plans


def _infer_channels(model: nn.Module, assigned: LayerAssignment, call: BlockCall) -> ChannelPlan:
    by, degree = shared_by(assigned.strategy)
    try:
        return infer_channels(model.get_submodule(call.path), call.args, call.kwargs, by, degree)
    except InputError as error:
        raise InputError(f"{by} of layer {assigned.layer.name}", degree, f"{error.field}: {error.remedy}") from error
