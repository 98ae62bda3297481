"""How a plan is applied to a model, in order. Each step is in the module it is imported from.

1. Prepare (``preparation``): assign layers to stages and strategies, check the plan, examine the full model.
2. Give all ranks the values of rank 0, and where ranks work on the same samples its random states (``peers``).
3. Cut this rank's stages out of the model (``stages``).
4. Split each stage (``stages.split_stage``): its layers dimension by dimension (``sharding``), then hooks between
   layers of different layouts (``activations``), and what sums gradients and updates parameters (``parameters``).
5. Join the stages into a pipeline (``stages``), and set parameters that several stages share to equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from galvatron_lite.model.graph import Layer
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.mesh import Meshes
from galvatron_lite.runtime.peers import broadcast_values, share_random_state, shares_samples
from galvatron_lite.runtime.preparation import Prepared, SetupOptions, prepare
from galvatron_lite.runtime.stages import StageRuntime, cut_stages, join_stages, split_stage, tied_before


def parallelize(
    model: nn.Module, plan: Plan, layers: Sequence[Layer], batch: Any, meshes: Meshes, options: SetupOptions
) -> list[StageRuntime]:
    """Split a model in place, and return the runtimes of this rank's stages. All ranks call it together."""
    prepared = prepare(model, plan, layers, batch, meshes.stage_index, options)
    broadcast_values(model, options.device)
    if shares_samples(plan):
        share_random_state(options.device)
    runtimes = build(model, prepared, meshes, options)
    if runtimes[0].shared is not None:
        runtimes[0].shared.start_equal()
        for runtime in runtimes:
            runtime.updates.take()
    return runtimes


def build(
    model: nn.Module,
    prepared: Prepared,
    meshes: Meshes,
    options: SetupOptions,
    place: Callable[[nn.Module, Layer], None] | None = None,
) -> list[StageRuntime]:
    """Split a full model in place, without sending values between ranks. All ranks call it together.

    ``place(model, layer)`` moves a layer to the device; default: initialise layers on the meta device.
    """
    cuts = cut_stages(model, prepared, meshes, options.device)
    runtimes: list[StageRuntime] = []
    for cut in cuts:
        place_layer = None if place is None else partial(place, cut.model)
        tied = tied_before(cut, cuts, prepared)
        stage = prepared.stages[cut.number]
        runtime = split_stage(
            cut.model, prepared.layers, stage, meshes, prepared.examined, options, cut.incoming, (), place_layer, tied
        )
        runtime.is_last = stage is prepared.stages[-1]
        runtimes.append(runtime)
    join_stages(runtimes, cuts, prepared, meshes, options)
    return runtimes
