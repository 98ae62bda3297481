"""What the plan does with every layer: its stage, its strategy and layout, and how it is split inside.

How a layer is split inside is inferred by running it on an example batch, before the model is changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace_run import BlockCall, block_calls, check_folded, sample_arguments
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.channel.parts import ChannelPlan
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.infer import infer_block, infer_edge
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.plans.schema import LayerRun, Plan
from galvatron_lite.runtime.activations.layout import Layout, layout_of


@dataclass(frozen=True, slots=True)
class LayerAssignment:
    """A layer and what the plan does with it."""

    layer: Layer
    strategy: Strategy

    @property
    def layout(self) -> Layout:
        """How the activations lie that the layer takes and returns. Edges hold all tokens of their samples."""
        layout = layout_of(self.strategy)
        return layout if self.layer.role is Role.BLOCK else replace(layout, sequence=1)


Stages = tuple[tuple[LayerAssignment, ...], ...]


def place_layers(plan: Plan, layers: Sequence[Layer]) -> Stages:
    """Every layer of the model with its strategy, by stage.

    Raises:
        InputError: the plan names a layer the model does not have, leaves one out, or takes them in another order.
    """
    names = [layer.name for layer in layers]
    stages, start = list[tuple[LayerAssignment, ...]](), 0
    for number, stage in enumerate(plan.stages):
        placed: list[LayerAssignment] = []
        for run in stage.runs:
            chosen = _layers_of(run, layers, names, start, f"plan.stages[{number}]")
            placed += [LayerAssignment(layer, run.strategy) for layer in chosen]
            start += len(chosen)
        stages.append(tuple(placed))
    if start < len(names):
        raise InputError("plan", plan.model, f"It says nothing about the layers {', '.join(names[start:])}.")
    return tuple(stages)


def _layers_of(run: LayerRun, layers: Sequence[Layer], names: list[str], start: int, field: str) -> Sequence[Layer]:
    for name in (run.first, run.last):
        if name not in names:
            raise InputError(
                f"{field}: layer", name, f"The model has no such layer. Its layers are: {_shorten(names)}."
            )
    first, stop = names.index(run.first), names.index(run.last) + 1
    if first != start or stop - first != run.count:
        remedy = (
            f"The plan is for a model with other layers, or was changed: the next {run.count} layer(s) of this one are "
            f"{_shorten(names[start : start + run.count])}. Plan for this model anew."
        )
        raise InputError(f"{field}: layers", f"{run.first} to {run.last}", remedy)
    return layers[first:stop]


def _shorten(names: Sequence[str]) -> str:
    shown = list(names) if len(names) <= 12 else [*names[:6], "...", *names[-5:]]
    return ", ".join(shown)


def glue_of(stage: Sequence[LayerAssignment]) -> LayerAssignment:
    """The layer in whose layout (with whole tokens) a stage's inputs lie, and what runs between its layers.

    It is the first of the edges, else the first block.
    """
    return next((placed for placed in stage if placed.layer.role is not Role.BLOCK), stage[0])


def glue_layout(stage: Sequence[LayerAssignment]) -> Layout:
    """The layout of a stage's inputs, and of what runs between its layers."""
    return glue_of(stage).layout.whole_tokens


def check_samples(samples: int, plan: Plan, microbatches: int) -> None:
    """Raise InputError, naming the nearest sizes that can be used, where a batch cannot be shared evenly."""
    check_divisible(samples, [run.strategy.batch_degree for stage in plan.stages for run in stage.runs], microbatches)


def check_divisible(samples: int, degrees: Sequence[int], microbatches: int) -> None:
    """``check_samples`` by the ways in which layers share samples."""
    unit = microbatches * math.lcm(*degrees)
    if samples % unit or samples == 0:
        below, above = samples // unit * unit, (samples // unit + 1) * unit
        near = f"{below} or {above}" if below else f"{above}"
        raise InputError("batch", samples, f"The plan needs a multiple of {unit} samples; the nearest: {near}.")


