"""What is found out about the full model before it is split: how layers are split inside, and which layers read what.

Layers run on the example batch, without storages; the model is not changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """What is seen of the full model by running it on an example."""

    tensor: Mapping[str, TensorPlan] = field(default_factory=dict)  # by layer name, where a strategy splits matmuls
    channel: Mapping[str, ChannelPlan] = field(default_factory=dict)  # by module path, where it shares channels
    # how arguments of layers hold the samples; see ``ActivationRedistributor``
    sampled: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    flow: LayerFlow | None = None  # which layers read what, where there are several stages


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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan for a model, and all that must be found of the full model before it is split."""

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
    """Assign layers to stages, check the plan, and examine the full model, which is not changed; no communication.

    ``group`` is the number of this rank's group of devices: its stage, where each group has one.
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
    """Run the full model on an example to see how layers of the numbered stages can be split, and which read what.

    Raises:
        InputError: a layer that cannot be split as its strategy says.
    """
    if tensor is None:
        tensor = tensor_plans(model, [placed for stage in stages for placed in stage], batch)
    check_samples_move(model, stages, batch)
    examined = layer_plans(model, [stages[number] for number in numbers], tensor, batch)
    return replace(examined, flow=flow_or_none(model, layers, batch, loss_fn)) if len(stages) > 1 else examined


def flow_or_none(model: nn.Module, layers: Sequence[Layer], batch: Any, loss_fn: LossFn | None) -> LayerFlow | None:
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


def layer_plans(
    model: nn.Module, stages: Iterable[Sequence[LayerAssignment]], tensor: Mapping[str, TensorPlan], batch: Any
) -> Examined:
    """How the layers of some stages are split inside.

    Raises:
        InputError: a layer that cannot be split as its strategy says.
        TraceError: the model does not run on the batch.
    """
    parts = list(stages)
    channel = channel_plans(model, [placed for stage in parts for placed in stage], batch)
    unlike = [name for stage in parts for name in _unlike_code_between(stage)]
    sampled = sample_arguments(model, unlike, batch) if unlike and batch is not None else {}
    return Examined(tensor, channel, sampled)


def check_samples_move(model: nn.Module, stages: Sequence[Sequence[LayerAssignment]], batch: Any) -> None:
    """See that samples can be moved, where layers do not share them alike.

    Raises:
        InputError: a layer takes or returns them in a way that does not say where they are.
    """
    glues = [glue_layout(stage).batch for stage in stages]
    unlike = [
        path
        for glue, stage in zip(glues, stages, strict=True)
        for placed in stage
        if placed.layout.batch != glue or (placed.layer.role is Role.BLOCK and len({*glues}) > 1)
        for path in placed.layer.modules
    ]
    if batch is not None and unlike:
        check_folded(sample_arguments(model, unlike, batch))


def tensor_plans(model: nn.Module, placed: Iterable[LayerAssignment], batch: Any) -> dict[str, TensorPlan]:
    """Tensor plans by layer name, of the layers whose strategy splits them; equal blocks are examined once.

    Arguments and errors as of ``layer_plans``; there must be a batch.
    """
    placed = list(placed)
    split = [one for one in placed if lines_of(one.strategy).matmuls.size > 1]
    blocks = {one.layer.kind: one.layer.name for one in reversed(split) if one.layer.role is Role.BLOCK}
    calls: Mapping[str, BlockCall] = {}
    if blocks:
        if batch is None:
            remedy = "The plan splits blocks by tensor parallelism; give an example batch, so they can be examined."
            raise InputError("batch", None, remedy)
        calls = block_calls(model, list(blocks.values()), batch)
    by_kind = {}
    shared = held_twice(model, [one.layer for one in placed])
    for kind, name in blocks.items():
        if name not in calls:
            raise InputError("layer", name, "It does not run on the example batch, so it cannot be split.")
        by_kind[kind] = infer_block(model.get_submodule(name), calls[name].args, calls[name].kwargs, shared[kind])
    plans = dict[str, TensorPlan]()
    for layer in (one.layer for one in split):
        modules = {path: model.get_submodule(path) for path in layer.modules}
        plans[layer.name] = by_kind[layer.kind] if layer.role is Role.BLOCK else infer_edge(modules, model)
    return plans


def channel_plans(model: nn.Module, placed: Iterable[LayerAssignment], batch: Any) -> dict[str, ChannelPlan]:
    """Channel plans by module path, of the layers whose strategy shares channels; equal blocks are examined once.

    Of the layers before and after the blocks, each module is examined by itself; those that have nothing to be split
    are left out, and stay whole. Arguments and errors as of ``layer_plans``.
    """
    split = [one for one in placed if lines_of(one.strategy).channels.size > 1]
    if split and batch is None:
        raise InputError("batch", None, "The plan shares channels of layers; give an example batch to examine them on.")
    calls = block_calls(model, {path for one in split for path in one.layer.modules}, batch) if split else {}
    examined: dict[object, ChannelPlan] = {}
    plans: dict[str, ChannelPlan] = {}
    for one in split:
        layer = {}
        for path in one.layer.modules:
            call = calls.get(path)
            if call is None or next(model.get_submodule(path).parameters(), None) is None:
                continue
            shapes = tuple(tuple(tensor.shape) for tensor in call.inputs)
            key = (one.layer.kind if one.layer.role is Role.BLOCK else path, shared_by(one.strategy), shapes)
            if key not in examined:
                examined[key] = _examined(model, one, call)
            layer[path] = examined[key]
        if not any(plan.parts for plan in layer.values()):
            raise InputError(f"strategy of {one.layer.name}", str(one.strategy), "Nothing in it has channels to share.")
        plans |= layer
    return plans


def _examined(model: nn.Module, one: LayerAssignment, call: BlockCall) -> ChannelPlan:
    by, degree = shared_by(one.strategy)
    try:
        return infer_channels(model.get_submodule(call.path), call.args, call.kwargs, by, degree)
    except InputError as error:
        raise InputError(f"{by} of layer {one.layer.name}", degree, f"{error.field}: {error.remedy}") from error


def _unlike_code_between(stage: Sequence[LayerAssignment]) -> list[str]:
    """Blocks whose layout is another than that of the code between layers."""
    glue = glue_layout(stage)
    return [
        placed.layer.name
        for placed in stage
        if placed.layer.role is Role.BLOCK and placed.layout.replicated("sequence") != glue.replicated("sequence")
    ]
