"""Gives a layer its share of the devices that share channels: slices its weights in place, replaces forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.channel.borders import enter_layer, leave_layer
from galvatron_lite.parallelism.channel.modules import Weighted
from galvatron_lite.parallelism.channel.plan import ChannelPlan
from galvatron_lite.parallelism.channel.rules import CHANNELS_RULES, filters_rules
from galvatron_lite.parallelism.channel.split import ChannelSharing, split_module
from galvatron_lite.parallelism.cuts.line import Line
from galvatron_lite.parallelism.tensor.apply import Shards
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement


def shard_channels(layer: nn.Module, plan: ChannelPlan, line: Line) -> dict[str, ParameterShard]:
    """Splits a layer over the devices that share its channels, in place.

    Parameters stay the same objects and hold the local slice, as by ``tensor.apply.shard_layer``. Weights of
    convolutions and linears are sliced; biases, norms and all else stay whole. By ``filters`` tensors enter and leave
    the layer whole, and gradients of replicas are complete; by ``channels`` every tensor of numbers with two dims or
    more enters and leaves as this device's share along dim 1.

    Args:
        layer: a block; or one of the modules before or after the blocks, each of which has such borders.
        plan: what ``infer_channels`` found for it.
        line: the devices that share it.

    Returns:
        How each parameter lies in the whole one, by its name in ``layer``; under each, if it has several.

    Raises:
        InputError: the plan is for another number of devices.
    """
    if line.size != plan.degree:
        raise InputError(plan.by, line.size, f"Use a plan for {line.size} devices, or {plan.degree} devices.")
    sharing = ChannelSharing(plan.by, line, filters_rules() if plan.by == "filters" else CHANNELS_RULES)
    shards: Shards = {}
    if line.size > 1:
        for path, part in plan.parts.items():
            weighted: Weighted = layer.get_submodule(path)  # type: ignore[assignment]
            shards |= split_module(weighted, part, sharing)
        # what is outside, checkpointing too, sees plain tensors
        layer.forward = partial(_forward, layer.forward, sharing, plan.inputs)
    return {
        name: shards.get(id(parameter)) or _kept(parameter, name, plan, line)
        for name, parameter in layer.named_parameters(remove_duplicate=False)
    }


def _kept(parameter: nn.Parameter, name: str, plan: ChannelPlan, line: Line) -> ParameterShard:
    is_partial = line.size > 1 and (plan.by == "channels" or name in plan.partial)
    placement = Placement.PARTIAL if is_partial else Placement.REPLICATED
    return ParameterShard(placement, tuple(parameter.shape), line.size, line.rank)


def _forward(
    forward: Callable[..., Any], sharing: ChannelSharing, extents: Sequence[int], *args: Any, **kwargs: Any
) -> Any:
    entered, named = enter_layer((args, kwargs), sharing, extents)
    return leave_layer(forward(*entered, **named), sharing)