@dataclass(frozen=True, slots=True)
class LayerPlans:
    """How the layers of a rank's stages are split inside."""

    tensor: Mapping[str, TensorPlan] = field(default_factory=dict)  # by layer name, where a strategy splits matmuls
    channel: Mapping[str, ChannelPlan] = field(default_factory=dict)  # by module path, where it shares channels
    # how arguments of layers hold the samples; see ``ActivationRedistributor``
    sampled: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def layer_plans(
    model: nn.Module, stages: Iterable[Sequence[LayerAssignment]], tensor: Mapping[str, TensorPlan], batch: Any
) -> LayerPlans:
    """How the layers of some stages are split inside.

    Raises:
        InputError: a layer that cannot be split as its strategy says.
        TraceError: the model does not run on the batch.
    """
    parts = list(stages)
    channel = channel_plans(model, [placed for stage in parts for placed in stage], batch)
    unlike = {name: samples for stage in parts for name, samples in _unlike_code_between(stage).items()}
    if not unlike or batch is None:
        return LayerPlans(tensor, channel)
    sampled = sample_arguments(model, list(unlike), batch)
    check_folded({name: arguments for name, arguments in sampled.items() if unlike[name]})
    return LayerPlans(tensor, channel, sampled)


def tensor_plans(model: nn.Module, placed: Iterable[LayerAssignment], batch: Any) -> dict[str, TensorPlan]:
    """Tensor plans by layer name, of the layers whose strategy splits them; equal blocks are examined once.

    Arguments and errors as of ``layer_plans``; there must be a batch.
    """
    split = [one for one in placed if one.strategy.tensor > 1]
    blocks = {one.layer.kind: one.layer.name for one in reversed(split) if one.layer.role is Role.BLOCK}
    calls: Mapping[str, BlockCall] = {}
    if blocks:
        if batch is None:
            remedy = "The plan splits blocks by tensor parallelism; give an example batch, so they can be examined."
            raise InputError("batch", None, remedy)
        calls = block_calls(model, list(blocks.values()), batch)
    by_kind = {}
    for kind, name in blocks.items():
        if name not in calls:
            raise InputError("layer", name, "It does not run on the example batch, so it cannot be split.")
        by_kind[kind] = infer_block(model.get_submodule(name), calls[name].args, calls[name].kwargs)
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
    split = [one for one in placed if one.strategy.slices > 1]
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
            key = (one.layer.kind if one.layer.role is Role.BLOCK else path, _shared_by(one.strategy), shapes)
            if key not in examined:
                examined[key] = _examined(model, one, call)
            layer[path] = examined[key]
        if not any(plan.parts for plan in layer.values()):
            raise InputError(f"strategy of {one.layer.name}", str(one.strategy), "Nothing in it has channels to share.")
        plans |= layer
    return plans


def _shared_by(strategy: Strategy) -> tuple[str, int]:
    if strategy.filters > 1 and strategy.channels > 1:
        raise InputError("filters", strategy.filters, "Share the filters of a layer or its channels, not both.")
    return ("filters", strategy.filters) if strategy.filters > 1 else ("channels", strategy.channels)


def _examined(model: nn.Module, one: LayerAssignment, call: BlockCall) -> ChannelPlan:
    by, degree = _shared_by(one.strategy)
    try:
        return infer_channels(model.get_submodule(call.path), call.args, call.kwargs, by, degree)
    except InputError as error:
        raise InputError(f"{by} of layer {one.layer.name}", degree, f"{error.field}: {error.remedy}") from error


def _unlike_code_between(stage: Sequence[LayerAssignment]) -> dict[str, bool]:
    """Blocks whose layout is another than that of the code between layers; and whether it shares samples otherwise."""
    glue = glue_layout(stage)
    return {
        placed.layer.name: placed.layout.batch != glue.batch
        for placed in stage
        if placed.layer.role is Role.BLOCK and replace(placed.layout, sequence=1) != replace(glue, sequence=1)
    }
