"""How each layer of a stage whose channels the plan shares can be shared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.parallelism.channel.infer import infer_channel_edges, infer_channels
from galvatron_lite.parallelism.channel.plan import ChannelPlan
from galvatron_lite.runtime.block_calls import block_calls
from galvatron_lite.runtime.placement import Placed


def channel_plans(model: nn.Module, placed: Iterable[Placed], batch: Any) -> dict[str, ChannelPlan]:
    """Channel plans by layer name, of the layers whose strategy shares channels; equal blocks are examined once.

    Args:
        model: the whole model, on any device; not changed.
        placed: layers with their strategies.
        batch: an example batch, of which only the shapes count.

    Raises:
        InputError: a layer whose channels cannot be shared so (it is named); a block must be examined and there is no
            example batch, or it never runs.
        TraceError: the model does not run on the batch.
    """
    split = [one for one in placed if one.strategy.slices > 1]
    blocks = [one for one in split if one.layer.role is Role.BLOCK]
    calls = block_calls(model, {one.layer.name for one in blocks}, _given(batch, blocks)) if blocks else {}
    known: dict[object, ChannelPlan] = {}
    plans: dict[str, ChannelPlan] = {}
    for one in split:
        by, degree = by_of(one.strategy)
        call = calls.get(one.layer.name)
        shapes = None if call is None else tuple(tuple(tensor.shape) for tensor in call.inputs)
        key = (one.layer.kind, by, degree, shapes)
        if key not in known:
            try:
                known[key] = _examined(model, one, by, degree, call)
            except InputError as error:
                raise InputError(f"{by} of layer {one.layer.name}", degree, f"{error.field}: {error.remedy}") from error
        plans[one.layer.name] = known[key]
    return plans


def by_of(strategy: Strategy) -> tuple[str, int]:
    """What is shared, and by how many.

    Raises:
        InputError: both are.
    """
    if strategy.filters > 1 and strategy.channels > 1:
        raise InputError("filters", strategy.filters, "Share the filters of a layer or its channels, not both.")
    return ("filters", strategy.filters) if strategy.filters > 1 else ("channels", strategy.channels)


def _given(batch: Any, blocks: Iterable[Placed]) -> Any:
    if batch is None:
        name = next(one.layer.name for one in blocks)
        remedy = "The plan shares its channels; give an example batch, so that it can be examined."
        raise InputError(f"strategy of {name}", "filters or channels", remedy)
    return batch


def _examined(model: nn.Module, one: Placed, by: str, degree: int, call: Any) -> ChannelPlan:
    if one.layer.role is not Role.BLOCK:
        return infer_channel_edges({path: model.get_submodule(path) for path in one.layer.modules}, by, degree)
    if call is None:
        raise InputError("layer", one.layer.name, "It never runs on the batch; plan without sharing its channels.")
    return infer_channels(model.get_submodule(one.layer.modules[0]), call.args, call.kwargs, by, degree)
