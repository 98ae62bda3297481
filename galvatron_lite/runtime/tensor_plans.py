"""How each layer that the plan splits by tensor parallelism can be split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Role
from galvatron_lite.model.trace_run import BlockCall, block_calls
from galvatron_lite.parallelism.tensor.infer import infer_block, infer_edge
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.runtime.placement import LayerAssignment


def tensor_plans(model: nn.Module, placed: Iterable[LayerAssignment], batch: Any) -> dict[str, TensorPlan]:
    """Tensor plans by layer name, of the layers whose strategy splits them; equal blocks are examined once.

    Args:
        model: the whole model, on any device; not changed.
        placed: layers with their strategies.
        batch: an example batch, of which only the shapes count.

    Raises:
        InputError: a block must be examined and there is no example batch, or it never runs.
        TraceError: the model does not run on the batch.
    """
    split = [one for one in placed if one.strategy.tensor > 1]
    blocks = {one.layer.kind: one.layer.name for one in reversed(split) if one.layer.role is Role.BLOCK}
    calls = _calls(model, blocks, batch) if blocks else {}
    by_kind = {kind: _infer(model, calls, name) for kind, name in blocks.items()}
    plans = dict[str, TensorPlan]()
    for one in split:
        layer = one.layer
        modules = {path: model.get_submodule(path) for path in layer.modules}
        plans[layer.name] = by_kind[layer.kind] if layer.role is Role.BLOCK else infer_edge(modules, model)
    return plans


def _calls(model: nn.Module, blocks: Mapping[str, str], batch: Any) -> dict[str, BlockCall]:
    if batch is None:
        remedy = "The plan splits blocks by tensor parallelism; give an example batch, so that they can be examined."
        raise InputError("batch", None, remedy)
    return block_calls(model, list(blocks.values()), batch)


def _infer(model: nn.Module, calls: Mapping[str, BlockCall], name: str) -> TensorPlan:
    if name not in calls:
        raise InputError("layer", name, "It does not run on the example batch, so it cannot be split.")
    return infer_block(model.get_submodule(name), calls[name].args, calls[name].kwargs)
