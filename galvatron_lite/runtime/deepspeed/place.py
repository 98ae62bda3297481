"""Values of a model's layers on this process's device, before DeepSpeed takes them over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from galvatron_lite.parallelism.recompute.apply import apply_recompute
from galvatron_lite.runtime.alike import broadcast_values
from galvatron_lite.runtime.materialize import InitFn, Materializer
from galvatron_lite.runtime.placement import LayerAssignment
from galvatron_lite.runtime.sharding import tied_layers


def place_model(
    model: nn.Module,
    stage: Sequence[LayerAssignment],
    device: torch.device,
    init_fn: InitFn | None,
    seed: int,
    partition: Callable[[nn.Module], None],
) -> None:
    """Give every layer values and its recomputation, one layer at a time.

    Args:
        model: changed in place.
        stage: all its layers, with what they compute again.
        device: of this process.
        init_fn, seed: of initial values; see ``Materializer``.
        partition: called for the modules of a layer that has values.
    """
    broadcast_values(model, device)
    materializer = Materializer(model, [placed.layer for placed in stage], device, seed, init_fn)
    for layers in tied_layers(model, stage):
        for placed in layers:
            materializer.place(placed.layer)
        modules = [(placed, model.get_submodule(path)) for placed in layers for path in placed.layer.modules]
        for placed, module in modules:
            apply_recompute(module, placed.strategy.recompute)
            partition(module)
