"""How each layer of a stage whose channels the plan shares can be shared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Role
from galvatron_lite.model.trace_run import BlockCall, block_calls
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.channel.parts import ChannelPlan
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.placement import LayerAssignment


def channel_plans(model: nn.Module, placed: Iterable[LayerAssignment], batch: Any) -> dict[str, ChannelPlan]:
    """Channel plans by module path, of the layers whose strategy shares channels; equal blocks are examined once.

    Of the layers before and after the blocks, each module is examined by itself; those that have nothing to be split
    are left out, and stay whole.

    Args:
        model: the whole model, on any device; not changed.
        placed: layers with their strategies.
        batch: an example batch, of which only the shapes count.

    Raises:
        InputError: a layer whose channels cannot be shared so (it is named), or that never runs; there is no example
            batch.
        TraceError: the model does not run on the batch.
    """
    split = [one for one in placed if one.strategy.slices > 1]
    calls = (
        block_calls(model, {path for one in split for path in one.layer.modules}, _require_batch(batch))
        if split
        else {}
    )
    known: dict[object, ChannelPlan] = {}
    plans: dict[str, ChannelPlan] = {}
    for one in split:
        found = {}
        for path in one.layer.modules:
            call = calls.get(path)
            if call is None or next(model.get_submodule(path).parameters(), None) is None:
                continue
            shapes = tuple(tuple(tensor.shape) for tensor in call.inputs)
            key = (one.layer.kind if one.layer.role is Role.BLOCK else path, by_of(one.strategy), shapes)
            if key not in known:
                known[key] = _examined(model, one, call)
            found[path] = known[key]
        if not any(plan.parts for plan in found.values()):
            raise InputError(f"strategy of {one.layer.name}", str(one.strategy), "Nothing in it has channels to share.")
        plans |= found
    return plans


def by_of(strategy: Strategy) -> tuple[str, int]:
    """What is shared, and by how many.

    Raises:
        InputError: both are.
    """
    if strategy.filters > 1 and strategy.channels > 1:
        raise InputError("filters", strategy.filters, "Share the filters of a layer or its channels, not both.")
    return ("filters", strategy.filters) if strategy.filters > 1 else ("channels", strategy.channels)


def _require_batch(batch: Any) -> Any:
    if batch is None:
        raise InputError("batch", None, "The plan shares channels of layers; give an example batch to examine them on.")
    return batch


def _examined(model: nn.Module, one: LayerAssignment, call: BlockCall) -> ChannelPlan:
    by, degree = by_of(one.strategy)
    try:
        return infer_channels(model.get_submodule(call.path), call.args, call.kwargs, by, degree)
    except InputError as error:
        raise InputError(f"{by} of layer {one.layer.name}", degree, f"{error.field}: {error.remedy}") from error
