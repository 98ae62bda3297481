"""How each layer is split inside, found by examining it on an example batch before the model is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Role
from galvatron_lite.model.trace_run import BlockCall, block_calls, check_folded, sample_arguments
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.channel.parts import ChannelPlan
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.infer import infer_block, infer_edge
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.runtime.placement import LayerAssignment, glue_layout


@dataclass(frozen=True, slots=True)
class LayerPlans:
    """How the layers of a rank's stages are split inside."""

    tensor: Mapping[str, TensorPlan] = field(default_factory=dict)  # by layer name, where a strategy splits matmuls
    channel: Mapping[str, ChannelPlan] = field(default_factory=dict)  # by module path, where it shares channels
    # how arguments of layers hold the samples; see ``Traffic``
    sampled: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def layer_plans(
    model: nn.Module, stages: Iterable[Sequence[LayerAssignment]], tensor: Mapping[str, TensorPlan], batch: Any
) -> LayerPlans:
    """How the layers of some stages are split inside.

    Raises:
        InputError: a layer that cannot be split as its strategy says.
        TraceError: the model does not run on the batch.
    """
    channel: dict[str, ChannelPlan] = {}
    sampled: dict[str, Mapping[str, int]] = {}
    for stage in stages:
        channel |= channel_plans(model, stage, batch)
        sampled |= _sample_arguments(model, stage, batch)
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


def _sample_arguments(
    model: nn.Module, stage: Sequence[LayerAssignment], batch: Any
) -> Mapping[str, Mapping[str, int]]:
    """How the arguments of blocks hold samples that split them in another way than the code between layers."""
    glue = glue_layout(stage)
    unlike = {
        placed.layer.name: placed.layout.batch
        for placed in stage
        if placed.layer.role is Role.BLOCK and replace(placed.layout, sequence=1) != replace(glue, sequence=1)
    }
    if not unlike or batch is None:
        return {}
    arguments = sample_arguments(model, list(unlike), batch)
    check_folded({name: sampled for name, sampled in arguments.items() if unlike[name] != glue.batch})
    return arguments
